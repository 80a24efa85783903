"""Wraps a model with DDP (torch's, MMEngine's or the vendor's).

The options come from the configuration, the device arguments from the backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from mmengine.model import MMDistributedDataParallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exp.config.schema import DDP_KEYS
from exp.distributed import AveragingDataParallel
from exp.engine.wrapper import TrainStep, unwrapped

if TYPE_CHECKING:
    from exp.hardware.backend import Backend


_DEFAULTS = {
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "gradient_as_bucket_view": False,
    "bucket_cap_mb": 25,
}
_SET_BY_EXP = {
    **dict.fromkeys(
        ("module", "device_ids", "output_device", "process_group", "device_mesh", "all_reduce", "group"),
        "exp sets it, from rank and backend",
    ),
    **{name: f"set wrapper.{name}" for name in DDP_KEYS},
}
"""Arguments of DDP classes that ``wrapper.options`` must not have."""


class OwnStepDataParallel(TrainStep, AveragingDataParallel):
    """The wrapper of a model with a ``train_step`` of its own, whose backward passes DDP does not know."""


def wrap(model: nn.Module, kind: str, options: dict[str, Any], backend: Backend, device: torch.device) -> nn.Module:
    """Wrap a model with DDP.

    Args:
        model: on ``device``.
        kind: ``mmddp`` (MMEngine's class, if the backend uses torch's own DDP), ``ddp`` or ``none``.
        options: keyword arguments of the DDP class, without device arguments.
        backend: has the DDP class (``collectives.ddp_class``).
        device: the device of this rank.

    Returns:
        The wrapped model, which has ``train_step``; the model itself if ``kind`` is ``none``.
    """
    if kind == "none":
        return model
    # It saves a second set of gradients, and a copy of them at each step. Classes of vendors may not support it.
    options = {"gradient_as_bucket_view": backend.collectives.ddp_class is DistributedDataParallel, **options}
    # Pass only options that differ from the defaults: classes of old torch and of vendors do not have every option.
    options = {key: value for key, value in options.items() if value != _DEFAULTS.get(key)}
    wrapped: nn.Module = data_parallel_class(kind, backend)(model, **options, **backend.ddp_kwargs(device))
    return wrapped


def data_parallel_class(kind: str, backend: Backend) -> Any:
    """The class for ``wrapper=mmddp`` or ``ddp``: MMEngine's, torch's or the vendor's; it has ``train_step``."""
    base = backend.collectives.ddp_class
    if kind == "mmddp" and base is DistributedDataParallel:
        return MMDistributedDataParallel
    return type(base.__name__, (TrainStep, base), {"__module__": base.__module__})


def awaited_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, if ``model`` is DDP that waits for all their gradients in each backward pass; else none.

    With ``find_unused_parameters`` or ``static_graph`` DDP knows the parameters without a gradient.
    """
    unused_are_found = getattr(model, "find_unused_parameters", True) or getattr(model, "static_graph", False)
    parameters = {} if unused_are_found else dict(unwrapped(model).named_parameters())
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
