"""Decides which checkpoints of a training are written, kept and tested, and when it stops early."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from mmengine.hooks import Hook

from exp.data.fingerprint import shortened
from exp.engine.checkpoint.reader import (
    BEST_NAME,
    list_checkpoints,
    nonfinite_tensors,
    read_checkpoint,
    shard_folders,
    step_of,
)
from exp.engine.checkpoint.writer import write_checkpoint
from exp.engine.wrapper import unwrapped
from exp.errors import RunError
from exp.runs.folder import QUARANTINE

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig


_STATE_KEYS = ("best", "best_epoch", "best_step", "last", "last_step", "reference", "bad_epochs")
"""Attributes of :class:`CheckpointHook` with the results of earlier validations, which every checkpoint contains."""


class CheckpointHook(Hook):
    """Writes checkpoints, keeps the newest and the best, and stops a training that no longer improves.

    The best checkpoint and early stopping are in one hook, because a resumed run needs the state of both.

    Args:
        config: the whole configuration.
        folder: the folder of the checkpoints.
        metric: name of the main metric.
        greater_is_better: whether larger values of it are better.
    """

    priority = "VERY_LOW"  # after the schedulers, so that their new state is in the file

    def __init__(self, config: ExpConfig, folder: Path, metric: str = "", greater_is_better: bool = False) -> None:
        self.folder, self.best_path = folder, folder / BEST_NAME
        # Read once, because an access to an OmegaConf key takes as long as a small kernel.
        keys = config.checkpoint
        self.every_steps, self.every_epochs = keys.every_steps, keys.every_epochs
        self.keep_last, self.keep_best, self.trusted = keys.keep_last, keys.keep_best, keys.trusted
        self.patience, self.min_delta = config.patience, config.min_delta
        self.metric = metric
        self.sign = -1.0 if greater_is_better else 1.0  # smaller values of sign * metric are better
        self.best: float | None = None
        self.best_epoch, self.best_step = 0, 0
        self.last: float | None = None  # value of the latest validation
        self.last_step: int | None = None
        self.reference: float | None = None  # the last value that was better by min_delta
        self.bad_epochs = 0  # validations since then
        self._resumed_here = False  # whether this run has resumed from a checkpoint in this folder
        self._saved = (-1, False, False)  # step, whether a validation is due, whether the training was stopped

    def state_dict(self) -> dict[str, Any]:
        """The results of earlier validations, for a resumed run."""
        return {name: getattr(self, name) for name in _STATE_KEYS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.__dict__.update((name, state[name]) for name in _STATE_KEYS if name in state)

    # -- when something is saved -----------------------------------------------------------------------------------

    def before_train(self, runner: Any) -> None:
        """Remove incomplete files; once the run has started, set aside checkpoints that do not belong to it."""
        if runner.distributed_group.is_main:
            remove_leftovers(self.folder)
        runner.session.on_start(functools.partial(self._quarantine, runner.iter, runner.session.print))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save every ``every_steps`` steps; if a validation follows this step, :meth:`after_val_epoch` saves."""
        runner.checkpoint_writer.check()
        step = runner.iter + 1
        if self.every_steps and step % self.every_steps == 0 and not runner.train_loop.validates_after(step, batch_idx):
            self.save(runner, step)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Compare the metric with earlier validations, save, and stop the training if it no longer improves.

        Raises:
            RunError: the metric is not finite.
        """
        value = (metrics or {})[self.metric]
        if not math.isfinite(value):
            finding = f"validation {self.metric} is {value} after step {runner.iter}"
            raise RunError(finding, *runner.divergence_advice())
        self.last, self.last_step = value, runner.iter
        best: dict[Path, Any] = {}
        if self.best is None or self.sign * value < self.sign * self.best:
            self.best, self.best_epoch, self.best_step = value, runner.epoch, runner.iter
            if self.keep_best:
                content = runner.weights(runner.iter)
                content["meta"]["validation"] = {self.metric: value}
                if runner.distributed_group.is_main:
                    runner.run_save_hooks(content)
                check_finite(runner, content["state_dict"], runner.iter)
                best[self.best_path] = content
        least = None if self.reference is None else self.sign * self.reference - self.min_delta * abs(self.reference)
        self.bad_epochs += 1
        if least is None or self.sign * value < least:
            self.reference, self.bad_epochs = value, 0
        elif self.patience is not None and self.bad_epochs >= self.patience:
            runner.train_loop.stop_training = True
        at_steps = self.every_steps and runner.iter % self.every_steps == 0
        if at_steps or (runner.train_loop.val_every is None and self._epoch_is_saved(runner.epoch)):
            self.save(runner, runner.iter, extra_files=best)
        elif best:
            runner.checkpoint_writer.start(best, self._prune)

    def after_train_epoch(self, runner: Any) -> None:
        """Save at the end of an epoch, if ``val_every`` is set; otherwise :meth:`after_val_epoch` saves."""
        if runner.train_loop.val_every is not None and self._epoch_is_saved(runner.epoch + 1):
            self.save(runner, runner.iter, epoch_ended=True)

    def _epoch_is_saved(self, epoch: int) -> bool:
        return bool(self.every_epochs) and epoch % self.every_epochs == 0

    def after_train(self, runner: Any) -> None:
        """Save the final state, and wait until it is on the disk."""
        self.save(runner, runner.iter, wait=True)

    def save(
        self,
        runner: Any,
        step: int,
        validation_due: bool = False,
        epoch_ended: bool = False,
        wait: bool = False,
        extra_files: Mapping[Path, Any] | None = None,
    ) -> None:
        """Write a checkpoint in the background, unless the last call was for the same state. A collective.

        Args:
            runner: the runner.
            step: optimizer steps completed.
            validation_due: whether a resumed run starts with a validation.
            epoch_ended: whether to save the position as the start of the next epoch.
            wait: return only when the checkpoint is on the disk, because no training follows.
            extra_files: other files to write with it.

        Raises:
            RunError: weights or losses are not finite.
            OSError: the checkpoint before, or this one if ``wait``, could not be written.
        """
        files = dict(extra_files or {})
        state = (step, validation_due, runner.train_loop.stop_training)
        if state != self._saved:
            self._saved = state
            content = runner.training_checkpoint(step, self.state_dict(), validation_due)
            if epoch_ended:
                content["meta"].update(epoch=runner.epoch + 1, samples=0)
            check_finite(runner, content["state_dict"], step)
            files[self._path(step)] = content
        if files:
            runner.checkpoint_writer.start(files, self._prune)
        if wait:
            runner.checkpoint_writer.wait()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pth"

    def _prune(self) -> None:
        """Remove older files; called in the background once the new ones are on the disk."""
        prune_checkpoints(self.folder, self.keep_last)

    # -- earlier checkpoints, and the weights to test --------------------------------------------------------------

    def _quarantine(self, begins_at: int, report: Callable[[str], object]) -> None:
        """Set aside checkpoints in this folder that do not belong to this run, and best weights of another run.

        If the run has resumed from a checkpoint in this folder, these are the checkpoints of later steps, else all. The
        next resume would take them for the newest.
        """
        steps = list_checkpoints(self.folder)
        paths = [path for path in steps if not self._resumed_here or step_of(path) > begins_at]
        if not (self.keep_best and self.best is not None) and self.best_path.is_file():
            paths.append(self.best_path)
        if paths:
            quarantine(paths)
            report(
                f"moved checkpoints that do not belong to this run to {self.folder.name}/{QUARANTINE}: "
                + ", ".join(path.name for path in paths)
            )

    def restore_best(self, runner: Any, source: Path) -> None:
        """After resuming, copy the best weights so far into this folder; if they are missing, forget their metric.

        The tested weights must be those to which the reported validation belongs. A collective.

        Args:
            runner: the runner.
            source: the checkpoint from which the run resumes; the best weights are beside it, in ``best.pth``.

        Raises:
            CheckpointError: the best weights are damaged; the user may still be able to restore them.
        """
        self._resumed_here = source.resolve().parent == self.folder.resolve()
        if self.keep_best and self.best is not None:
            path = source.parent / self.best_path.name
            content: Any = {}
            if runner.distributed_group.is_main and path.is_file():
                content = read_checkpoint(path, trusted=self.trusted)
            meta = content.get("meta", {})
            position = (meta.get("epoch"), meta.get("step"), meta.get("validation", {}).get(self.metric))
            is_intact = runner.distributed_group.gather(position == (self.best_epoch, self.best_step, self.best))[0]
            if not is_intact:
                runner.session.print(
                    f"warning: the best weights so far ({self.metric} {self.best:.6g} after step {self.best_step}) are "
                    f"lost and no longer count: {path} does not exist, or is of another step"
                )
                self.best, self.best_epoch, self.best_step = None, 0, 0
            elif not self._resumed_here:
                runner.session.on_start(
                    functools.partial(write_checkpoint, self.best_path, content, runner.session.run_id)
                )
        is_validated = self.best is not None if self.keep_best else self.last_step == runner.iter
        if not is_validated and runner.train_loop.finished:
            runner.train_loop.validation_due = True  # no step is left after which one would come

    def select_test_weights(self, runner: Any) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
        """Choose the weights to test at the end of a training: the best, or else the last. A collective.

        Returns:
            The checkpoint to load (None: the model has these weights already), and entries of ``result.json``: the
            file, its epoch and step, under ``validation`` the metric of these weights (None: not validated), and the
            epoch of the best validation, which may be another one with ``checkpoint.keep_best=false``.
        """
        runner.checkpoint_writer.wait()
        runner.distributed_group.barrier()  # other ranks must not read before rank 0 has written
        epoch, step, path, value = runner.epoch, runner.iter, self._path(runner.iter), self.last
        name = f"last weights, step {step}"
        if self.keep_best and self.best is not None:
            epoch, step, path, value = self.best_epoch, self.best_step, self.best_path, self.best
            name = f"{self.folder.name}/best.pth"
        elif self.last_step != step:
            value = None
        content: Any = None
        # The model has the last weights, but a hook may have saved others instead, such as averaged ones.
        if path is self.best_path or (runner.user_hooks_overriding("before_save_checkpoint") and path.is_file()):
            content = read_checkpoint(path, mapped=True, with_shards=False, check=runner.distributed_group.is_main)
        record = {"tested_checkpoint": name, "tested_epoch": epoch, "tested_step": step}
        best_epoch = None if self.best is None else self.best_epoch
        return content, {**record, "best_epoch": best_epoch, "validation": {self.metric: value}}


def check_finite(runner: Any, state: Mapping[str, Any], step: int) -> None:
    """Refuse to save weights that are not finite, or that follow losses that are not finite. A collective.

    The losses since the last reading are checked, too, because the run would fail at the next reading.

    Args:
        runner: the runner.
        state: the state dict to be saved.
        step: optimizer steps completed.

    Raises:
        RunError: a tensor is not finite; the message has step, rank and the first such tensor. Raised on every rank.
    """
    losses = {f"the {name} since the last reading": value for name, value in runner.losses.totals().items()}
    watched = {name for name, _ in unwrapped(runner.model).named_parameters()} | set(losses)
    by_rank = runner.distributed_group.gather(nonfinite_tensors({**losses, **state}, watched))
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    if ranks:
        raise RunError(
            f"not finite after step {step}: {shortened(by_rank[ranks[0]], 1)}, on rank {shortened(ranks)}; the weights "
            "are not saved",
            *runner.divergence_advice(),
            rank=ranks[0],
        )


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` files ``step_*.pth``, with their shards; at least one stays."""
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink()
        for shards in shard_folders(path):
            shutil.rmtree(shards)


def quarantine(paths: Sequence[Path]) -> None:
    """Move checkpoints into the folder :data:`QUARANTINE` beside them, in which no run looks for checkpoints."""
    for path in paths:
        folder = path.parent / QUARANTINE
        folder.mkdir(exist_ok=True)
        for source in [*shard_folders(path), path]:  # the file last: remove_leftovers deletes shards without a file
            if (folder / source.name).is_dir():
                shutil.rmtree(folder / source.name)  # from an earlier call, with the same step
            source.replace(folder / source.name)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and incomplete shards of a killed process. Call it only while no rank writes."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
    for path in folder.glob("*.shards*"):
        if not path.with_suffix(".pth").is_file():
            shutil.rmtree(path)
