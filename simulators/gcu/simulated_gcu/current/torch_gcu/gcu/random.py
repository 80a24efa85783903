"""Random number generators, one per card."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import torch

from torch_gcu import _C
from torch_gcu.gcu.cards import _get_device_index, current_device, device_count


class _Generators:
    """The cards' generators, by index."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        return _C.default_generator(index)

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[index] for index in range(len(self)))


default_generators = _Generators()


def manual_seed(seed: int) -> None:
    """Seed the current card."""
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every visible card."""
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    """Seed the current card with a random number of the operating system."""
    default_generators[current_device()].seed()


def seed_all() -> None:
    """Seed all cards with the same random number of the operating system."""
    first, *others = default_generators
    value = first.seed()
    for generator in others:
        generator.manual_seed(value)


def initial_seed() -> int:
    """Seed of the current card."""
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of a card's generator (uint8, on the CPU)."""
    return default_generators[_get_device_index(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all cards."""
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Restore a result of :func:`get_rng_state`."""
    default_generators[_get_device_index(device)].set_state(new_state.cpu())


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restore a result of :func:`get_rng_state_all`."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
