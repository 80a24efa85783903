"""Compares two traces. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator

import numpy as np

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["Difference", "compare", "tolerances"]

_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}
# Differences grow on the way from a sum over many values (the loss) to single ones, and through the optimizer.
_FACTORS = {"loss": 1.0, "output": 10.0, "gradient": 100.0, "parameter": 100.0}
_LARGEST = 0.5  # beyond it, nothing would ever depart
_FLOOR = 1e-3


def tolerances(precision: str, loss: float | None) -> dict[str, float]:
    """Largest relative difference that still agrees, by kind.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        loss: for the loss; None: the default of the precision. The others follow from it.
    """
    base = _LOSS_TOLERANCE[precision] if loss is None else loss
    limits = {kind: min(base * factor, _LARGEST) for kind, factor in _FACTORS.items()}
    return {**limits, "later": float("inf"), "drift": float("inf")}


@dataclass(frozen=True)
class Difference:
    """How far two tensors (or losses) are apart."""

    kind: str
    """``output``, ``loss``, ``gradient``, ``parameter``, ``later`` or ``drift``.

    ``gradient``: of the first step; ``later``: of the others, for information: where a loss has a kink, as an absolute
    value has, two models that differ by rounding errors may get gradients of opposite sign.
    ``parameter``: after the first step, values with a clear gradient only. Optimizers that divide a gradient by its
    size move a value whose gradient is a rounding error by a whole step, in either direction. ``drift``: all of them
    after the last step; for information.
    """
    step: int
    """Optimizer step, from 1."""
    name: str
    absolute: float
    """Largest absolute difference."""
    relative: float
    """The same, relative to the tensor's largest absolute value in the reference, or to a thousandth of the largest of
    its kind in this step where that is larger: a tensor that is zero but for rounding has no scale of its own."""


def compare(tested: RunFolder, reference: RunFolder, clear: float) -> Iterator[Difference]:
    """All differences in the order in which they can arise: forward, loss, backward, optimizer; step by step.

    Args:
        tested: run folder with ``trace.npz`` and ``metrics.jsonl``.
        reference: the same of the reference.
        clear: how large a gradient must be, relative to the tensor's largest, to tell its direction.
    """
    ours, theirs = _load(tested), _load(reference)
    our_losses, their_losses = _losses(tested), _losses(reference)
    steps = sorted(set(our_losses) & set(their_losses))
    scale = _scale(theirs, "output")
    for key in sorted(key for key in theirs if key.startswith("output/")):
        yield _difference("output", 1, key.split("/", 2)[2], ours.get(key), theirs[key], scale)
    for step in steps:
        loss, expected = our_losses[step], their_losses[step]
        yield Difference("loss", step, "loss", abs(loss - expected), abs(loss - expected) / max(abs(expected), 1e-12))
        place = f"{step:06d}"
        scale = _scale(theirs, f"gradient/{place}")
        names = [key.split("/", 2)[2] for key in theirs if key.startswith(f"gradient/{place}/")]
        for name in reversed(names):
            key = f"gradient/{place}/{name}"
            yield _difference("gradient" if step == 1 else "later", step, name, ours.get(key), theirs[key], scale)
        for name in names if step in (1, steps[-1]) else ():
            key = f"parameter/{place}/{name}"
            mine, expected = ours.get(key), theirs[key]
            if step == steps[-1]:
                yield _difference("drift", step, name, mine, expected, 0.0)
            if step == 1 and mine is not None and mine.shape == expected.shape:
                gradient = np.abs(theirs[f"gradient/{place}/{name}"])
                told = gradient > max(clear * gradient.max(initial=0.0), _FLOOR * _FLOOR * scale)
                yield _difference("parameter", step, name, mine[told], expected[told], 0.0)


def _load(folder: RunFolder) -> dict[str, Any]:
    with np.load(folder.path / "trace.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


def _losses(folder: RunFolder) -> dict[int, float]:
    lines = (json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


def _scale(trace: dict[str, Any], prefix: str) -> float:
    return max((float(np.abs(v).max(initial=0.0)) for k, v in trace.items() if k.startswith(f"{prefix}/")), default=0.0)


def _difference(kind: str, step: int, name: str, ours: Any, theirs: Any, largest: float) -> Difference:
    if ours is None or ours.shape != theirs.shape:
        return Difference(kind, step, name, float("inf"), float("inf"))
    absolute = float(np.abs(ours - theirs).max(initial=0.0))
    scale = max(float(np.abs(theirs).max(initial=0.0)), _FLOOR * largest, 1e-30)
    if np.isnan(absolute):
        return Difference(kind, step, name, float("inf"), float("inf"))
    return Difference(kind, step, name, absolute, absolute / scale)
