"""Batch norms over several ranks: synchronized where the backend can, else one running statistic for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable

import torch
from mmengine.model import revert_sync_batchnorm
from torch import nn

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.session import Session

__all__ = ["average_buffers", "fit_batchnorm"]


def fit_batchnorm(model: nn.Module, session: Session, synchronize: bool) -> nn.Module:
    """Convert batch norms into what the backend can do; says so if that is less than the model wants.

    Args:
        model: with its weights; they are kept, and so are the running statistics.
        session: its backend says whether it synchronizes.
        synchronize: make every batch norm a synchronized one (``wrapper.sync_batchnorm``).
    """
    if session.backend.capabilities.sync_batchnorm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronize else model
    has = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if has or synchronize:
        session.say(
            f"warning: backend={session.backend.name} has no synchronized batch norm: statistics are those of each "
            "device's own samples; a larger batch_size makes up for it, or a norm that does not look at the batch"
        )
    return revert_sync_batchnorm(model) if has else model


@torch.no_grad()
def average_buffers(modules: Iterable[nn.Module], distributed: Distributed) -> None:
    """Give all ranks the mean of their floating-point buffers, such as running statistics of unsynchronized norms.

    One exchange for all buffers, in float64 on the CPU: the mean of equal values is that value to the last bit, so
    constants stay what they are, and every process group carries it. Integer buffers count steps and are equal.

    Args:
        modules: the model and its copies; the same on every rank.
        distributed: with one process nothing is done.
    """
    if distributed.world_size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = {}
    for module in modules:
        for buffer in module.buffers():
            if buffer.is_floating_point() and buffer.numel():
                groups.setdefault((buffer.dtype, buffer.device), {})[id(buffer)] = buffer
    if not groups:
        return
    flat = [torch.cat([buffer.reshape(-1) for buffer in group.values()]) for group in groups.values()]
    mean = distributed.sum(torch.cat([part.cpu().double() for part in flat])) / distributed.world_size
    for group, own, part in zip(groups.values(), flat, mean.split([part.numel() for part in flat])):
        shares = part.to(own.dtype).to(own.device).split([buffer.numel() for buffer in group.values()])
        for buffer, share in zip(group.values(), shares):
            buffer.copy_(share.view_as(buffer))
