"""The interface of forecasting models, and their contract with data: what a model uses and gives, what data have."""

from __future__ import annotations

import inspect
from typing import Any, Collection, NamedTuple, Sequence

import torch
from torch import nn

from exp.errors import ConfigError, qualified_name
from exp.models.base import Model

__all__ = ["Contract", "Forecaster", "PointLoss", "masked_difference", "masked_mean"]

_INPUTS = ("x", "marks", "future", "static", "observed")


class Forecaster(Model):
    """Base class of forecasting models. Any other module with such members is one, too.

    The arguments of ``forward`` declare what a model uses; one without a default is needed. A batch has

    - ``x`` (B, L, C): all columns over the lookback, the past of covariates among them;
    - ``marks`` (B, L, M): time features of the lookback;
    - ``y`` (B, H, C), the truth; if some cells have none (NaN) also ``observed`` (B, H, C): 1 where one is, else 0;
    - with ``data.future_covariates``, ``future`` (B, H, K): covariates and time features over the horizon;
    - ``index`` (B,): numbers of the windows.

    ``forward(..., mode="predict")`` returns points (B, H, C), standardized like ``x``.
    """

    distribution: str | None = None
    """What ``forward(..., mode="distribution")`` returns, standardized: ``"std"``, standard deviations (B, H, C) of a
    Gaussian around the points; ``"quantiles"`` (B, H, C, Q), ascending, of which the one at 0.5 is the points; None:
    the model has points only."""
    quantiles: Sequence[float] | None = None
    """The levels of the quantiles, ascending."""
    max_targets: int | None = None
    """Most columns that the model forecasts; None: any number."""
    messages: Sequence[str] = ()
    """Sentences about its keys, which a run reports."""


class Contract(NamedTuple):
    """What a model declares, as :class:`Forecaster` describes it.

    Attributes:
        name: of its class.
        inputs: the arguments of ``forward``, and whether each is needed.
        distribution: what it gives beside points.
        quantiles: their levels.
        max_targets: most columns that it forecasts.
        messages: about its keys.
    """

    name: str
    inputs: dict[str, bool]
    distribution: str | None
    quantiles: Sequence[float] | None
    max_targets: int | None
    messages: Sequence[str]

    @classmethod
    def of(cls, model: Any) -> Contract:
        """The contract of a model, not wrapped."""
        parameters = inspect.signature(model.forward).parameters
        inputs = {key: parameters[key].default is inspect.Parameter.empty for key in _INPUTS if key in parameters}
        names = ("distribution", "quantiles", "max_targets", "messages")
        return cls(qualified_name(model), inputs, *(getattr(model, name, getattr(Forecaster, name)) for name in names))

    def uses(self, key: str) -> bool:
        """Whether the model uses a value of the batch; true for one that names none of them and passes all on."""
        return key in self.inputs or not self.inputs

    def check(self, provided: Collection[str], num_targets: int) -> None:
        """Compare with what data have.

        Args:
            provided: keys of a batch.
            num_targets: columns that are forecast.

        Raises:
            ConfigError: the model needs what the data do not have, or forecasts fewer columns.
        """
        for key, is_needed in self.inputs.items():
            if is_needed and key not in provided:
                advice = "set data.future_covariates" if key == "future" else "take other data"
                raise ConfigError(f"model: {self.name}.forward needs {key}, which the data do not have; {advice}")
        if self.max_targets is not None and num_targets > self.max_targets:
            raise ConfigError(
                f"model: {self.name} forecasts up to {self.max_targets} columns, and the data have {num_targets}; name "
                "those to be forecast in data.targets"
            )


def masked_difference(prediction: torch.Tensor, truth: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """``prediction - truth``, and 0 without gradient where there is no truth.

    Args:
        prediction: (B, H, C).
        truth: (B, H, C); any value where ``observed`` is 0, also NaN.
        observed: (B, H, C), 1 where there is a truth, else 0.
    """
    difference = prediction - truth
    return torch.where(observed > 0, difference, torch.zeros_like(difference))


def masked_mean(errors: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """The mean over each window's cells that have a truth, and then over windows; a window without truth counts as 0.

    Every window has the same weight, so the result does not depend on how windows are distributed over devices.

    Args:
        errors: (B, H, C), 0 where ``observed`` is 0.
        observed: (B, H, C), 1 or 0.

    Returns:
        0-dim.
    """
    return (errors.sum(dim=(1, 2)) / observed.sum(dim=(1, 2)).clamp_min(1.0)).mean()


class PointLoss(nn.Module):
    """A mean of errors, for the key ``loss`` of a forecaster: ``l1``, ``l2`` or ``huber`` (quadratic below 1).

    Computed in float32. Where cells have no truth, it is the mean of each window, and then over windows
    (:func:`masked_mean`).

    Args:
        name: of the loss.

    Raises:
        ConfigError: there is no such loss.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in ("l1", "l2", "huber"):
            raise ConfigError(f"model.loss={name} is not one of l1, l2, huber (null: the loss of the model's authors)")
        self.name = name

    def forward(
        self, prediction: torch.Tensor, target: torch.Tensor, observed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``prediction``, ``target`` and ``observed`` (1 where there is a truth): (B, H, C); result: 0-dim."""
        seen = torch.ones_like(target) if observed is None else observed
        error = masked_difference(prediction.float(), target.float(), seen)
        size = error.abs()
        if self.name == "l2":
            size = error * error
        elif self.name == "huber":
            low = size.clamp(max=1.0)
            size = low * (size - 0.5 * low)
        return masked_mean(size, seen)
