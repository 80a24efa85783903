"""Cards: count, name, selection."""

from __future__ import annotations

from typing import Any, Union

import torch

from torch_gcu import _C

__all__ = [
    "current_device",
    "device",
    "device_count",
    "gcu_device",
    "get_device_name",
    "get_hbm_alloc_size",
    "is_available",
    "set_device",
]

AnyDevice = Union[torch.device, str, int, None]


def index_of(card: AnyDevice, optional: bool = False) -> int:
    """Index of a card given as a torch.device, a string or a number.

    Args:
        card: the card.
        optional: use the current card for None and for a device without an index.

    Raises:
        ValueError: ``card`` is of another device type, or has no index although ``optional`` is False.
    """
    if isinstance(card, str):
        card = torch.device(card)
    if isinstance(card, torch.device):
        if card.type != "xla":
            raise ValueError(f"Expected a gcu device, but got: {card}")
        card = card.index
    if card is not None:
        return card
    if not optional:
        raise ValueError("Expected a torch.device with a specified index or an integer, but got: None")
    return _C.current_device()


def check_index(card: int) -> None:
    """Raise IndexError unless this process sees card number ``card``."""
    if not 0 <= card < device_count():
        raise IndexError(f"Invalid device id, must in [0, {device_count() - 1}], got {card}")


def is_available() -> bool:
    """Whether this process sees a card."""
    return device_count() > 0


def device_count() -> int:
    """Number of cards that this process sees; respects ``TOPS_VISIBLE_DEVICES``."""
    return _C.device_count()


def gcu_device(device: AnyDevice = None) -> torch.device:
    """The torch.device of a card; by default of the current card."""
    return torch.device("xla", index_of(device, optional=True))


def set_device(device: AnyDevice) -> None:
    """Select the current card of this thread. As in the vendor's package, a card that does not exist is ignored."""
    card = index_of(device)
    if 0 <= card < device_count():
        _C.set_device(card)


def current_device() -> int | None:
    """Index of the current card, or None if there is no card."""
    return _C.current_device() if is_available() else None


def get_device_name(device: AnyDevice = None) -> str:
    """Name of a card."""
    check_index(index_of(device, optional=True))
    return "T20 (simulated)"


def get_hbm_alloc_size(device: AnyDevice = None) -> int:
    """Bytes that this process holds on a card; by default on the current card."""
    card = index_of(device, optional=True)
    check_index(card)
    return _C.memory_use(card)[0]


class device:  # noqa: N801 (the vendor's name)
    """Context manager that selects a card; a card that does not exist is ignored."""

    def __init__(self, device: AnyDevice) -> None:
        self._card = index_of(device, optional=True)
        self._previous = -1

    def __enter__(self) -> None:
        """Select the card."""
        self._previous = _C.current_device()
        set_device(self._card)

    def __exit__(self, *_exception: Any) -> None:
        """Select the previous card."""
        set_device(self._previous)
