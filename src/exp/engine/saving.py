"""When a training is saved, what is kept of it, and how its state gets to the disk while it goes on.

The state is copied to host memory between two steps, page-locked where the backend has that, and a thread writes the
copy. What is not finite is never saved.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping

import torch
import torch.distributed as dist
from mmengine.hooks import Hook

from exp import console
from exp.data.places import shortened
from exp.engine import checkpoint
from exp.engine.fsdp import is_sharded, sharded_like
from exp.engine.wrapper import unwrapped
from exp.errors import RunError
from exp.runs.status import Stage, beat
from exp.task import to_continue

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = ["CheckpointHook", "CheckpointWriter", "ShardedSaver", "check_finite", "what_to_do"]

logger = logging.getLogger(__name__)

Files = Mapping[Path, "tuple[Any, Callable[[Path, Any], object]]"]
"""What files are to hold, and what writes a copy of that which nothing else refers to."""

_VERDICTS = ("best", "best_epoch", "best_step", "last", "last_step", "reference", "bad_epochs")
"""What a resumed run must know of the validations before it: attributes of the hook."""


class CheckpointHook(Hook):
    """Keeps the best and the newest checkpoints, and stops a run that no longer gets better.

    Best and early stopping live here together, because both are part of what a resumed run must know.

    Args:
        session: has the configuration and the run folder.
        metric: the validation metric.
        greater_is_better: whether larger values of it are better.
    """

    priority = "VERY_LOW"  # after the schedulers, so that their new state is in the file

    def __init__(self, session: Session, metric: str = "", greater_is_better: bool = False) -> None:
        config, self.folder = session.config, session.folder.checkpoints
        self.best_path = self.folder / "best.pth"
        # Read once: an access to the configuration costs as much as a small kernel.
        self.every_steps: int = config.checkpoint.every_steps
        self.every_epochs: int = config.checkpoint.every_epochs
        self.keep_last: int = config.checkpoint.keep_last
        self.keep_best: bool = config.checkpoint.keep_best
        self.patience, self.min_delta = config.patience, config.min_delta
        self.metric = metric
        self.sign = -1.0 if greater_is_better else 1.0  # of what is to be small
        self.best: float | None = None
        self.best_epoch, self.best_step = 0, 0
        self.last: float | None = None  # of the latest validation
        self.last_step: int | None = None
        self.reference: float | None = None  # the last value that was better by min_delta
        self.bad_epochs = 0
        self._resumed_here = False  # whether this attempt goes on from a checkpoint of this folder
        self._sharded: ShardedSaver | None = None  # writes this rank's part of a sharded model
        self._saved = (-1, False, False)  # step, whether a validation is due, whether the training was stopped

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know of the validations before it."""
        return {name: getattr(self, name) for name in _VERDICTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.__dict__.update((name, state[name]) for name in _VERDICTS if name in state)

    # -- when something is saved -----------------------------------------------------------------------------------

    def before_train(self, runner: Any) -> None:
        """Remove what a killed writer left; once the run has started, set aside what it does not go on from."""
        self._sharded = ShardedSaver(runner.distributed_group) if is_sharded(unwrapped(runner.model)) else None
        if runner.distributed_group.is_main:
            checkpoint.remove_leftovers(self.folder)
        runner.session.when_started(functools.partial(self._set_aside, runner.session, runner.iter))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Save within the epoch; where a validation follows, the checkpoint waits for it."""
        runner.checkpoint_writer.check()
        step = runner.iter + 1
        if self.every_steps and step % self.every_steps == 0 and not runner.train_loop.validates_after(step, batch_idx):
            self.save(runner, step)

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Judge the weights, then save."""
        value = (metrics or {})[self.metric]
        if not math.isfinite(value):
            raise RunError(f"validation {self.metric} is {value} after step {runner.iter}; {what_to_do(runner)}")
        self.last, self.last_step = value, runner.iter
        best: Files = {}
        if self.best is None or self.sign * value < self.sign * self.best:
            self.best, self.best_epoch, self.best_step = value, runner.epoch, runner.iter
            if self.keep_best:
                content = runner.weights(runner.iter)
                content["meta"]["validation"] = {self.metric: value}
                if runner.distributed_group.is_main:
                    runner.let_hooks_change(content)
                best = self._file(runner, self.best_path, content)
        least = None if self.reference is None else self.sign * self.reference - self.min_delta * abs(self.reference)
        self.bad_epochs += 1
        if least is None or self.sign * value < least:
            self.reference, self.bad_epochs = value, 0
        elif self.patience is not None and self.bad_epochs >= self.patience:
            runner.train_loop.stop_training = True
        at_steps = self.every_steps and runner.iter % self.every_steps == 0
        if at_steps or (runner.train_loop.val_every is None and self._epoch_is_saved(runner.epoch)):
            self.save(runner, runner.iter, beside=best)
        else:
            self._write(runner, best)

    def after_train_epoch(self, runner: Any) -> None:
        """Save at the end of an epoch where no validation follows, which would do it."""
        if runner.train_loop.val_every is not None and self._epoch_is_saved(runner.epoch + 1):
            self.save(runner, runner.iter, epoch_ended=True)

    def _epoch_is_saved(self, epoch: int) -> bool:
        return bool(self.every_epochs) and epoch % self.every_epochs == 0

    def after_train(self, runner: Any) -> None:
        """The last state is always kept."""
        self.save(runner, runner.iter, waits=True)

    def save(
        self,
        runner: Any,
        step: int,
        validation_due: bool = False,
        epoch_ended: bool = False,
        waits: bool = False,
        beside: Files | None = None,
    ) -> None:
        """Have a checkpoint written in the background, unless it is that of the last call. A collective.

        Args:
            runner: the runner.
            step: optimizer steps completed.
            validation_due: whether a validation is to be made before training goes on.
            epoch_ended: whether the hooks have been told of the end of the epoch already.
            waits: return when it is on the disk: nothing is trained after it.
            beside: what is written with it.

        Raises:
            RunError: the weights are not finite.
            OSError: this checkpoint (where ``waits``), or the one before, could not be written.
        """
        files = dict(beside or {})
        state = (step, validation_due, runner.train_loop.stop_training)
        if state != self._saved:
            self._saved = state
            content = runner.training_checkpoint(step, self.state_dict(), validation_due)
            if epoch_ended:
                content["meta"].update(epoch=runner.epoch + 1, samples=0)
            files.update(self._file(runner, self._path(step), content))
        self._write(runner, files)
        if waits:
            runner.checkpoint_writer.wait()

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pth"

    def _file(self, runner: Any, path: Path, content: dict[str, Any]) -> Files:
        """What this rank is to write of a checkpoint; its weights are finite. A collective."""
        check_finite(runner, content["state_dict"], content["meta"]["step"])
        if self._sharded is not None:
            return {path: self._sharded.prepare(content)}
        return {path: (content, checkpoint.write)} if runner.distributed_group.is_main else {}

    def _write(self, runner: Any, files: Files) -> None:
        if files:
            runner.checkpoint_writer.start(files, self._written if runner.distributed_group.is_main else None)

    def _written(self) -> None:
        """Called in the background once files are on the disk: only now may older ones go."""
        checkpoint.prune(self.folder, self.keep_last)

    # -- what was there before, and what is tested -----------------------------------------------------------------

    def _set_aside(self, session: Session, begins_at: int) -> None:
        """Steps after the one at which this attempt begins, and best weights that it knows nothing of.

        Left where they are, they would be taken for the newest.
        """
        steps = checkpoint.list_checkpoints(self.folder)
        paths = [path for path in steps if not self._resumed_here or checkpoint.step_of(path) > begins_at]
        if not (self.keep_best and self.best is not None) and self.best_path.is_file():
            paths.append(self.best_path)
        if paths:
            checkpoint.set_aside(paths)
            session.say(
                f"checkpoints that this run does not go on from are in {self.folder.name}/{checkpoint.SET_ASIDE} now: "
                + ", ".join(path.name for path in paths)
            )

    def take_over_best(self, runner: Any, source: Path) -> None:
        """After resuming, have the best weights so far in this folder, or forget how good they were. A collective.

        What is tested in the end has to be what the reported validation belongs to.

        Args:
            runner: the runner.
            source: the checkpoint that the run goes on from; the best weights lie beside it.

        Raises:
            CheckpointError: the best weights are damaged: what was judged would be lost without a need.
        """
        self._resumed_here = source.resolve().parent == self.folder.resolve()
        if self.keep_best and self.best is not None:
            path = source.parent / self.best_path.name
            content: Any = {}
            if runner.distributed_group.is_main and path.is_file():
                content = checkpoint.read(path)
            meta = content.get("meta", {})
            found = (meta.get("epoch"), meta.get("step"), meta.get("validation", {}).get(self.metric))
            there = runner.distributed_group.gather(found == (self.best_epoch, self.best_step, self.best))[0]
            if not there:
                runner.session.say(
                    f"warning: the best weights so far ({self.metric} {self.best:.6g} after step {self.best_step}) are "
                    f"lost and no longer count: {path} is not there, or of another step"
                )
                self.best, self.best_epoch, self.best_step = None, 0, 0
            elif not self._resumed_here:
                runner.session.when_started(functools.partial(checkpoint.write, self.best_path, content))
        judged = self.best is not None if self.keep_best else self.last_step == runner.iter
        if not judged and runner.train_loop.finished:
            runner.train_loop.validation_due = True  # no step will bring one

    def tested(self, runner: Any) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
        """What is to be tested once training has ended. A collective.

        Returns:
            The checkpoint to load (None: the weights that the model has), and for ``result.json``: the file, its epoch
            and step, and the validation that belongs to these very weights (None where they have not been validated).
        """
        runner.checkpoint_writer.wait()
        runner.distributed_group.barrier()  # rank 0 has written it
        epoch, step, path, value = runner.epoch, runner.iter, self._path(runner.iter), self.last
        name = f"last weights, step {step}"
        if self.keep_best and self.best is not None:
            epoch, step, path, value = self.best_epoch, self.best_step, self.best_path, self.best
            name = f"{self.folder.name}/best.pth"
        elif self.last_step != step:
            value = None
        content: Any = None
        # The last weights are those of the model, but where a hook has put others there, such as averaged ones.
        if path is self.best_path or (runner.hooks_at("before_save_checkpoint") and path.is_file()):
            content = checkpoint.read(path, mapped=True, whole=False, check=runner.distributed_group.is_main)
        record = {"tested_checkpoint": name, "tested_epoch": epoch, "tested_step": step, "best_epoch": epoch}
        return content, {**record, "validation": {self.metric: value}}


class CheckpointWriter:
    """Writes checkpoints one after another in the background, from one copy of the state in host memory.

    Its methods are called by one thread, and are no collectives.

    Args:
        backend: tells whether there is page-locked memory, and waits until the device has filled it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Kept from one checkpoint to the next: new memory costs more than a copy.
        self._buffers: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, files: Files, then: Callable[[], object] | None = None) -> None:
        """Copy what is to be written, and return; waits for the checkpoint before, if that is still being written.

        Args:
            files: what they are to hold (see :func:`exp.engine.checkpoint.plain`), and what writes a copy of it, in the
                background.
            then: called in the background when all of them are on the disk.

        Raises:
            TypeError: something is not plain data.
            Exception: what went wrong with the checkpoint before.
        """
        beat(Stage.CHECKPOINT)
        self.wait()
        pinned = self._backend.capabilities.pinned_memory
        used: defaultdict[Any, int] = defaultdict(int)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            kind = tensor.dtype, tensor.shape
            if used[kind] == len(self._buffers[kind]):
                self._buffers[kind].append(torch.empty_like(tensor, device="cpu", pin_memory=pinned))
            used[kind] += 1
            return self._buffers[kind][used[kind] - 1].copy_(tensor, non_blocking=pinned)

        copies = {path: (checkpoint.plain(content, copied), write) for path, (content, write) in files.items()}
        self._backend.synchronize()
        # A daemon: a disk that hangs must not keep a process from ending that was told to.
        self._thread = threading.Thread(target=self._run, args=(copies, then), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, files: Files, then: Callable[[], object] | None) -> None:
        try:
            for path, (content, write) in files.items():
                try:
                    write(path, content)
                except OSError as error:
                    error.filename = error.filename or str(path)  # it is told later, from a step that did nothing wrong
                    raise
            if then is not None:
                then()
        except Exception as error:  # noqa: BLE001 - told by the thread that trains
            self._error = error

    def check(self) -> None:
        """Raise what went wrong in the background, if anything has; does not wait."""
        if self._error is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            Exception: what went wrong, once.
        """
        if self._thread is not None:
            beat(Stage.CHECKPOINT)
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, at the end of a training that has failed, too: what is being written is good. Logs what goes wrong."""
        try:
            self.wait()
        except Exception:
            logger.exception("the last checkpoint is not saved")
        self._buffers.clear()


class ShardedSaver:
    """Writes checkpoints of which each rank has a part, by torch's distributed checkpoint. To make it is a collective.

    Ranks agree on who writes what over a group of their writing threads: in that of the training a collective could
    meet one of a step.

    Args:
        group: of all ranks.
    """

    def __init__(self, group: Distributed) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self._is_main = group.is_main
        self._group = dist.new_group(backend="gloo")
        self._mesh = DeviceMesh.from_group(self._group, "cpu")

    def prepare(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path, Any], object]]:
        """What this rank keeps of a checkpoint, and what writes a copy of that in the background of every rank.

        No collective; the call that it gives is one, of the threads.
        """
        rest, holders = checkpoint.sharded_holders(content)
        parts = {}
        for prefix, holder in holders.items():
            for name in [name for name, value in holder.items() if hasattr(value, "full_tensor")]:
                parts[f"{prefix}/{name}"] = holder.pop(name)

        def write(path: Path, copied: Mapping[str, Any]) -> None:
            folder = self._write(
                path, {key: sharded_like(copied["parts"][key], parts[key], self._mesh) for key in parts}
            )
            if self._is_main:
                beside = {"name": folder.name, "digests": checkpoint.digests(folder)}
                checkpoint.write(path, {**copied["rest"], checkpoint.BESIDE: beside})

        local = {key: value.to_local() for key, value in parts.items()}
        return {"parts": local, "rest": rest if self._is_main else {}}, write

    def _write(self, path: Path, tensors: dict[str, Any]) -> Path:
        """Write the shards of one checkpoint; gives their folder.

        Raises:
            RunError: a rank, which is named, could not write its part.
        """
        import torch.distributed.checkpoint as dcp

        names = [checkpoint.free_folder(path).name if self._is_main else ""]
        dist.broadcast_object_list(names, src=0, group=self._group)
        folder = path.with_name(names[0])
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(folder)), process_group=self._group)
        except dcp.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise RunError(f"rank {rank}: cannot write {folder}: {checkpoint.reason(cause)}") from error
        return folder


# -- a training that has diverged --------------------------------------------------------------------------------------


def check_finite(runner: Any, state: Mapping[str, Any], step: int) -> None:
    """Raise, on all ranks alike, where weights that are to be saved, or losses on the way to them, are not finite.

    A collective. What would fail when the losses are read next is not saved before.

    Args:
        runner: the runner.
        state: what is to be saved.
        step: optimizer steps completed.

    Raises:
        RunError: it names the step, the rank and the first of the tensors.
    """
    losses = {f"the {name} since the last reading": value for name, value in runner.losses.sums.items()}
    watched = {name for name, _ in unwrapped(runner.model).named_parameters()} | set(losses)
    by_rank = runner.distributed_group.gather(checkpoint.not_finite({**losses, **state}, watched))
    ranks = [rank for rank, names in enumerate(by_rank) if names]
    if ranks:
        raise RunError(
            f"not finite after step {step}: {shortened(by_rank[ranks[0]], 1)}, on rank {shortened(ranks)}; the weights "
            f"are not saved; {what_to_do(runner)}"
        )


def what_to_do(runner: Any) -> str:
    """Advice for a training that has diverged, with the command that goes on where something has been saved.

    A collective: the checkpoint that is being written counts.
    """
    session = runner.session
    try:
        runner.checkpoint_writer.wait()
    except Exception:
        logger.exception("the last checkpoint is not saved")  # not why training has failed
    runner.distributed_group.barrier()
    text = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32"
    saved = checkpoint.list_checkpoints(session.folder.checkpoints)
    if not saved:
        return text
    which, wanted = "newest", "auto"
    if len(saved) > 1 and session.resumed_from is not None and saved[0].samefile(session.resumed_from):
        which, wanted = "last but one", console.shown(saved[1])  # from the newest it has just been tried
    rate = f"optim.lr={session.config.optim.lr / 2:.4g}"
    command = to_continue(session.config, session.folder, f"resume={wanted}", rate)
    return f"{text}\n  to go on from the {which} checkpoint with half the rate: {command}"
