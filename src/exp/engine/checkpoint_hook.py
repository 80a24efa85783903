"""The hook that keeps checkpoints, judges validations, and says which weights are to be tested."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any, Mapping

from mmengine.hooks import Hook

from exp.engine import checkpoint
from exp.engine.soundness import check_finite, what_to_do
from exp.errors import CheckpointError, RunError

__all__ = ["CheckpointHook"]

logger = logging.getLogger(__name__)


class CheckpointHook(Hook):
    """Keeps the best and the newest checkpoints, and stops a run that no longer gets better.

    Best and early stopping live here together, because both are part of what a resumed run must know.

    Args:
        folder: ``checkpoints/``.
        config: :class:`exp.config.schema.CheckpointConfig`.
        patience: validations without a better metric after which training stops; None: never.
        min_delta: relative improvement that counts as better for ``patience``.
        metric: the validation metric.
        greater_is_better: whether larger values of it are better.
    """

    priority = "VERY_LOW"  # after the schedulers, so that their new state is in the file

    def __init__(
        self,
        folder: Path,
        config: Any,
        patience: int | None,
        min_delta: float,
        metric: str,
        greater_is_better: bool = False,
    ) -> None:
        self.folder = folder
        # Read once: an access to the configuration costs as much as a small kernel.
        self.every_steps: int = config.every_steps
        self.every_epochs: int = config.every_epochs
        self.keep_last: int = config.keep_last
        self.keep_best: bool = config.keep_best
        self.patience = patience
        self.min_delta = min_delta
        self.metric = metric
        self.sign = -1.0 if greater_is_better else 1.0  # of what is to be small
        self.best: float | None = None
        self.best_epoch = 0
        self.best_step: int | None = None
        self.last: float | None = None  # of the latest validation
        self.last_step: int | None = None
        self.reference: float | None = None  # the last value that was better by min_delta
        self.bad_epochs = 0
        self.source: Path | None = None  # what this attempt goes on from
        self._known: set[str] = set()  # names of checkpoints in the folder that it has written or read
        self._saved = (-1, False)

    @property
    def best_path(self) -> Path:
        """Where the best weights lie."""
        return self.folder / "best.pth"

    def before_train(self, runner: Any) -> None:
        """Remove what a killed writer left; once the run has started, set aside what it does not go on from."""
        if runner.distributed_group.is_main:
            checkpoint.remove_stale_temporaries(self.folder)
        begins_at = runner.iter
        runner.session.when_started(lambda: self._set_aside(runner, begins_at))

    def _set_aside(self, runner: Any, begins_at: int) -> None:
        """Steps after the one at which this attempt begins, and best weights that it knows nothing of.

        Left where they are, they would be taken for the newest.
        """
        own = self.source is not None and self.source.resolve().parent == self.folder.resolve()
        paths = [
            path
            for path in checkpoint.list_checkpoints(self.folder)
            if path.name not in self._known and (not own or checkpoint.step_of(path) > begins_at)
        ]
        if not (self.keep_best and self.best is not None) and self.best_path.is_file():
            paths.append(self.best_path)
        if paths:
            checkpoint.set_aside(paths)
            runner.session.say(
                f"checkpoints that this run does not go on from are in {self.folder.name}/{checkpoint.SET_ASIDE} now: "
                + ", ".join(path.name for path in paths)
            )

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save within the epoch."""
        if not self.every_steps:
            return
        step = runner.iter + 1
        # Where a validation follows, the checkpoint waits for it.
        if step % self.every_steps == 0 and not runner.train_loop.validates_after(step, batch_idx):
            self.save(runner, step)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Judge the weights, then save."""
        value = (metrics or {})[self.metric]
        if not math.isfinite(value):
            raise RunError(
                f"validation {self.metric} is {value} after step {runner.iter}; {what_to_do(runner.session)}"
            )
        self.last, self.last_step = value, runner.iter
        if self.best is None or self.sign * value < self.sign * self.best:
            self.best, self.best_epoch, self.best_step = value, runner.epoch, runner.iter
            if self.keep_best:
                content = runner.weights_checkpoint() if runner.distributed_group.is_main else {}
                check_finite(runner, content.get("state_dict"), runner.iter)
                if content:
                    content["meta"]["validation"] = {self.metric: value}
                    checkpoint.write(self.best_path, content)
        if self.reference is None or self._gained(value, self.reference):
            self.reference, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
            if self.patience is not None and self.bad_epochs >= self.patience:
                runner.train_loop.stop_training = True
        at_steps = self.every_steps and runner.iter % self.every_steps == 0
        at_epochs = runner.train_loop.val_every is None and self._epoch_is_saved(runner.epoch)
        if at_steps or at_epochs:
            self.save(runner, runner.iter)

    def after_train_epoch(self, runner: Any) -> None:
        """Save at the end of an epoch where no validation follows, which would do it."""
        loop = runner.train_loop
        if loop.val_every is not None and self._epoch_is_saved(runner.epoch + 1):
            self.save(runner, runner.iter, epoch_ended=True)

    def _epoch_is_saved(self, epoch: int) -> bool:
        return bool(self.every_epochs) and epoch % self.every_epochs == 0

    def _gained(self, value: float, reference: float) -> bool:
        return self.sign * value < self.sign * reference - self.min_delta * abs(reference)

    def after_train(self, runner: Any) -> None:
        """The last state is always kept."""
        self.save(runner, runner.iter)

    def save(self, runner: Any, step: int, validation_due: bool = False, epoch_ended: bool = False) -> None:
        """Write a checkpoint, unless the same one has been written. A collective.

        Args:
            runner: the runner.
            step: optimizer steps completed.
            validation_due: whether a validation is to be made before training goes on.
            epoch_ended: whether the hooks have been told of the end of the epoch already.

        Raises:
            RunError: the weights are not finite.
        """
        if (step, validation_due) == self._saved:
            return
        self._saved = (step, validation_due)
        content = runner.training_checkpoint(step, self.state_dict(), validation_due)
        if epoch_ended:
            content["meta"].update(epoch=runner.epoch + 1, samples=0)
        check_finite(runner, content["state_dict"], step)
        if runner.distributed_group.is_main:
            path = self._path(step)
            checkpoint.write(path, content)
            self._known.add(path.name)
            checkpoint.prune(self.folder, self.keep_last, self._known)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pth"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know of the epochs before it."""
        return {
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_step": self.best_step,
            "last": self.last,
            "last_step": self.last_step,
            "reference": self.reference,
            "bad_epochs": self.bad_epochs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.best, self.best_epoch = state["best"], state["best_epoch"]
        self.best_step = state.get("best_step")  # older checkpoints do not tell
        self.last, self.last_step = state.get("last"), state.get("last_step")
        self.reference, self.bad_epochs = state["reference"], state["bad_epochs"]

    # -- which weights are the best, and which are tested --------------------------------------------------------------

    def take_over_best(self, runner: Any, source: Path) -> None:
        """After resuming, have the best weights so far in this folder, or forget how good they were. A collective.

        What is tested in the end has to be what the reported validation belongs to.

        Args:
            runner: the runner.
            source: the checkpoint that the run goes on from; the best weights lie beside it.
        """
        self.source = source
        if source.resolve().parent == self.folder.resolve():
            self._known.add(source.name)
        if self.keep_best and self.best is not None:
            trouble = None
            if runner.distributed_group.is_main:
                path = source.parent / self.best_path.name
                content, trouble = self._read_best(path)
                if trouble is None and path.absolute() != self.best_path.absolute():
                    runner.session.when_started(lambda: checkpoint.write(self.best_path, content))
            self._forget_if(runner, trouble)
        judged = self.best is not None if self.keep_best else self.last_step == runner.iter
        if not judged and runner.train_loop.finished:
            runner.train_loop.validation_due = True  # no step will bring one

    def tested(self, runner: Any) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
        """What is to be tested once training has ended. A collective.

        Returns:
            The checkpoint to load (None: the weights that the model has), and for ``result.json``: the file, its epoch
            and step, and the validation that belongs to these very weights (None where they have not been validated).
        """
        group = runner.distributed_group
        group.barrier()  # rank 0 has written it
        if self.keep_best and self.best is not None:
            content, trouble = self._read_best(self.best_path) if group.is_main else (None, None)
            if not self._forget_if(runner, trouble):
                content = checkpoint.read(self.best_path) if content is None else content
                meta = content["meta"]
                return content, self._record(f"{self.folder.name}/best.pth", meta["epoch"], meta["step"], self.best)
        step, content = runner.iter, None
        if runner.changes_checkpoints and self._path(step).is_file():
            content = checkpoint.read(self._path(step))  # such as the weights that a hook has averaged
        value = self.last if self.last_step == step else None
        return content, self._record(f"last weights, step {step}", runner.epoch, step, value)

    def _record(self, name: str, epoch: int, step: int, value: float | None) -> dict[str, Any]:
        return {
            "tested_checkpoint": name,
            "tested_epoch": int(epoch),
            "tested_step": int(step),
            "best_epoch": int(epoch),
            "validation": {self.metric: value},
        }

    def _read_best(self, path: Path) -> tuple[Any, str | None]:
        """The best weights in ``path``, or why they are not those that are remembered."""
        try:
            content = checkpoint.read(path)
            meta = content["meta"]
            found = (meta["epoch"], meta["step"], meta.get("validation", {}).get(self.metric, self.best))
        except CheckpointError as error:
            return None, str(error).splitlines()[0]
        except (AttributeError, KeyError, TypeError):
            return None, f"{path} is not one of exp's checkpoints"
        wanted = (self.best_epoch, found[1] if self.best_step is None else self.best_step, self.best)
        if found != wanted:
            return None, f"{path} has those of step {found[1]} ({self.metric} {found[2]})"
        return content, None

    def _forget_if(self, runner: Any, trouble: str | None) -> bool:
        """Forget the best where rank 0 found trouble with it, on all ranks alike."""
        trouble = runner.distributed_group.gather(trouble)[0]
        if trouble is None:
            return False
        text = (
            f"the best weights so far ({self.metric} {self.best:.6g} after epoch {self.best_epoch}) are lost and no "
            f"longer count: {trouble}"
        )
        logger.warning(text)
        if runner.session.console is not None:
            runner.session.console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)
        self.best, self.best_epoch, self.best_step = None, 0, None
        return True
