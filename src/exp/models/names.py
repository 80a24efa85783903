"""Finds a model's weights in a state dict that has more names before them, or other models beside them."""

from __future__ import annotations

from typing import Container, Iterable, Mapping

import torch

__all__ = ["best_prefix", "under_own_names", "without_prefix"]

_State = Mapping[str, torch.Tensor]


def under_own_names(state: _State, own: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """``state`` without the path before the names of ``own``, if most of these are found under one.

    Such are ``model.`` (Lightning), ``encoder.`` or ``teacher.``: any path counts, and none has to be known here.

    Args:
        state: tensors by name.
        own: the model's state dict.

    Returns:
        All tensors; those that are not under the path keep their names, as far as the model has not the same.
    """
    paths = {key[:end] for key in state for end, letter in enumerate(key, 1) if letter == "."}
    fits = {path: sum(path + name in state for name in own) for path in ("", *paths)}
    most = max(fits.values())
    return without_prefix(state, "" if fits[""] == most else best_prefix(p for p in fits if fits[p] == most), own)


def best_prefix(prefixes: Iterable[str]) -> str:
    """Of several models in one file a teacher or an average of weights, which evaluation takes; else the first."""
    return min(prefixes, key=lambda prefix: ("teacher" not in prefix and "ema" not in prefix, len(prefix), prefix))


def without_prefix(state: _State, prefix: str, taken: Container[str]) -> dict[str, torch.Tensor]:
    """The tensors under ``prefix`` by the rest of their names, and the others as they are, but for names in ``taken``.

    Args:
        state: tensors by name.
        prefix: ends with a dot, or is empty.
        taken: names that only tensors under the prefix may have.
    """
    inner = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    return {**{key: value for key, value in state.items() if not key.startswith(prefix) and key not in taken}, **inner}
