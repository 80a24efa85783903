"""The interface of forecasting models, and their contract with data: what a model uses and gives, what data have."""

from __future__ import annotations

import inspect
from typing import Any, Collection, Mapping, NamedTuple, Sequence

import torch
from torch import nn

from exp.config.resolve import create
from exp.errors import ConfigError, qualified_name
from exp.forecasting.losses import PointLoss
from exp.forecasting.outputs import Output, Points, RawForecast
from exp.hardware.compat import autocast_disabled
from exp.models.base import Model

_INPUTS = ("x", "marks", "future", "static", "observed")  # keys of a batch
STD_EPS = 1e-5
"""Added to the standard deviation of a lookback (not to its variance), as in TimeBridge's and RevIN's code."""


class Forecaster(Model):
    """Base class of forecasting models. A batch has

    - ``x`` (B, L, C): all columns over the lookback, the past of covariates among them;
    - ``marks`` (B, L, M): time features of the lookback;
    - ``y`` (B, H, C), the truth; if some cells have none (NaN) also ``observed`` (B, H, C): 1 where one is, else 0;
    - with ``data.future_covariates``, ``future`` (B, H, K): covariates and time features over the horizon;
    - ``index`` (B,): numbers of the windows.

    A subclass writes ``forecast(x, ...)``, which returns points (B, H, C), standardized like ``x``; its arguments
    declare what the model uses, and one without a default is needed. Losses, instance normalization and the outputs of
    ``model/output`` come from here; the numbers that an output needs beside the points are a linear function of each
    standardized lookback, unless the subclass overrides :meth:`raw_forecast`. A class whose constructor takes and
    passes on ``**keys`` has the keys of :class:`exp.forecasting.keys.OutputKeys`:

        class Linear(Forecaster):
            def __init__(self, lookback, horizon, channels, **keys):
                super().__init__(lookback, horizon, **keys)
                self.layer = torch.nn.Linear(lookback, horizon)

            def forecast(self, x):
                return self.layer(x.transpose(1, 2)).transpose(1, 2)

    A subclass may write ``forward`` itself instead, as :class:`exp.models.base.Model` describes it, without outputs.

    Args:
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        output: what the model gives; None: points.
        loss: of points, see :class:`exp.forecasting.losses.PointLoss`; None: :attr:`default_loss`.
        instance_norm: whether each lookback is standardized by itself, and the forecast set back (RevIN, Kim et al.,
            ICLR 2022, without its weights); None: :attr:`default_instance_norm`.
    """

    default_loss: str = "l1"
    default_instance_norm: bool = False
    gives_values: bool = False
    """Whether ``mode="predict"`` returns the ``values`` of :attr:`output`, (B, H, C, D), and not the points alone; data
    set it if they need quantiles, so that the network runs once."""
    max_targets: int | None = None
    """Most columns that the model forecasts; None: any number."""
    messages: Sequence[str] = ()
    """Sentences about its keys, which a run reports."""

    def __init__(
        self,
        lookback: int = 0,
        horizon: int = 0,
        output: Output | None = None,
        loss: str | None = None,
        instance_norm: bool | None = None,
    ) -> None:
        super().__init__()
        self.output = Points() if output is None else output
        if not isinstance(self.output, Output):
            raise ConfigError(f"model.output: {qualified_name(output)} is not an exp.forecasting.outputs.Output")
        self.point_loss: nn.Module = PointLoss(loss or self.default_loss)
        self.instance_norm = self.default_instance_norm if instance_norm is None else instance_norm
        self.output_horizon = horizon
        own = type(self).raw_forecast is not Forecaster.raw_forecast
        self.inputs = _named_inputs(self.raw_forecast if own else self.forecast)
        if self.output.num_others and not own:
            self.output_head = nn.Linear(lookback, self.output.num_others * horizon)
            nn.init.zeros_(self.output_head.weight)
            nn.init.zeros_(self.output_head.bias)

    def standardize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Series, mean and standard deviation of each lookback; ``x``, 0 and 1 without instance normalization."""
        if self.instance_norm:
            return standardize_lookback(x)
        return x, torch.zeros_like(x[:, :1]), torch.ones_like(x[:, :1])

    def forecast(self, *args: Any, **inputs: Any) -> torch.Tensor:
        """Forecast points, (B, H, C), of ``x`` (B, L, C) and other keys of the batch."""
        raise NotImplementedError(f"{type(self).__name__} has neither forecast(x) nor a forward of its own")

    def raw_forecast(self, x: torch.Tensor, **inputs: torch.Tensor) -> RawForecast:
        """What the network gives for a batch, of which :attr:`output` makes the forecast."""
        series, mean, std = self.standardize(x)
        points = self.forecast(series, **inputs)
        if self.instance_norm:
            points = points.float() * std + mean
        if isinstance(self.output, Points):
            return RawForecast(points, None, std)
        own, _, std = standardize_lookback(x)
        others = None
        if self.output.num_others:
            others = split_heads(in_float32(self.output_head, own.transpose(1, 2)), self.output_horizon)
        return RawForecast(points.float(), others, std)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor | None = None,
        observed: torch.Tensor | None = None,
        mode: str = "tensor",
        **inputs: torch.Tensor,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Forecast, or its loss.

        Args:
            x: (B, L, C), the lookback.
            y: (B, H, C), the truth; only for the loss.
            observed: (B, H, C), 1 where ``y`` has a truth, else 0; None: 1 everywhere.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **inputs: the other keys of the batch.

        Returns:
            The terms of the loss by name, 0-dim; or the forecast: points (B, H, C), and with ``"predict"`` and
            :attr:`gives_values` all values (B, H, C, D).
        """
        given = {key: value for key, value in inputs.items() if key in self.inputs}
        if mode == "loss":
            assert y is not None
            return self.losses(x, y, observed, given)
        values = self.output.values(self.raw_forecast(x, **given))
        return values if self.gives_values and mode == "predict" else values[..., 0]

    def losses(
        self, x: torch.Tensor, y: torch.Tensor, observed: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The terms of the loss by name, 0-dim each; ``inputs``: what :meth:`raw_forecast` takes beside ``x``."""
        return self.output.losses(self.raw_forecast(x, **inputs), y, observed, self.point_loss)


class ModuleForecaster(Forecaster):
    """A torch module of anybody's as a forecaster: ``model=forecaster model.module._target_=my_net.Net``.

    Args:
        module: ``_target_``, a ``torch.nn.Module``, and its arguments; ``lookback``, ``horizon`` and ``channels`` are
            passed if its constructor takes them. Its ``forward`` gets ``x`` (B, L, C) as the first argument, and of
            ``marks``, ``future`` and ``static`` those that it names; it returns (B, H, C).
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        channels: number of series (C).
        **keys: see :class:`Forecaster`.
    """

    raw_arguments = ("module",)

    def __init__(self, module: Mapping[str, Any], lookback: int, horizon: int, channels: int, **keys: Any) -> None:
        super().__init__(lookback, horizon, **keys)
        sizes = {"lookback": lookback, "horizon": horizon, "channels": channels}
        self.network: nn.Module = create(module, nn.Module, "model.module", **sizes)
        self.inputs = {
            "x": True,
            **{key: needed for key, needed in _named_inputs(self.network.forward).items() if key != "x"},
        }

    @property
    def user_module(self) -> nn.Module:  # type: ignore[override]
        """The module."""
        return self.network

    def forecast(self, x: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """See :meth:`Forecaster.forecast`."""
        result: torch.Tensor = self.network(x, **inputs)
        return result


def _named_inputs(function: Any) -> dict[str, bool]:
    """The keys of a batch that a function names as arguments, and whether it needs them."""
    parameters = inspect.signature(function).parameters
    return {key: parameters[key].default is inspect.Parameter.empty for key in _INPUTS if key in parameters}


def split_heads(numbers: torch.Tensor, horizon: int) -> torch.Tensor:
    """What a linear layer gives for each column, (B, C, K * H), as ``others``, (B, H, C, K)."""
    return torch.stack([part.transpose(1, 2) for part in numbers.split(horizon, dim=-1)], dim=-1)


def in_float32(head: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Apply ``head`` without autocast, float32 (..., steps): a forecast must not be rounded to half precision."""
    with autocast_disabled(tokens.device.type):
        output: torch.Tensor = head(tokens.float())
    return output


@torch.no_grad()
def standardize_lookback(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standardize each series by its mean and (unbiased) standard deviation over the lookback, without gradients.

    Args:
        x: (B, L, C).

    Returns:
        The standardized series (B, L, C), mean (B, 1, C) and standard deviation (B, 1, C).
    """
    mean = x.mean(1, keepdim=True)
    std = x.std(1, keepdim=True)
    return (x - mean) / (std + STD_EPS), mean, std


class Contract(NamedTuple):
    """What a model declares, as :class:`Forecaster` describes it.

    Attributes:
        name: of its class.
        inputs: the keys of a batch that it takes, and whether each is needed.
        output: what it gives.
        max_targets: most columns that it forecasts.
        messages: about its keys.
    """

    name: str
    inputs: dict[str, bool]
    output: Output
    max_targets: int | None
    messages: Sequence[str]

    @classmethod
    def of(cls, model: Any) -> Contract:
        """The contract of a model, not wrapped."""
        own = getattr(type(model), "forward", None) is not Forecaster.forward
        inputs = _named_inputs(model.forward) if own else {**model.inputs, "observed": False}
        output = getattr(model, "output", None)
        others = (getattr(model, name, getattr(Forecaster, name)) for name in ("max_targets", "messages"))
        return cls(qualified_name(model), inputs, output if isinstance(output, Output) else Points(), *others)

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
