"""The doctor's look at operators: which of them this device is known to lack, and what of a usual block leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.doctor.facts import size
from exp.doctor.record import Findings
from exp.engine.kernels import settle_kernels

if TYPE_CHECKING:
    import torch

    from exp.backend import Backend

__all__ = ["check_operators"]

_SHOWN = 3


def check_operators(backend: Backend, device: torch.device, precision: str) -> Findings:
    """Train a small block of torch's own layers by one step, and tell which operators ran on the CPU for it.

    Before it, the device gets the portable kernels that a training would give it (:mod:`exp.engine.kernels`).
    """
    lacking = sorted(backend.lacking_operators())
    portable = settle_kernels(backend, device, precision)
    before = backend.fallbacks()
    refused = None
    try:
        with backend.autocast(precision):
            _step(device)
        backend.synchronize()
    except NotImplementedError as error:
        refused = str(error).splitlines()[0]
    after = backend.fallbacks()
    left = None
    if before is not None and after is not None:
        changed = {name: (calls - before.get(name, (0, 0))[0], moved) for name, (calls, moved) in after.items()}
        left = {name: calls for name, (calls, _) in changed.items() if calls}
        moved = sum(count[1] for count in after.values()) - sum(count[1] for count in before.values())
    fused = backend.fused_attention(precision)
    values = {
        "lacking": lacking,
        "portable": sorted(portable),
        "left_device": left,
        "refused": refused,
        "fused_attention": fused,
    }
    attention = "fused attention" if fused else "no fused attention"
    if refused is not None:
        return Findings(f"{refused}; {attention} in {precision}", values)
    if left is None:
        counted = "what leaves the device is not counted here"
    elif left:
        names = sorted(left, key=lambda name: -left[name])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        sizes = f" ({size(moved)})" if moved else ""  # a vendor's statistics may count calls alone
        counted = f"of torch's usual layers {', '.join(names[:_SHOWN])}{more} run on the CPU{sizes}"
    else:
        counted = "of torch's usual layers none leaves the device"
    lacks = len({name.partition(".")[0] for name in lacking})
    known = f"lacks {lacks} operators, {len(portable)} of them have portable kernels; " if lacking else ""
    return Findings(f"{known}{attention} in {precision}; {counted}", values)


def _step(device: torch.device) -> None:
    """Forward and backward of an image classifier with one layer of each usual kind."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(16), nn.GELU()
    ).to(device)
    tokens = model(torch.ones(2, 3, 16, 16, device=device))
    mixed = torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens
    target = torch.zeros(2, dtype=torch.long, device=device)
    nn.functional.cross_entropy(mixed.mean(1).float(), target).backward()
