"""Cards: count, selection and properties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from simulated_gcu import device_type

from torch_gcu import _C

init = _lazy_init = _C.lazy_init
is_initialized = _C.is_initialized
_is_in_bad_fork = _C.is_bad_fork
device_count = _C.device_count
_exchange_device = _C.exchange_device
_maybe_exchange_device = _C.exchange_device


def _get_device_index(device: Any = None, optional: bool = True) -> int:
    """Index of a card given as number, string or torch.device; None is the current card.

    Raises:
        ValueError: ``device`` is not a card.
    """
    if device is None:
        if not optional:
            raise ValueError("Expected a gcu device, but got: None")
        return current_device()
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if device.type != device_type():
        raise ValueError(f"Expected a gcu device, but got: {device}")
    return current_device() if device.index is None else device.index


def is_available() -> bool:
    """Whether a card is visible."""
    return device_count() > 0


def current_device() -> int:
    """Index of the current card, which gets new tensors of device ``gcu``."""
    _C.lazy_init()
    return _C.current_device()


def set_device(device: Any) -> None:
    """Select a card for this thread.

    Raises:
        RuntimeError: there is no such card.
    """
    index = _get_device_index(device)
    if index >= 0:
        _C.set_device(index)


class device:  # noqa: N801 - torch's name
    """Context manager that selects a card."""

    def __init__(self, device: Any) -> None:
        self.index = _get_device_index(device)
        self.before = -1

    def __enter__(self) -> None:
        """Select the card."""
        self.before = _exchange_device(self.index)

    def __exit__(self, *_error: object) -> None:
        """Select the previous card."""
        _maybe_exchange_device(self.before)


class device_of(device):  # noqa: N801 - torch's name
    """Context manager that selects the card of a tensor; does nothing for a tensor on another device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device.index if tensor.device.type == device_type() else -1)


def synchronize(device: Any = None) -> None:
    """Count a wait for a card. Operators have finished when their call returns, so there is nothing to wait for."""
    get_device_properties(device)
    _C.count_wait("device")


_MODELS = {"s60": ("Enflame S60 (simulated)", 3), "l600": ("Enflame L600 (simulated)", 4)}


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Properties as of a real card: ``name``, ``major``, ``total_memory`` (bytes); without an identity of the card.

    ``major`` follows ``SIM_GCU_PROFILE``: 3 for S60, 4 for L600; 0 if it is not set, which no real card has.

    Raises:
        RuntimeError: there is no such card.
    """
    index = _get_device_index(device)
    name, major = _MODELS.get(_C.profile(), ("Enflame GCU (simulated)", 0))
    return SimpleNamespace(
        name=name,
        major=major,
        minor=0,
        multi_processor_count=24,
        total_memory=_C.memory_stats(index)[3],
        max_threads_per_multi_processor=1,
        sip_count=24,
    )


def get_device_name(device: Any = None) -> str:
    """Name of a card, with ``(simulated)``."""
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Major and minor version of a card's architecture."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def is_bf16_supported() -> bool:
    """Whether the cards support bfloat16."""
    return is_available()


def is_fp16_supported() -> bool:
    """Whether the cards support float16."""
    return is_available()
