"""Compares two traces. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator

import numpy as np

from exp.runfolder import read_records

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["EARLY_STEPS", "Difference", "compare", "read_losses", "tolerances"]

_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3, "tf32": 2e-3, "efp": 2e-2}
# Differences grow on the way from a sum over many values (the loss) to single ones, and through the optimizer.
_FACTORS = {"loss": 1.0, "late_loss": 1000.0, "output": 10.0, "gradient": 100.0, "parameter": 100.0}
_LARGEST = 0.5  # beyond it, nothing would ever depart
_FLOOR = 1e-3
EARLY_STEPS = 20
"""Steps in which losses are held to the tolerance; later ones to a thousand times as much. Training magnifies rounding
errors: on a card that computes what the CPU does, the default experiment was 1e-5 away after 33 to more than 100 steps,
and up to 2e-4 after 100."""


def tolerances(precision: str, loss: float | None) -> dict[str, float]:
    """Largest relative difference that still agrees, by kind.

    Args:
        precision: one of :data:`exp.backend.PRECISIONS`.
        loss: for the loss; None: the default of the precision. The others follow from it.
    """
    base = _LOSS_TOLERANCE[precision] if loss is None else loss
    limits = {kind: min(base * factor, _LARGEST) for kind, factor in _FACTORS.items()}
    return {**limits, "later": float("inf"), "drift": float("inf")}


@dataclass(frozen=True)
class Difference:
    """How far two tensors (or losses) are apart."""

    kind: str
    """``output``, ``loss``, ``late_loss``, ``gradient``, ``parameter``, ``later`` or ``drift``.

    ``late_loss``: after :data:`EARLY_STEPS`.
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
    """Largest absolute difference; infinite where there is nothing to compare, or one of the two is not finite."""
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
    # Read as they are asked for: of a large model, not all would fit into memory.
    with _open(tested) as ours, _open(reference) as theirs:
        yield from _outputs(ours, theirs)
        our_losses, their_losses = read_losses(tested), read_losses(reference)
        steps = sorted(set(our_losses) & set(their_losses))
        order = {str(name): place for place, name in enumerate(theirs["order"])}
        for step in steps:
            yield _loss(step, our_losses[step], their_losses[step])
            yield from _backward(step, ours, theirs, order)
            if step == 1:
                yield from _first_update(ours, theirs, clear)
        yield from _drift(steps[-1], ours, theirs)


def _open(folder: RunFolder) -> Any:
    return np.load(folder.path / "trace.npz", allow_pickle=False)


def _outputs(ours: Any, theirs: Any) -> Iterator[Difference]:
    prefix = "output/000001/"
    scale = _scale(theirs, prefix)
    known = set(_names(ours, prefix))
    for name in _names(theirs, prefix):
        # A fused kernel of one of the two may do without a module; what comes after it shows whether it is right.
        if name in known:
            yield _difference("output", 1, name, ours[prefix + name], theirs[prefix + name], scale)


def _loss(step: int, ours: float, theirs: float) -> Difference:
    gap = abs(ours - theirs)
    kind = "loss" if step <= EARLY_STEPS else "late_loss"
    return Difference(kind, step, "loss", gap, gap / max(abs(theirs), 1e-12))


def _backward(step: int, ours: Any, theirs: Any, order: dict[str, int]) -> Iterator[Difference]:
    prefix = f"gradient/{step:06d}/"
    scale = _scale(theirs, prefix)
    names = sorted({*_names(ours, prefix), *_names(theirs, prefix)}, key=lambda name: (_place(name, order), name))
    for name in reversed(names):
        mine, expected = (trace[prefix + name] if prefix + name in trace.files else None for trace in (ours, theirs))
        yield _difference("gradient" if step == 1 else "later", step, name, mine, expected, scale)


def _place(parameter: str, order: dict[str, int]) -> int:
    """When the module of a parameter ran: where it was never called itself, the nearest that holds it."""
    module = parameter
    while module:
        module = module.rpartition(".")[0]
        if module in order:
            return order[module]
    return 0


def _first_update(ours: Any, theirs: Any, clear: float) -> Iterator[Difference]:
    prefix = "gradient/000001/"
    scale = _scale(theirs, prefix)
    for name in _names(theirs, prefix):
        gradient = np.abs(theirs[prefix + name])
        told = gradient > max(clear * gradient.max(initial=0.0), _FLOOR * _FLOOR * scale)
        mine, expected = (trace[f"parameter/000001/{name}"] for trace in (ours, theirs))
        if mine.shape == expected.shape:
            yield _difference("parameter", 1, name, mine[told], expected[told], 0.0)


def _drift(step: int, ours: Any, theirs: Any) -> Iterator[Difference]:
    prefix = f"parameter/{step:06d}/"
    for name in _names(theirs, prefix):
        yield _difference("drift", step, name, ours[prefix + name], theirs[prefix + name], 0.0)


def _names(trace: Any, prefix: str) -> list[str]:
    return [key[len(prefix) :] for key in trace.files if key.startswith(prefix)]


def read_losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, by step."""
    records = read_records(folder.metrics.read_bytes().splitlines())
    return {record["step"]: record["loss"] for record in records if record["split"] == "train"}


def _scale(trace: Any, prefix: str) -> float:
    return max((_largest(trace[prefix + name]) for name in _names(trace, prefix)), default=0.0)


def _largest(values: Any) -> float:
    """Largest absolute value; a mask may hold infinite ones, which are no scale."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _difference(kind: str, step: int, name: str, ours: Any, theirs: Any, largest: float) -> Difference:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return Difference(kind, step, name, float("inf"), float("inf"))
    differ = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    absolute = float(np.abs(ours[differ] - theirs[differ]).max(initial=0.0))
    if not np.isfinite(absolute):
        return Difference(kind, step, name, float("inf"), float("inf"))
    return Difference(kind, step, name, absolute, absolute / max(_largest(theirs), _FLOOR * largest, 1e-30))
