"""Streams and events. Operators run in the order of the calls on all streams, so every required order is kept."""

from __future__ import annotations

from typing import Any

import torch
from simulated_gcu import device_type

from torch_gcu.gcu.cards import _get_device_index

Stream, Event = torch.Stream, torch.Event


def current_stream(device: Any = None) -> torch.Stream:
    """The current stream of a card."""
    return torch.accelerator.current_stream(torch.device(device_type(), _get_device_index(device)))


def default_stream(device: Any = None) -> torch.Stream:
    """The default stream of a card."""
    private_use_1 = 20  # c10::DeviceType
    return Stream(stream_id=0, device_index=_get_device_index(device), device_type=private_use_1)


def set_stream(stream: torch.Stream) -> None:
    """Select a stream."""
    torch.accelerator.set_stream(stream)


class stream:  # noqa: N801 - torch's name
    """Context manager that selects a stream; None selects nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.chosen = stream
        self.before: torch.Stream | None = None

    def __enter__(self) -> None:
        """Select the stream."""
        if self.chosen is not None:
            self.before = current_stream(self.chosen.device)
            set_stream(self.chosen)

    def __exit__(self, *_error: object) -> None:
        """Select the previous stream."""
        if self.before is not None:
            set_stream(self.before)


StreamContext = stream
