"""Distributions of counts, such as sales of a shop: Poisson and negative binomial.

Probabilities are computed in the form of Loader ("Fast and accurate computation of binomial probabilities", 2000), as R
does: of differences between the count and its mean, so that float32 suffices for large counts, too.
"""

from __future__ import annotations

from typing import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from exp.forecasting.outputs import Distribution, RawForecast, log_gamma_remainder

_EXACT = 32  # counts that are summed one by one
_BINS = 64  # bins for larger ones, within this many standard deviations of the mean:
_WIDTH = 8.0
_INITIAL_SIZE = 2.0  # softplus of it is `size` before the training
_MIN_MEAN, _MIN_SIZE = 1e-6, 1e-3


class Poisson(Distribution):
    """A Poisson distribution; ``values`` are its mean, which is the forecast. For data in the units of the file.

    The mean is a softplus of the network's points, in units of the lookback's deviation, so that it is positive. A
    quantile is the smallest count whose cumulated probability reaches the level. It is exact below 32; the probability
    of larger ones is summed over bins of a quarter of a standard deviation, with an error below .01 in probability.
    """

    is_count = True

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`exp.forecasting.outputs.Output.values`."""
        unit = raw.scale + 1.0
        return (F.softplus(raw.points / unit) * unit + _MIN_MEAN).unsqueeze(-1)

    def log_density(self, values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See :meth:`exp.forecasting.outputs.Distribution.log_density`."""
        mean = values[..., 0]
        return y - mean - log_gamma_remainder(y) - y * _log_ratio(y, mean)

    def _first(self, values: torch.Tensor) -> torch.Tensor:
        """The probability of 0."""
        return torch.exp(-values[..., 0])

    def _ratio(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """The probability of ``count``, as a multiple of that of ``count - 1``."""
        return values[..., 0] / count

    def _stabilized(self, values: torch.Tensor, counts: torch.Tensor | float) -> torch.Tensor:
        """Counts on a scale on which their standard deviation is about 1."""
        return 2.0 * torch.sqrt(torch.ones_like(values[..., 0]) * counts)

    def _counts(self, values: torch.Tensor, stabilized: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_stabilized`."""
        return (0.5 * stabilized).square()

    def quantiles(self, values: torch.Tensor, taus: Sequence[float]) -> Iterator[torch.Tensor]:
        """See :meth:`exp.forecasting.outputs.Output.quantiles`; all of them are computed at once."""
        quantiles = [torch.zeros_like(values[..., 0]) for _ in taus]
        probability = total = self._first(values)
        for count in range(1, _EXACT):
            for quantile, tau in zip(quantiles, taus):
                quantile += (total < tau).float()
            probability = probability * self._ratio(values, count)
            total = total + probability
        mean, least = (self._stabilized(values, counts) for counts in (values[..., 0], _EXACT - 0.5))
        low = torch.maximum(least, mean - _WIDTH)
        step = (torch.maximum(least, mean) + _WIDTH - low) / _BINS
        edge = self._counts(values, low)
        jump = edge - (_EXACT - 1.0)  # counts between are too improbable to matter
        for number in range(_BINS):
            above = self._counts(values, low + step * (number + 1.0))
            middle = self._counts(values, low + step * (number + 0.5))
            mass = torch.exp(self.log_density(values, middle)) * (above - edge)
            for quantile, tau in zip(quantiles, taus):
                share = ((tau - total) / mass.clamp_min(1e-30)).clamp(0.0, 1.0)
                quantile += share * (above - edge) + (jump * (total < tau).float() if number == 0 else 0.0)
            total, edge = total + mass, above
        return (torch.where(each >= _EXACT, torch.floor(each + 0.5), each.floor()) for each in quantiles)

    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """See :meth:`exp.forecasting.outputs.Output.sample`."""
        mean = values[..., 0].double().numpy()
        return generator.poisson(mean, (count, *mean.shape)).astype(np.float64)


class NegativeBinomial(Poisson):
    """A negative binomial distribution, for counts that vary more than those of a Poisson distribution.

    ``values`` are the mean m and the size r; the variance is m + m**2 / r.
    """

    num_others, num_values = 1, 2

    def values(self, raw: RawForecast) -> torch.Tensor:
        """See :meth:`exp.forecasting.outputs.Output.values`."""
        assert raw.others is not None
        size = F.softplus(raw.others[..., 0] + _INITIAL_SIZE) + _MIN_SIZE
        return torch.stack([super().values(raw)[..., 0], size], dim=-1)

    def log_density(self, values: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See :meth:`exp.forecasting.outputs.Distribution.log_density`."""
        mean, size = values.unbind(-1)
        total = y + size
        remainders = log_gamma_remainder(total) - log_gamma_remainder(size) - log_gamma_remainder(y)
        powers = y * (torch.log1p(size / y.clamp_min(1e-30)) - torch.log1p(size / mean))
        return remainders + powers + size * _log_ratio(total, size + mean) - torch.log(total / size)

    def _first(self, values: torch.Tensor) -> torch.Tensor:
        mean, size = values.unbind(-1)
        return torch.exp(-size * torch.log1p(mean / size))

    def _ratio(self, values: torch.Tensor, count: int) -> torch.Tensor:
        mean, size = values.unbind(-1)
        return (count - 1.0 + size) / count * (mean / (mean + size))

    def _stabilized(self, values: torch.Tensor, counts: torch.Tensor | float) -> torch.Tensor:
        root = torch.sqrt(values[..., 1])
        ratio = torch.sqrt(torch.ones_like(root) * counts) / root
        return 2.0 * root * torch.log(ratio + torch.sqrt(ratio.square() + 1.0))  # asinh

    def _counts(self, values: torch.Tensor, stabilized: torch.Tensor) -> torch.Tensor:
        size = values[..., 1]
        half = (0.5 * stabilized / torch.sqrt(size)).clamp_max(40.0)
        return size * (0.5 * (torch.exp(half) - torch.exp(-half))).square()  # sinh

    def sample(self, values: torch.Tensor, count: int, generator: np.random.Generator) -> np.ndarray:
        """See :meth:`exp.forecasting.outputs.Output.sample`."""
        mean, size = values.double().numpy().transpose(3, 0, 1, 2)
        return generator.negative_binomial(size, size / (size + mean), (count, *mean.shape)).astype(np.float64)


def _log_ratio(number: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``log(number / other)``, also with all digits where both are nearly equal."""
    ratio = (number - other) / other
    near, far = torch.log1p(ratio.clamp(-0.5, 0.5)), torch.log(number.clamp_min(1e-30) / other)
    return torch.where(ratio.abs() < 0.5, near, far)
