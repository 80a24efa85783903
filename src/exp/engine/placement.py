"""Moves a model to its device, and makes it data-parallel if several ranks train it."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from mmengine.model import revert_sync_batchnorm
from torch import nn

from exp.config.resolve import check_arguments, instantiate, resolve, to_plain
from exp.config.schema import DDP_KEYS
from exp.data.fingerprint import shortened
from exp.engine.ddp import _SET_BY_EXP, OwnStepDataParallel, data_parallel_class, wrap
from exp.engine.wrapper import Wrapper, has_own_step, is_sharded
from exp.errors import ConfigError, PlacementError, qualified_name

if TYPE_CHECKING:
    from exp.session import Session


logger = logging.getLogger(__name__)

_SHOWN = 5


def place_and_wrap(model: nn.Module, session: Session, trains: bool = True) -> nn.Module:
    """Move a model to the session's device, and make it data-parallel if several ranks train it.

    Args:
        model: on the CPU; its parameters may be replaced by other objects.
        session: has device, backend and ``wrapper``.
        trains: whether the model is trained. False: it is not wrapped, because in evaluation ranks may have different
            numbers of batches.

    Raises:
        ConfigError: the wrapper does not take its options, or does not support the model.
        PlacementError: the model is not wholly on the device.
        UnavailableError: this version of torch, or the collectives, do not support the wrapper.
    """
    config: Any = session.config.wrapper
    backend, device, info = session.backend, session.device, session.info
    is_distributed, own_step = trains and info.world_size > 1, has_own_step(model)
    wrapper: Wrapper | None = None
    options = dict(to_plain(config.options))
    if trains and (is_distributed or options):  # options are checked on one rank, too
        if config._target_ is not None:
            cls = resolve("wrapper._target_", config._target_, Wrapper)
            check_arguments("wrapper.options", cls, options)
            wrapper = instantiate(cls, "wrapper.options", options) if is_distributed else None
        else:
            cls = OwnStepDataParallel if own_step else data_parallel_class(config.kind, backend)
            check_arguments("wrapper.options", cls, options, _SET_BY_EXP)
    model = model.to(device) if wrapper is None else wrapper.move_to_device(model, backend, device)
    if not is_sharded(model):
        model = fit_batchnorm(model, session, config.sync_batchnorm and info.world_size > 1).to(device)
    check_placement(model, device, info.rank)
    if session.config.report_placement:
        logger.info(placement_report(model, session))
    if not is_distributed:
        return model
    if wrapper is None:
        options.update({name: config[name] for name in DDP_KEYS})
        if not own_step:
            return wrap(model, config.kind, options, backend, device)
        return OwnStepDataParallel(
            model, **options, all_reduce=backend.collectives.all_reduce, group=session.distributed.cpu_group
        )
    wrapped = wrapper.wrap(model, backend, device)
    if wrapped is not model and own_step and not hasattr(wrapped, "exchange_gradients"):
        raise ConfigError(
            f"wrapper={config.kind}: {qualified_name(model)} has a train_step of its own, which "
            f"{qualified_name(wrapped)} does not run; use wrapper=ddp, or give the wrapper exchange_gradients() "
            "(docs/extend/add-a-task.md)"
        )
    return wrapped


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_placement(model: nn.Module, device: torch.device, rank: int) -> None:
    """Refuse a model that is not wholly on ``device``, before it is wrapped.

    Raises:
        PlacementError: the message has the rank, and names, devices and shapes of the first misplaced tensors.
    """
    wrong = [
        f"{name} ({tensor.device}, shape {tuple(tensor.shape)})"
        for name, tensor in _named_tensors(model)
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index)
    ]
    if wrong:
        raise PlacementError(
            f"rank {rank}: {len(wrong)} of {len(_named_tensors(model))} parameters and buffers are not on {device}; "
            "make every tensor of the model a parameter or a buffer, and do not move it after it was built: "
            + shortened(wrong, _SHOWN)
        )


def placement_report(model: nn.Module, session: Session) -> str:
    """A text about this rank's parameters: tensors by device, the first five parameters, and the process group."""
    parameters, info = list(model.named_parameters()), session.info
    by_device = Counter(str(tensor.device) for _, tensor in _named_tensors(model))
    lines = [
        f"placement: rank {info.rank}  local_rank {info.local_rank}  world_size {info.world_size}  "
        f"device {session.device}  {session.distributed.process_group}",
        f"  {sum(p.numel() for _, p in parameters):,} values in {len(parameters)} parameters; tensors by device: "
        + ", ".join(f"{name} {count}" for name, count in sorted(by_device.items())),
    ]
    lines += [f"  {n}: {p.device}, shape {tuple(p.shape)}, {p.dtype}" for n, p in parameters[:_SHOWN]]
    return "\n".join(lines)


def fit_batchnorm(model: nn.Module, session: Session, synchronize: bool) -> nn.Module:
    """Convert batch norms to synchronized ones if wanted, or to plain ones if the backend has no synchronized ones.

    The latter is reported. Weights and running statistics are kept.

    Args:
        model: the model with its weights.
        session: its backend knows whether it supports synchronized batch norm.
        synchronize: convert every batch norm (``wrapper.sync_batchnorm``).

    Returns:
        The model; some of its modules may be new.
    """
    if session.backend.capabilities.sync_batchnorm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronize else model
    has = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if has or synchronize:
        session.print(
            f"warning: backend={session.backend.name} has no synchronized batch norm: each device computes statistics "
            "of its own samples; use a larger batch_size, or a norm that does not depend on the batch"
        )
    return revert_sync_batchnorm(model) if has else model
