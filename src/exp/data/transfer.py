"""Batches on their way to the device: from page-locked memory, beside the computation, without waiting."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["DeviceLoader", "move", "tensors_of"]


def move(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on ``device``, without waiting for the copy.

    Tensors are moved wherever they stand: in dicts, lists, tuples and named tuples, however deep, as collate functions
    make such, and in torch's packed sequences. Anything else (sizes of images, names, objects of other classes, which a
    model's ``data_preprocessor`` may know) stays as it is.
    """
    if device.type == "cpu":
        return batch
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else _moved(value, device)
        for key, value in batch.items()
    }


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):  # the latter is a named tuple, too, a part of which stays
        return value.to(device, non_blocking=True)  # type: ignore[arg-type]
    if isinstance(value, dict):
        moved = copy.copy(value)  # of its own class, whatever the constructor of that takes
        moved.update((key, _moved(each, device)) for key, each in value.items())
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(each, device) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, or of what a model gives for it: itself, or wherever mappings, lists and tuples lead."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)


class DeviceLoader:
    """The batches of a loader, on a device.

    Copies from page-locked memory go over a stream of their own, so that a batch crosses while the step before it
    computes. Where the device cuts batches itself, the numbers of the samples are all that crosses.

    Args:
        loader: gives batches on the CPU; or numbers of samples, int64 (B,), where there is ``cut``. What is asked of
            this one is asked of it.
        dataset: that they are batches of.
        device: a card.
        pinned: whether what ``loader`` gives is page-locked.
        cut: makes a batch of numbers that lie on the device.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dataset: Any,
        device: torch.device,
        pinned: bool,
        cut: Callable[[torch.Tensor], dict[str, Any]] | None = None,
    ) -> None:
        self.loader, self.dataset, self.device, self.cut = loader, dataset, device, cut
        streams = getattr(torch, device.type, None)
        self._streams = streams if pinned and cut is None and _has_streams(streams, device) else None
        self._side = None if self._streams is None else self._streams.Stream(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches, queued for the device when they are given."""
        for batch in self.loader:
            if self.cut is not None:
                yield self.cut(batch.to(self.device, non_blocking=True))
            elif self._streams is None:
                yield move(batch, self.device)
            else:
                yield self._aside(batch)

    def _aside(self, batch: dict[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        computing = self._streams.current_stream(self.device)
        with self._streams.stream(self._side):
            moved = move(batch, self.device)
        computing.wait_stream(self._side)
        for value in tensors_of(moved):
            if value.device.type == self.device.type:  # a packed sequence keeps its lengths on the CPU
                value.record_stream(computing)  # its memory is not to be had again before the computation is through
        return moved


def _has_streams(module: Any, device: torch.device) -> bool:
    """Whether a device's module has all that is needed; plug-ins have more or less of it."""
    if not all(hasattr(module, name) for name in ("current_stream", "stream", "Stream")):
        return False
    try:
        torch.empty(1, device=device).record_stream(module.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return False
    return True
