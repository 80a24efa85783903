"""What a forecaster gives: points, quantiles or a distribution (``model/output=<choice>``).

A network gives numbers (:class:`RawForecast`); an :class:`Output` makes of them the forecast, its loss, its quantiles
and samples, for any network. Distributions of counts are in :mod:`exp.forecasting.counts`. Densities and quantiles are
made of elementwise operators that every card has: ``lgamma`` and the incomplete integrals are missing on many.
"""

from __future__ import annotations

import abc
import math
from statistics import NormalDist
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from exp.errors import ConfigError
from exp.forecasting.losses import masked_difference, masked_mean

PointLossFunction = Callable[..., torch.Tensor]

_MIN_SCALE = 0.1  # of a lookback in which nothing changes, in standard deviations of the series
_MIN_STD = 1e-6  # smallest standard deviation that errors are divided by
_INITIAL_DEGREES = 3.0  # softplus of it, above 2: degrees of freedom of 5 before the training


class RawForecast(NamedTuple):
    """What a network gives for a batch, float32.

    Attributes:
        points: (B, H, C), in the units of ``x``.
        others: :attr:`Output.num_others` further numbers of each step and column, any real number, (B, H, C, K); None:
            there are none.
        scale: unit of ``others``, the standard deviation of each lookback, (B, 1, C).
    """

    points: torch.Tensor
    others: torch.Tensor | None
    scale: torch.Tensor


class Output(nn.Module, abc.ABC):
    """Base class of outputs. A forecast is a tensor of ``values`` (B, H, C, D); the first of the D is the points."""

    num_others: int = 0
    """Numbers of a step and column that the network gives beside the points (K)."""
    num_values: int = 1
    """Length of the last axis of ``values`` (D)."""
    levels: Sequence[float] | None = None
    """The levels of the quantiles, ascending, if these are all that the output knows; None: any level."""
    is_count: bool = False
    """Whether it is for counts: whole numbers from 0 on, in the units of the file."""
    is_fitted: bool = True
    """Whether the loss fits its quantiles to the truth; if not, intervals are corrected on the validation split."""
    is_location_scale: bool = False
    """Whether each quantile is the points and a constant times :meth:`spread`."""

    @abc.abstractmethod
    def values(self, raw: RawForecast) -> torch.Tensor:
        """The values of a forecast, float32 (B, H, C, D)."""

    @abc.abstractmethod
    def losses(
        self, raw: RawForecast, y: torch.Tensor, observed: torch.Tensor | None, point_loss: PointLossFunction
    ) -> dict[str, torch.Tensor]:
        """The terms of the loss by name, 0-dim each; each is a mean over windows.

        Args:
            raw: of the network.
            y: the truth, (B, H, C).
            observed: 1 where ``y`` has a truth, else 0, (B, H, C); None: 1 everywhere.
            point_loss: the loss of points (``model.loss``), a function of forecast, truth and ``observed``.
        """

    @abc.abstractmethod
    def quantiles(self, values: torch.Tensor, taus: Sequence[float]) -> Iterator[torch.Tensor]:
        """Yield the quantile (B, H, C) of each level, in their order; they may cross by rounding only.

        Args:
            values: of :meth:`values`.
            taus: levels between 0 and 1; with :attr:`levels` some of these.
        """

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """What corrections of quantiles are multiples of, (B, H, C): a standard deviation, or 1."""
        return torch.ones_like(values[..., 0])

    @abc.abstractmethod
    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """Draw independent values of each step and column, on the CPU; (count, B, H, C)."""


class Points(Output):
    """Points alone, with the loss of ``model.loss``. Its quantiles equal the points until they are corrected."""

    is_location_scale = True

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`Output.values`."""
        return raw.points.unsqueeze(-1)

    def losses(
        self, raw: RawForecast, y: torch.Tensor, observed: torch.Tensor | None, point_loss: PointLossFunction
    ) -> dict[str, torch.Tensor]:
        """See :meth:`Output.losses`."""
        return {"loss": point_loss(raw.points, y, observed)}

    def quantiles(self, values: torch.Tensor, taus: Sequence[float]) -> Iterator[torch.Tensor]:
        """See :meth:`Output.quantiles`."""
        return (values[..., 0] for _ in taus)

    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """Repeat the points."""
        return np.repeat(values[..., 0].numpy()[None], count, axis=0)


class Quantiles(Output):
    """Quantiles at some levels: the points, which are the median, and a number for each other level.

    The median has the loss of ``model.loss``; the others have twice the pinball loss (Koenker and Bassett, Econometrica
    46(1), 1978), averaged over levels. Twice, so that the loss of a median would be the mean absolute error. From the
    median outwards each is moved to be at least as far out as the one before it. ``values`` has the points first, and
    then the quantiles of all levels.

    Args:
        levels: ascending between 0 and 1, with 0.5 and another one.

    Raises:
        ConfigError: they are not.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        super().__init__()
        self.levels = [float(level) for level in levels]
        valid = sorted({level for level in self.levels if 0.0 < level < 1.0} | {0.5})
        if self.levels != valid or len(valid) < 2:
            raise ConfigError(
                f"model.output.levels={self.levels} must ascend between 0 and 1, with 0.5, which is the forecast, and "
                "another one"
            )
        self.num_others, self.num_values = len(valid) - 1, len(valid) + 1

    @staticmethod
    def _others(raw: RawForecast) -> list[torch.Tensor]:
        """The quantiles beside the median, which may cross."""
        assert raw.others is not None
        return [raw.points + other * raw.scale for other in raw.others.unbind(-1)]

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`Output.values`."""
        assert self.levels is not None
        others, middle = self._others(raw), self.levels.index(0.5)
        below = [*uncross(raw.points, others[:middle][::-1], torch.minimum)][::-1]
        above = uncross(raw.points, others[middle:], torch.maximum)
        return torch.stack([raw.points, *below, raw.points, *above], dim=-1)

    def losses(
        self, raw: RawForecast, y: torch.Tensor, observed: torch.Tensor | None, point_loss: PointLossFunction
    ) -> dict[str, torch.Tensor]:
        """See :meth:`Output.losses`."""
        assert self.levels is not None
        losses = []
        for quantile, tau in zip(self._others(raw), (level for level in self.levels if level != 0.5)):
            error = y - quantile if observed is None else masked_difference(y, quantile, observed)
            loss = torch.maximum(tau * error, (tau - 1.0) * error)
            losses.append(loss.mean() if observed is None else masked_mean(loss, observed))
        return {
            "loss_forecast": point_loss(raw.points, y, observed),
            "loss_quantiles": 2.0 * torch.stack(losses).mean(),
        }

    def quantiles(self, values: torch.Tensor, taus: Sequence[float]) -> Iterator[torch.Tensor]:
        """See :meth:`Output.quantiles`."""
        assert self.levels is not None
        return (values[..., 1 + self.levels.index(tau)] for tau in taus)

    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """Draw levels, and interpolate between the quantiles; beyond the outermost ones these are repeated."""
        assert self.levels is not None
        heads, levels = values[..., 1:].numpy(), np.array(self.levels)
        drawn = generator.random((count, *heads.shape[:-1]))
        upper = np.searchsorted(levels, drawn).clip(1, len(levels) - 1)
        share = ((drawn - levels[upper - 1]) / (levels[upper] - levels[upper - 1])).clip(0.0, 1.0)
        low, high = (np.take_along_axis(heads[None], index[..., None], axis=-1)[..., 0] for index in (upper - 1, upper))
        return np.asarray(low + share * (high - low))


def uncross(
    middle: torch.Tensor, outward: Sequence[torch.Tensor] | Iterator[torch.Tensor], outer: Callable[..., torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Move quantiles on one side of the median so that each is at least as far out as the one before it.

    This needs only minimum and maximum, which every card has; not every card can sort.

    Args:
        middle: the median, any shape.
        outward: the quantiles from the median outwards, same shape.
        outer: ``torch.minimum`` below the median, ``torch.maximum`` above it.
    """
    for quantile in outward:
        middle = outer(middle, quantile)
        yield middle


class Distribution(Output):
    """Base class of parametric distributions: the loss is the negative log-likelihood."""

    @abc.abstractmethod
    def log_density(self, values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The logarithm of the density, or of the probability of a count, at ``y``, (B, H, C)."""

    def losses(
        self, raw: RawForecast, y: torch.Tensor, observed: torch.Tensor | None, point_loss: PointLossFunction
    ) -> dict[str, torch.Tensor]:
        """See :meth:`Output.losses`; ``point_loss`` plays no part."""
        values, seen = self.values(raw), torch.ones_like(raw.points) if observed is None else observed
        filled = torch.where(seen > 0, y.float(), values[..., 0].detach())
        loss = -self.log_density(values, filled)
        return {"loss": masked_mean(torch.where(seen > 0, loss, torch.zeros_like(loss)), seen)}


class Normal(Distribution):
    """A Gaussian around the points; ``values`` are mean and standard deviation."""

    num_others, num_values, is_location_scale = 1, 2, True

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`Output.values`."""
        assert raw.others is not None
        return torch.stack([raw.points, _positive(raw.others[..., 0], raw.scale)], dim=-1)

    def log_density(self, values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See :meth:`Distribution.log_density`."""
        mean, std = values.unbind(-1)
        return -0.5 * ((y - mean) / std).square() - torch.log(std) - 0.5 * math.log(2.0 * math.pi)

    def quantiles(self, values: torch.Tensor, taus: Sequence[float]) -> Iterator[torch.Tensor]:
        """See :meth:`Output.quantiles`."""
        return (values[..., 0] + NormalDist().inv_cdf(tau) * values[..., 1] for tau in taus)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The standard deviation."""
        return values[..., 1].clamp_min(_MIN_STD)

    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """See :meth:`Output.sample`."""
        mean, std = values.numpy().transpose(3, 0, 1, 2)
        return generator.normal(mean, std, (count, *mean.shape))


class PosteriorDeviations(Normal):
    """A Gaussian whose standard deviations, the only ``others``, no term of the loss fits to errors of forecasts."""

    is_fitted = False

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`Output.values`; the points alone where nobody asks for deviations."""
        points = raw.points.unsqueeze(-1)
        return points if raw.others is None else torch.cat([points, raw.others], dim=-1)

    losses = Points.losses


class StudentT(Distribution):
    """Student's t around the points, for errors with heavy tails; ``values`` are location, scale, degrees of freedom.

    There are more than 2 degrees of freedom, so that there is a variance, as in GluonTS.
    """

    num_others, num_values = 2, 3

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`Output.values`."""
        assert raw.others is not None
        scale, degrees = raw.others.unbind(-1)
        degrees = 2.0 + F.softplus(degrees + _INITIAL_DEGREES)
        return torch.stack([raw.points, _positive(scale, raw.scale), degrees], dim=-1)

    def log_density(self, values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See :meth:`Distribution.log_density`."""
        location, scale, degrees = values.unbind(-1)
        half = 0.5 * degrees
        # log gamma(half + 1/2) - log gamma(half), by log gamma(x) = remainder(x) + (x - 1) log x - x
        constant = log_gamma_remainder(half + 0.5) - log_gamma_remainder(half) - 0.5
        constant = constant + (half - 0.5) * torch.log1p(0.5 / half) + 0.5 * torch.log(half)
        square = ((y - location) / scale).square() / degrees
        return constant - 0.5 * torch.log(math.pi * degrees) - torch.log(scale) - (half + 0.5) * torch.log1p(square)

    def quantiles(self, values: torch.Tensor, taus: Sequence[float]) -> Iterator[torch.Tensor]:
        """See :meth:`Output.quantiles`."""
        location, scale, degrees = values.unbind(-1)
        for tau in taus:
            size = scale * _student_quantile(min(tau, 1.0 - tau), degrees) if tau != 0.5 else 0.0
            yield location + size if tau > 0.5 else location - size

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """The scale."""
        return values[..., 1]

    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """See :meth:`Output.sample`."""
        location, scale, degrees = values.numpy().transpose(3, 0, 1, 2)
        return np.asarray(location + scale * generator.standard_t(degrees, (count, *location.shape)))


def _positive(number: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A positive number in units of ``scale``; a flat lookback does not say that nothing will change."""
    return F.softplus(number) * scale.clamp_min(_MIN_SCALE) + _MIN_STD


def log_gamma_remainder(x: torch.Tensor) -> torch.Tensor:
    """``log gamma(x + 1) - x log x + x`` for x >= 0, float32: Stirling's remainder and ``log(2 pi x) / 2``.

    It is small where ``log gamma`` is large, so that differences of it keep their digits. From 8 on by Stirling's
    series; below by way of x + 8 (Abramowitz and Stegun, 6.1.15 and 6.1.41). The error is below 1e-5.
    """
    large = x.clamp_min(8.0)
    by_series = 0.5 * torch.log(2.0 * math.pi * large) + _stirling(large)
    small = x.clamp(1e-30, 8.0)
    product = small + 1.0
    for step in range(2, 9):
        product = product * (small + float(step))
    above = small + 8.0
    log_gamma = (above + 0.5) * torch.log(above) - above + 0.5 * math.log(2.0 * math.pi) + _stirling(above)
    return torch.where(x < 8.0, log_gamma - torch.log(product) - small * torch.log(small) + small, by_series)


def _stirling(x: torch.Tensor) -> torch.Tensor:
    square = 1.0 / (x * x)
    return (1.0 / 12.0 - square * (1.0 / 360.0 - square / 1260.0)) / x


def _student_quantile(tail: float, degrees: torch.Tensor) -> torch.Tensor:
    """The positive t that is exceeded with probability ``tail``; elementwise, for degrees of freedom of 2 and more.

    Hill, Algorithm 396, Comm. ACM 13(10), 1970, with his correction of 1981. The relative error is below 1e-3
    at 2 degrees, and smaller from there.
    """
    n, normal = degrees, NormalDist().inv_cdf(tail)
    a = 1.0 / (n - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * torch.sqrt(a * (0.5 * math.pi)) * n
    y = torch.exp(torch.log(2.0 * tail * d) * (2.0 / n))
    # Far from the tail: an expansion around the quantile of a Gaussian.
    c = c + torch.where(n < 5.0, 0.3 * (n - 4.5) * (normal + 0.6), torch.zeros_like(n))
    c = (((0.05 * d * normal - 5.0) * normal - 7.0) * normal - 2.0) * normal + b + c
    square = normal * normal
    inner = (((((0.4 * square + 6.3) * square + 36.0) * square + 94.5) / c - square - 3.0) / b + 1.0) * normal
    inner = torch.exp(a * inner * inner) - 1.0
    # In the tail: an expansion of the inverse.
    outer = (1.0 / (((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0) + 0.5 / (n + 4.0)) * y - 1.0
    outer = outer * (n + 1.0) / (n + 2.0) + 1.0 / y
    return torch.sqrt(n * torch.where(y > a + 0.05, inner, outer).clamp_min(0.0))
