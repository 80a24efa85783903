"""The hook that keeps checkpoints, judges validations, and says which weights are to be tested."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Callable, Mapping

from exp.engine import checkpoint
from exp.engine.soundness import check_finite, what_to_do
from exp.engine.tested_weights import TestedWeights
from exp.errors import RunError

__all__ = ["CheckpointHook"]


class CheckpointHook(TestedWeights):
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
        self._due: dict[Path, dict[str, Any]] = {}  # what this rank is to write, by file
        self._writes: dict[Path, Callable[[Path, Any], None]] = {}  # and how, where it is a part
        self._saved = (-1, False, False)  # step, whether a validation is due, whether the training was stopped

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
        runner.checkpoint_writer.check()
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
            raise RunError(f"validation {self.metric} is {value} after step {runner.iter}; {what_to_do(runner)}")
        self.last, self.last_step = value, runner.iter
        if self.best is None or self.sign * value < self.sign * self.best:
            self.best, self.best_epoch, self.best_step = value, runner.epoch, runner.iter
            if self.keep_best:
                takes_part = runner.distributed_group.is_main or runner.sharded_saver is not None
                content = runner.weights_checkpoint() if takes_part else {}
                check_finite(runner, content.get("state_dict"), runner.iter)
                if content:
                    content["meta"]["validation"] = {self.metric: value}
                    self._prepare(runner, self.best_path, content)
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
        self._write(runner)

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
        self.save(runner, runner.iter, waits=True)

    def save(
        self, runner: Any, step: int, validation_due: bool = False, epoch_ended: bool = False, waits: bool = False
    ) -> None:
        """Have a checkpoint written in the background, unless it is that of the last call. A collective.

        Args:
            runner: the runner.
            step: optimizer steps completed.
            validation_due: whether a validation is to be made before training goes on.
            epoch_ended: whether the hooks have been told of the end of the epoch already.
            waits: return when it is on the disk: nothing is trained after it.

        Raises:
            RunError: the weights are not finite.
            OSError: this checkpoint (where ``waits``), or the one before, could not be written.
        """
        state = (step, validation_due, runner.train_loop.stop_training)
        if state != self._saved:
            self._saved = state
            content = runner.training_checkpoint(step, self.state_dict(), validation_due)
            if epoch_ended:
                content["meta"].update(epoch=runner.epoch + 1, samples=0)
            check_finite(runner, content["state_dict"], step)
            self._prepare(runner, self._path(step), content)
            self._write(runner)
        if waits:
            runner.checkpoint_writer.wait()

    def _prepare(self, runner: Any, path: Path, content: dict[str, Any]) -> None:
        """Note what of a checkpoint this rank writes. A collective where the model is sharded."""
        saver = runner.sharded_saver
        if saver is not None:
            runner.checkpoint_writer.wait()  # it removes what lies beside the file that it takes the place of
            prepare = saver.best if path == self.best_path else saver.training
            self._due[path], self._writes[path] = prepare(path, content)
        elif runner.distributed_group.is_main:
            self._due[path] = content

    def _write(self, runner: Any) -> None:
        """Have what is due written; files of one call share the copy of the weights."""
        due, self._due = self._due, {}
        writes, self._writes = self._writes, {}
        if due:
            names = [path.name for path in due if path != self.best_path]
            then = functools.partial(self._written, names) if runner.distributed_group.is_main else None

            def write(path: Path, copied: Any) -> None:
                writes[path](path, copied) if path in writes else checkpoint.write(path, copied)

            runner.checkpoint_writer.start(due, runner.optim_wrapper, runner.weights_wait_for_update, write, then)

    def _written(self, names: list[str]) -> None:
        """Called in the background once files are on the disk: only now may older ones go."""
        if names:
            self._known.update(names)
            checkpoint.prune(self.folder, self.keep_last, self._known)

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
