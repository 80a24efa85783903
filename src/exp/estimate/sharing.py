"""What a rank keeps of a model, by wrapper, and what goes over the wire: arithmetic."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from exp.collectives import Collectives

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["Sharing", "sharing_of"]


@dataclass(frozen=True)
class Sharing:
    """Of one rank.

    Attributes:
        share: of parameters and of the optimizer's state that it keeps.
        share_of_gradients: of each gradient, once it is complete.
        held: bytes that the wrapper holds all the time: DDP's buckets, or sharded blocks that are together.
        held_gradients: bytes that stand for gradients all the time, where they are views of buckets.
        exchanged: bytes of a block's gradients that are on their way while the next block's arise.
        units: blocks that are sharded.
        reduced: bytes of gradients that are summed over all ranks in each step.
        gathered: bytes of parameters that are gathered in each step.
    """

    share: float = 1.0
    share_of_gradients: float = 1.0
    held: int = 0
    held_gradients: int = 0
    exchanged: int = 0
    units: int = 1
    reduced: int = 0
    gathered: int = 0

    def sent(self, ranks: int) -> int:
        """Bytes that a rank sends in each step, by ring algorithms: a sum is a reduce-scatter and an all-gather."""
        if ranks == 1:
            return 0
        times = 1 if self.gathered else 2
        return int((times * self.reduced + self.gathered) * (ranks - 1) / ranks)


def sharing_of(config: Any, model: nn.Module, backend: Backend) -> Sharing:
    """As the wrapper of a configuration does it; one of the user's own counts as one that keeps all, and no buckets.

    Args:
        config: validated.
        model: whole.
        backend: whose class of DDP it is.
    """
    ranks = config.nproc * config.launcher.nnodes
    gradients = _bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    kind = config.wrapper.kind
    if ranks == 1 or kind not in ("ddp", "mmddp", "fsdp"):
        return Sharing(reduced=gradients if ranks > 1 else 0)
    if kind == "fsdp":
        return _sharded(config, model, ranks, gradients)
    as_views = config.wrapper.gradient_as_bucket_view
    if as_views is None:  # as :func:`exp.engine.wrapper.wrap` has it; a vendor's class cannot be asked here
        as_views = type(backend).ddp_class is Collectives.ddp_class
    if as_views:
        return Sharing(share_of_gradients=0.0, held_gradients=gradients, reduced=gradients)
    return Sharing(held=gradients, reduced=gradients)


def _sharded(config: Any, model: nn.Module, ranks: int, gradients: int) -> Sharing:
    """At the worst moment two blocks are together, and the whole gradients of one.

    Once these are exchanged, while the next block's arise, the activations of a block are gone. Parameters outside of
    blocks are together all the time, and so are their gradients in the end.
    """
    units = importlib.import_module("exp.engine.fsdp").units_of(model)
    of_units = [_bytes(unit.parameters()) for unit in units]
    rest = _bytes(model.parameters()) - sum(of_units)
    largest = max(of_units, default=0)
    options = config.wrapper.options
    stays = options.get("reshard_after_forward") is False
    gathered = 0.5 if options.get("gather_dtype") == "bfloat16" else 1.0
    together = sum(of_units) if stays else largest * min(len(units), 2)
    whole = rest + sum(of_units) * gathered
    return Sharing(
        share=1 / ranks,
        share_of_gradients=1 / ranks,
        held=int(2 * rest + (together + largest) * gathered),
        exchanged=largest if len(units) > 1 else 0,
        units=max(len(units), 1),
        reduced=gradients // 2 if options.get("reduce_dtype") == "bfloat16" else gradients,
        gathered=int(whole + (0 if stays else sum(of_units) * gathered)),
    )


def _bytes(parameters: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
