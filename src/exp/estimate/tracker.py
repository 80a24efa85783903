"""What is alive on a device, by kind, while operators run: counted by storage, as a card's allocator does."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch

from exp.compat import every_operator

__all__ = ["KINDS", "MemoryTracker", "paged"]

KINDS = ("parameters", "gradients", "optimizer", "wrapper", "buffers", "data", "batch", "activations")
"""Of memory. Activations: whatever a pass makes, what is saved for backward and what is gone at its end."""
_PAGE = 512
"""Bytes; cards hand memory out in multiples of it."""


def paged(count: int) -> int:
    """``count`` bytes as an allocator hands them out."""
    return -(-count // _PAGE) * _PAGE


class MemoryTracker:
    """Counts storages of one type of device from the operator that makes them to the end of their last tensor.

    What an operator takes inside, such as the workspace of a convolution, is not seen, but that of portable kernels is.

    Attributes:
        kind: what new storages are counted as, one of :data:`KINDS`.
        share: the part of new storages that counts, where a device keeps only that.
        peak: most bytes that were alive at a time, since :meth:`restart`.
        at_peak: the same by kind.

    Args:
        device_type: whose storages are counted.
        kernels: of portable operators (:mod:`exp.operators`) that run in the place of the device's, by ATen name.
    """

    def __init__(self, device_type: str = "meta", kernels: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.device_type = device_type
        self._kernels = kernels or {}
        self.kind = "activations"
        self.share = 1.0
        self.now = dict.fromkeys(KINDS, 0)
        self.peak = 0
        self.at_peak = dict(self.now)
        self._alive: dict[int, list[Any]] = {}
        self._mode = every_operator(self._call)

    def __enter__(self) -> MemoryTracker:
        self._mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._mode.__exit__(*exc)

    def restart(self) -> None:
        """Let :attr:`peak` begin with what is alive now."""
        self.peak, self.at_peak = sum(self.now.values()), dict(self.now)

    def hold(self, kind: str, size: int) -> None:
        """Count ``size`` bytes (negative: less) that no operator makes, such as a wrapper's buckets."""
        self.now[kind] += size
        self._note()

    def count(self, tensors: Iterable[Any], kind: str, share: float = 1.0) -> None:
        """Count the storages of these tensors as ``kind``, whether they are known or not.

        Args:
            tensors: what is none is left out.
            kind: one of :data:`KINDS`.
            share: the part of their bytes that counts.
        """
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self.device_type:
                continue
            entry = self._alive.get(id(tensor.untyped_storage()))
            if entry is None:
                self._add(tensor, kind, share)
            elif entry[0] != kind:
                size = paged(int(tensor.untyped_storage().nbytes() * share))
                self.now[entry[0]] -= entry[1]
                self.now[kind] += size
                entry[:2] = kind, size

    def _call(self, operator: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        kernel = self._kernels.get(operator.overloadpacket.__name__) if self._kernels else None
        if kernel is None:
            result = operator(*arguments, **keywords)
        else:
            with every_operator(self._call):
                result = kernel(*arguments, **keywords)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            for tensor in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device_type:
                    self._add(tensor, self.kind, self.share)
        return result

    def _add(self, tensor: torch.Tensor, kind: str, share: float) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._alive:
            return
        size = paged(int(storage.nbytes() * share))
        # torch keeps a storage's Python object for as long as the storage, whoever refers to it.
        self._alive[key] = [kind, size, weakref.ref(storage, lambda _: self._drop(key))]
        self.now[kind] += size
        self._note()

    def _drop(self, key: int) -> None:
        kind, size, _ = self._alive.pop(key)
        self.now[kind] -= size

    def _note(self) -> None:
        total = sum(self.now.values())
        if total > self.peak:
            self.peak, self.at_peak = total, dict(self.now)
