"""L-BFGS for convex functions whose values and gradients come from a card, in float32.

Liu and Nocedal (Mathematical Programming 45, 1989), with two changes. The first guess of the curvature is no multiple
of the identity, but a matrix that is given (a preconditioner). And the line search looks at slopes alone: those of a
convex function grow along a line, so they tell where its minimum is; values would not, as what a step gains is soon
less than float32 can tell.
"""

from __future__ import annotations

from collections import deque
from typing import Callable

import torch

__all__ = ["factor", "minimize"]

_HISTORY = 20
_TRIES = 20  # of a line search
_BEFORE, _BEYOND = 0.9, 0.5  # share of the first slope that may be left, on either side of the minimum
_GAIN = 1e-8  # of the value: a step that would gain less is none
_RIDGE = 1e-6  # of the diagonal: what a product of float32 does not tell

Function = Callable[[torch.Tensor], "tuple[float, torch.Tensor]"]


def factor(curvature: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The inverse of a matrix, as a function.

    Args:
        curvature: (D, D), float64, on the CPU; positive semidefinite but for rounding.

    Returns:
        Takes (D, K) and gives (D, K).
    """
    scale = curvature.diagonal().clamp_min(1e-300).rsqrt()
    scaled = curvature * scale * scale.unsqueeze(1)
    ridge = _RIDGE
    while True:
        lower, failed = torch.linalg.cholesky_ex(scaled + ridge * torch.eye(len(scaled), dtype=scaled.dtype))
        if not int(failed):
            return lambda right: torch.cholesky_solve(right * scale.unsqueeze(1), lower) * scale.unsqueeze(1)
        ridge *= 10.0


def minimize(
    function: Function, start: torch.Tensor, inverse: Callable[[torch.Tensor], torch.Tensor], iterations: int
) -> tuple[torch.Tensor, bool]:
    """The minimum of a convex function.

    Args:
        function: gives the value and the gradient, float64 on the CPU, of the shape of ``start``.
        start: (D, K), float64, on the CPU.
        inverse: that of a guess at the curvature: (D, K) -> (D, K).
        iterations: at most.

    Returns:
        Where it is, and whether it was reached: a further step would gain less than 1e-8 of the value.
    """
    place = start
    value, slope = function(place)
    steps: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=_HISTORY)
    for _ in range(iterations):
        direction = -_solved(slope, steps, inverse)
        steepness = float((slope * direction).sum())
        if not -steepness > _GAIN * abs(value):
            return place, -steepness == -steepness  # nan is not
        found = _along(function, place, direction, steepness)
        if found is None:
            if not steps:
                return place, False
            steps.clear()  # rounding has spoiled what was learned of the curvature
            continue
        share, value, new = found
        steps.append((share * direction, new - slope))
        place, slope = place + share * direction, new
    return place, False


def _solved(
    slope: torch.Tensor,
    steps: deque[tuple[torch.Tensor, torch.Tensor]],
    inverse: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The inverse curvature, as the last steps tell it, times the gradient: the recursion of two loops."""
    rest, shares = slope.clone(), []
    for step, change in reversed(steps):
        share = float((step * rest).sum() / (step * change).sum())
        shares.append(share)
        rest -= share * change
    if steps:
        step, change = steps[-1]
        rest = inverse(rest) * float((step * change).sum() / (change * inverse(change)).sum())
    else:
        rest = inverse(rest)
    for (step, change), share in zip(steps, reversed(shares)):
        rest += step * (share - float((change * rest).sum() / (step * change).sum()))
    return rest


def _along(
    function: Function, place: torch.Tensor, direction: torch.Tensor, steepness: float
) -> tuple[float, float, torch.Tensor] | None:
    """How far to go, with value and gradient there; None: no place is better."""
    low, low_slope, high, share = 0.0, steepness, None, 1.0
    for _ in range(_TRIES):
        value, slope = function(place + share * direction)
        here = float((slope * direction).sum())
        if _BEFORE * steepness <= here <= -_BEYOND * steepness:
            return share, value, slope
        if here < 0:
            low, low_slope = share, here
            share = 2.0 * share if high is None else 0.5 * (low + high)
        else:  # too far, or nowhere, where it is nan
            secant = low + (share - low) * low_slope / (low_slope - here)
            high, share = share, max(low + 0.1 * (share - low), secant) if here == here else 0.5 * (low + share)
    return None
