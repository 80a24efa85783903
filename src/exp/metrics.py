"""The metric interface: figures that do not depend on how samples were batched or spread over ranks."""

from __future__ import annotations

import abc
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Sequence

import torch

from exp.errors import EXPERIMENT_PAGE, ConfigError, DataError, shown

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["LINE_KEYS", "Evaluator", "Metric", "SampleMetric", "Table"]

LINE_KEYS = ("split", "step", "epoch", "units")
"""What a line of ``metrics.jsonl`` has besides its figures, which cannot be called so."""


class Table(NamedTuple):
    """Metrics in detail.

    Attributes:
        name: of the table, such as ``per_class``; ``metrics_<name>.csv`` has it.
        key: what a row is, such as ``class``.
        rows: name of each row.
        columns: values by metric, one for each row.
        units: what values a metric is of, where its name does not say it.
    """

    name: str
    key: str
    rows: Sequence[str]
    columns: dict[str, list[float]]
    units: Mapping[str, str] = MappingProxyType({})


class Metric(abc.ABC):
    """One or several figures of a pass over a split, taken in batch by batch.

    Add up what is exact in any order (counts, sums in float64 on the CPU at the end); compute the quotient once, in
    :meth:`compute`. An average of averages of batches would depend on the batch size and on the number of ranks.

    Attributes:
        names: what :meth:`compute` gives; none of :data:`LINE_KEYS`.
        greater_is_better: whether larger values are better; each class says it, or inherits it.
        units: what values a figure is of, by name, where the name does not say it.
    """

    names: Sequence[str] = ()
    greater_is_better: bool
    units: Mapping[str, str] = MappingProxyType({})

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything: a new pass begins."""

    @abc.abstractmethod
    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: what the model predicts in ``mode="predict"``, on its device; read nothing from there.
            batch: the batch of the data, on the same device.
        """

    @abc.abstractmethod
    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks, by name; called by every rank, also by one that had no batch.

        Args:
            distributed: its ``sum(tensor)`` adds a CPU tensor over all ranks, in place.
        """

    def tables(self) -> list[Table]:
        """The figures in detail, for ``task=eval``; after :meth:`compute`."""
        return []


class SampleMetric(Metric):
    """The mean of one figure per sample, exact over any number of ranks and any batch size.

    A subclass sets ``names`` to one name, and writes :meth:`per_sample`.
    """

    def __init__(self) -> None:
        self.reset()

    @abc.abstractmethod
    def per_sample(self, outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The figure of each sample of a batch, (B,), on the device.

        Samples whose value is nan do not count: those without a truth. Predictions that are nan fail the run anyhow.
        """

    def reset(self) -> None:
        """Forget everything."""
        self.values: list[torch.Tensor] = []

    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Raises:
            ConfigError: :meth:`per_sample` gives something else.
        """
        values = self.per_sample(outputs, batch)
        if not isinstance(values, torch.Tensor) or values.dim() != 1:
            found = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise ConfigError(
                f"metric: {shown(self)}.per_sample must give a tensor (B,), not {found}; see {EXPERIMENT_PAGE}"
            )
        self.values.append(values.detach().float())

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The mean over all samples of all ranks.

        Raises:
            DataError: there was no sample that counts on any rank.
        """
        total = torch.zeros(2, dtype=torch.float64)
        if self.values:
            values = torch.cat([value.reshape(-1) for value in self.values]).cpu().double()
            values = values[~torch.isnan(values)]
            total[0], total[1] = values.sum(), len(values)
        distributed.sum(total)
        if total[1] == 0:
            raise DataError(f"there is no sample that {self.names[0]} could be measured on")
        return {self.names[0]: float(total[0] / total[1])}


class Evaluator:
    """Several metrics as one, which the evaluation loop takes.

    Args:
        metrics: those of the data, and of the configuration's ``metrics``.
        chosen: the name of the figure by which the best model is chosen and sweeps are judged; None: the first.

    Attributes:
        metric_name: that name.
        greater_is_better: whether larger values of it are better.

    Raises:
        ConfigError: one is no metric, two give the same name, or none gives the chosen one.
    """

    def __init__(self, metrics: Sequence[Metric], chosen: str | None = None) -> None:
        self.metrics = list(metrics)
        owner: dict[str, Metric] = {}
        for metric in self.metrics:
            _check(metric)
            for name in metric.names:
                if name in owner:
                    raise ConfigError(f"two metrics give {name}: {shown(owner[name])} and {shown(metric)}; rename one")
                owner[name] = metric
        if chosen is not None and chosen not in owner:
            raise ConfigError(f"metric={chosen} is none of those that are measured: {', '.join(owner)}")
        self.metric_name = chosen if chosen is not None else next(iter(owner))
        self.greater_is_better = bool(owner[self.metric_name].greater_is_better)

    @property
    def names(self) -> list[str]:
        """Of all figures."""
        return [name for metric in self.metrics for name in metric.names]

    @property
    def units(self) -> dict[str, str]:
        """What values a figure is of, by name."""
        return {name: unit for metric in self.metrics for name, unit in metric.units.items()}

    def reset(self) -> None:
        """Forget everything."""
        for metric in self.metrics:
            metric.reset()

    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Take in one batch."""
        for metric in self.metrics:
            metric.update(outputs, batch)

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """All figures over all ranks."""
        found: dict[str, float] = {}
        for metric in self.metrics:
            given = metric.compute(distributed)
            for name in metric.names:
                value: Any = given[name]
                found[name] = value.item() if getattr(value, "shape", None) == () else value  # NumPy's, and torch's
        return found

    def tables(self) -> list[Table]:
        """Those of all metrics; after :meth:`compute`."""
        return [table for metric in self.metrics for table in metric.tables()]


def _check(metric: Any) -> None:
    if not isinstance(metric, Metric):
        raise ConfigError(f"metric: {shown(metric)} is no exp.metrics.Metric; see {EXPERIMENT_PAGE}")
    names = metric.names
    taken = [name for name in names if name in LINE_KEYS]
    if isinstance(names, str) or not names or taken:
        raise ConfigError(
            f"metric: {shown(metric)}.names must be a list of names of figures, none of {', '.join(LINE_KEYS)}, "
            f"not {names!r}; see {EXPERIMENT_PAGE}"
        )
    if not isinstance(getattr(metric, "greater_is_better", None), bool):
        raise ConfigError(
            f"metric: {shown(metric)}.greater_is_better must be True or False: whether larger values of {names[0]} are "
            f"better; see {EXPERIMENT_PAGE}"
        )
