"""Checkpoints that do not stop training: their state is copied to host memory, and a thread writes the copy.

What is copied when: tensors on a card at once, into page-locked memory where the backend has it, so that the card does
it between two steps and nobody waits. On the CPU the optimizer's state is copied by the thread, while the next step
computes its gradients: nothing but the optimizer changes it, and its step waits
(:attr:`exp.engine.optim.BackendOptimWrapper.before_update`). Weights too, where the model promises the same of them
(:attr:`exp.models.base.Model.changed_by_optimizer_alone`) and no hook of the user's can change them; other weights,
and buffers, at once.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Callable, Mapping

import torch

from exp.engine import checkpoint
from exp.heartbeat import Stage, beat

if TYPE_CHECKING:
    from pathlib import Path

    from exp.backend import Backend

__all__ = ["CheckpointWriter"]

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints one after another in the background, with one copy of the state in host memory.

    Its methods are called by one thread, and are no collectives; neither is anything that it does in the background.

    Args:
        backend: tells whether there is page-locked memory, and when the device has filled it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # Kept from one checkpoint to the next: new memory costs more than a copy.
        self._buffers: list[torch.Tensor] = []
        self._pins = backend.pins_memory
        self.closing = threading.Event()
        """Set by :meth:`close`: what is written may wait for other ranks, which need not be there any more."""
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._error: BaseException | None = None

    def start(
        self,
        contents: Mapping[Path, Any],
        optim_wrapper: Any = None,
        with_weights: bool = False,
        write: Callable[[Path, Any], object] = checkpoint.write,
        then: Callable[[], object] | None = None,
    ) -> None:
        """Copy what is to be written, and return; waits for the checkpoint before, if that is still being written.

        Args:
            contents: of the files, in their order; see :func:`exp.engine.checkpoint.plain`. Tensors that several of
                them share are copied once.
            optim_wrapper: a :class:`exp.engine.optim.BackendOptimWrapper`, whose step can wait for the copy of its
                state; None: everything is copied at once.
            with_weights: whether its parameters, too, remain as they are until that step.
            write: writes one of the files; called in the background, with a content that nothing else refers to.
            then: called in the background when all of them are on the disk.

        Raises:
            TypeError: something is not plain data.
            Exception: what went wrong with the checkpoint before.
        """
        beat(Stage.CHECKPOINT)
        self.wait()
        copies = _Copies(self._buffers, self._pins, _unchanging(optim_wrapper, with_weights))
        copied = {path: checkpoint.plain(content, copies) for path, content in contents.items()}
        self._pins = copies.pinned
        del self._buffers[copies.used :]
        delivered = self._backend.mark()
        self._copied.clear()
        if copies.left:
            optim_wrapper.before_update = self.settle
        arguments = (copies, delivered, copied, write, then)
        # A daemon: a disk that hangs must not keep a process from ending that was told to.
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, copies: _Copies, delivered: Any, contents: dict[Path, Any], write: Any, then: Any) -> None:
        try:
            copies.finish()
            self._copied.set()
            delivered()
            for path, content in contents.items():
                try:
                    write(path, content)
                except OSError as error:
                    error.filename = error.filename or str(path)  # it is told later, from a step that did nothing wrong
                    raise
            if then is not None:
                then()
        except Exception as error:  # noqa: BLE001 - told by the thread that trains
            self._error = error
        finally:
            self._copied.set()

    def settle(self) -> None:
        """Wait until the optimizer's state may change."""
        self._copied.wait()

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
        self.closing.set()
        try:
            self.wait()
        except Exception:
            logger.exception("the last checkpoint is not saved")
        self._buffers.clear()


def _unchanging(optim_wrapper: Any, with_weights: bool) -> set[int]:
    """Addresses of the tensors on the CPU that only the optimizer's step changes."""
    if optim_wrapper is None:
        return set()
    optimizer = optim_wrapper.optimizer
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]  # not all need be
    tensors = [value for state in states for value in state.values()]
    tensors += [p for group in optimizer.param_groups for p in group["params"]] if with_weights else []
    tensors = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return {
        _address(each)
        for each in tensors
        if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.layout == torch.strided
    }


def _address(tensor: torch.Tensor) -> int:
    """Where its data lie; lazy devices have no such place, or say 0: there each tensor is its own."""
    try:
        return tensor.data_ptr() or -id(tensor)
    except RuntimeError:
        return -id(tensor)


class _Copies:
    """Copies tensors to host memory, each once.

    Args:
        buffers: memory to be used again, where it fits in the order of the calls; new memory is added.
        pinned: whether it is page-locked, and filled by the device in its own time.
        unchanging: addresses of tensors on the CPU that :meth:`finish` may copy later.
    """

    def __init__(self, buffers: list[torch.Tensor], pinned: bool, unchanging: set[int]) -> None:
        self.used = 0
        self.left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._buffers, self.pinned, self._unchanging = buffers, pinned, unchanging
        self._made: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy; of a CPU tensor that does not change yet, memory that :meth:`finish` fills."""
        tensor = tensor.detach()
        if tensor.layout != torch.strided:
            return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
        place = (tensor.device, _address(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._made or not tensor.numel():
            copy = self._memory_for(tensor)
            if tensor.device.type == "cpu" and place[1] in self._unchanging:
                self.left.append((copy, tensor))
            else:
                copy.copy_(tensor, non_blocking=self.pinned)
            self._made[place] = (copy, tensor)  # the tensor, too: freed, its place could be another's
        return self._made[place][0]

    def _memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        buffers, index = self._buffers, self.used
        self.used += 1
        held = buffers[index] if index < len(buffers) else None
        if held is None or held.dtype != tensor.dtype or held.shape != tensor.shape or held.is_pinned() != self.pinned:
            new = self._new_memory_for(tensor)
            buffers[index:] = [new] if held is None else [new, *buffers[index + 1 :]]
        return buffers[index]

    def _new_memory_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.pinned:
            try:
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError as error:  # of the driver, which calls it out of memory, as if it were the card's
                logger.warning("checkpoints are copied to memory that is not page-locked: %s", str(error).strip())
                self.pinned = False
        return torch.empty_like(tensor, device="cpu")

    def finish(self) -> None:
        """Copy what was left."""
        for copy, tensor in self.left:
            copy.copy_(tensor)
        self.left, self._made = [], {}
