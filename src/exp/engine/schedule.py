"""Parameter schedulers that MMEngine does not have."""

from __future__ import annotations

from typing import Any

from mmengine.optim import OptimWrapper
from mmengine.registry import PARAM_SCHEDULERS
from torch.optim.lr_scheduler import OneCycleLR

__all__ = ["TorchOneCycle"]


@PARAM_SCHEDULERS.register_module(force=True)
class TorchOneCycle:
    """Torch's own OneCycleLR as an MMEngine parameter scheduler.

    MMEngine's OneCycleLR leaves the momentum alone; torch's cycles it against the learning rate (Smith and Topin,
    arXiv 1708.07120), for Adam its first beta. Published TimeBridge results were trained with torch's.

    Args:
        optimizer: given by the runner.
        eta_max: largest learning rate.
        total_steps: steps of the whole cycle.
        pct_start: part of them in which the rate rises.
    """

    by_epoch = False

    def __init__(
        self, optimizer: Any, eta_max: float, total_steps: int, pct_start: float = 0.3, end: int | None = None
    ) -> None:
        del end  # MMEngine sets it for every scheduler; this one ends with its cycle
        inner = optimizer.optimizer if isinstance(optimizer, OptimWrapper) else optimizer
        self._scheduler = OneCycleLR(inner, max_lr=eta_max, total_steps=total_steps, pct_start=pct_start)

    @classmethod
    def build_iter_from_epoch(
        cls, *, optimizer: Any, epoch_length: int, total_steps: int, by_epoch: bool = True, **kwargs: Any
    ) -> TorchOneCycle:
        """Build for ``total_steps`` epochs; the runner calls this where ``convert_to_iter_based`` is set."""
        del by_epoch
        return cls(optimizer, total_steps=total_steps * epoch_length, **kwargs)

    def step(self) -> None:
        """One optimizer step has been taken."""
        self._scheduler.step()

    def state_dict(self) -> dict[str, int]:
        """The position alone: rates and momenta are in the optimizer's own state, the rest is configuration."""
        return {"last_epoch": self._scheduler.last_epoch, "step_count": self._scheduler._step_count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the position of ``state_dict``."""
        self._scheduler.last_epoch = state_dict["last_epoch"]
        self._scheduler._step_count = state_dict["step_count"]
