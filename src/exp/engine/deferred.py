"""Building a model that no rank needs whole: rank 0 has its weights, the others only their shapes.

Eight ranks of a node would else hold eight copies of it in host memory before the first is sharded. torch calls it
deferred, or meta-device, initialisation. The values come from rank 0 as each part is brought to its device.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import nn

from exp.config.resolve import resolve
from exp.engine.wrapper import Wrapper

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.session import Session

__all__ = ["build", "of_wrapper", "to_device"]

logger = logging.getLogger(__name__)
_MARK = "rank_0_has_the_weights"


def of_wrapper(session: Session, name: str) -> bool | None:
    """What the class of ``wrapper._target_`` says of itself (``needs_whole_model``); None: there is no such class, or
    a training with one process has no use for it.
    """
    wrapper: Any = session.config.wrapper
    target = wrapper.get("_target_")
    if target is None or session.info.world_size == 1:
        return None
    found: bool | None = getattr(resolve("wrapper._target_", target, Wrapper), name)
    return found


def build(make: Callable[[], Any], fit: Callable[[Any], object], distributed: Distributed) -> Any:
    """A model with weights on rank 0, and elsewhere with parameters on the meta device; a collective.

    Buffers have rank 0's values on every rank: they are small, and data look at them. Where the constructor needs
    values, this rank has the model whole, too. Tensors that are neither parameters nor buffers have to be made anew by
    ``load_state_dict``.

    Args:
        make: makes it.
        fit: gives it the weights that it is to begin with.
        distributed: of all ranks.
    """
    reason = made = None
    if not distributed.is_main:
        try:
            with torch.device("meta"):
                made = make()
        except Exception as error:  # noqa: BLE001 - whatever a constructor does with values that are not there
            reason = f"{type(error).__name__}: {error}"
    if made is None:
        made = make()
        fit(made)
    buffers = dict(made.named_buffers(remove_duplicate=False))
    found = distributed.gather({name: value.cpu() for name, value in buffers.items()} if distributed.is_main else None)
    if not distributed.is_main and reason is None:
        for name in buffers:
            place, _, last = name.rpartition(".")
            setattr(made.get_submodule(place), last, found[0][name])
        kept = {name: value for name, value in made.state_dict().items() if not value.is_meta}
        nn.Module.load_state_dict(made, kept, strict=False)  # modules that derive values from their buffers do so here
    if reason is not None:
        logger.info("the model is built whole on this rank, too: %s", reason)
    setattr(made, _MARK, True)
    return made


def to_device(module: nn.Module, device: torch.device, model: nn.Module) -> None:
    """Bring a part of a model to the device, with the values of rank 0 where only that has them; a collective then.

    Args:
        module: ``model``, or a module of it. Parameters that are sharded already stay.
        device: this rank's.
        model: of :func:`build`, or one that every rank has whole.
    """
    if getattr(model, _MARK, False):
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False)):
                if not hasattr(parameter, "to_local"):
                    setattr(part, name, _from_rank_0(parameter, device))
    module.to(device)


def _from_rank_0(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if parameter.is_meta:
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    else:
        value = parameter.detach().to(device).contiguous()
    torch.distributed.broadcast(value, 0)
    filled = nn.Parameter(value, parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    return filled
