"""The metric interface: values that do not depend on batch size or number of ranks."""

from __future__ import annotations

import abc
import math
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Container, Mapping, NamedTuple, Sequence

import torch

from exp.errors import EXPERIMENT_PAGE, ConfigError, DataError, ExpError, RunError, qualified_name

if TYPE_CHECKING:
    from exp.distributed import Distributed

LINE_KEYS = ("split", "step", "epoch", "units")
"""Keys of a line of ``metrics.jsonl`` besides its metrics; a metric cannot have such a name."""


class Table(NamedTuple):
    """Metrics in detail, one value per row, such as per class.

    Attributes:
        name: name of the table, such as ``per_class``; it is written to ``metrics_<name>.csv``.
        key: title of the column with the row names, such as ``class``.
        rows: name of each row.
        columns: values by metric, one for each row: numbers (also of NumPy and torch) or text.
        units: unit of a metric by name, where the name does not say it.
    """

    name: str
    key: str
    rows: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    units: Mapping[str, str] = MappingProxyType({})


class Metric(abc.ABC):
    """One or several metrics, accumulated over the batches of a split.

    Accumulate values whose sum does not depend on the order (counts, or sums in float64 on the CPU at the end), and
    divide once, in :meth:`compute`. A mean of batch means would depend on the batch size and on the number of ranks.

    Attributes:
        names: names of the metrics that :meth:`compute` returns; none of :data:`LINE_KEYS`.
        greater_is_better: whether larger values are better; every class must set or inherit it.
        units: unit of a metric by name, where the name does not say it.
        baseline_of: names of metrics of a prediction without training, such as the last value, each with the metric
            that it is compared with; a report says which runs lose to them.
    """

    names: Sequence[str] = ()
    greater_is_better: bool
    units: Mapping[str, str] = MappingProxyType({})
    baseline_of: Mapping[str, str] = MappingProxyType({})

    @abc.abstractmethod
    def reset(self) -> None:
        """Clear all accumulated values; a new pass over a split begins."""

    def expected_shape(self, batch: Mapping[str, Any]) -> Sequence[int] | None:
        """The shape that outputs for a batch must have, which the engine checks; None: any, or they are no tensor.

        Torch would broadcast other shapes against each other: (B, 1, C) to (B, H, C).
        """
        return None

    @abc.abstractmethod
    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Accumulate one batch.

        Args:
            outputs: the model's output in ``mode="predict"``, on its device. Do not read values from the device here,
                because then every batch would wait for the device.
            batch: the batch of the data, on the same device.
        """

    @abc.abstractmethod
    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The metrics over all ranks, by name; called on every rank, also on a rank without batches.

        Every rank must return the same values.

        Args:
            distributed: its ``sum(tensor)`` adds a CPU tensor over all ranks, in place.
        """

    def sample_sums(self) -> tuple[Mapping[str, torch.Tensor], torch.Tensor] | None:
        """What each sample of this rank adds to the metrics that are means over samples, in the order of updates.

        Reports test with it whether a difference is more than noise. Called after :meth:`compute`.

        Returns:
            By name of a metric its sums (N,), and the weights (N,) of the samples: the metric is the sum of the former
            divided by the sum of the latter. None: no metric is such a mean.
        """
        return None

    def tables(self) -> list[Table]:
        """The metrics in detail, for ``task=eval``; called after :meth:`compute`."""
        return []


class SampleMetric(Metric):
    """The mean over samples of one value per sample, the same for any number of ranks and any batch size.

    A subclass sets ``names`` to one name, sets ``greater_is_better``, and writes :meth:`per_sample`.
    """

    def __init__(self) -> None:
        self.reset()

    @abc.abstractmethod
    def per_sample(self, outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The value of each sample of a batch, a tensor (B,) on the device.

        Return NaN for samples without ground truth; they are left out of the mean. (Predictions that are NaN are
        reported elsewhere, and end the run.)

        Args:
            outputs: see :meth:`update`.
            batch: see :meth:`update`.
        """

    def reset(self) -> None:
        """Clear all values."""
        self.values: list[torch.Tensor] = []

    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Accumulate one batch.

        Raises:
            ConfigError: :meth:`per_sample` does not return a tensor (B,).
        """
        values = self.per_sample(outputs, batch)
        if not isinstance(values, torch.Tensor) or values.dim() != 1:
            actual = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
            raise _error(self, f".per_sample must give a tensor (B,), not {actual}")
        self.values.append(values.detach().float())

    def sample_sums(self) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """The values, and weight 0 for samples without one."""
        values = torch.cat([torch.empty(0), *(value.cpu() for value in self.values)])
        return {self.names[0]: torch.nan_to_num(values)}, (~torch.isnan(values)).float()

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The mean over all samples of all ranks.

        Raises:
            DataError: no rank had a sample that counts.
        """
        total = torch.zeros(2, dtype=torch.float64)
        if self.values:
            values = torch.cat([value.reshape(-1) for value in self.values]).cpu().double()
            values = values[~torch.isnan(values)]
            total[0], total[1] = values.sum(), len(values)
        distributed.sum(total)
        if total[1] == 0:
            raise DataError(
                f"metric: no sample has a value of {self.names[0]}", "check that the split has ground truth"
            )
        return {self.names[0]: float(total[0] / total[1])}


class Evaluator:
    """Combines several metrics for the evaluation loop.

    Args:
        metrics: the metrics of the data, and those of the configuration (``metrics``).
        chosen: name of the metric that selects the best model and that sweeps optimize; None: the first name.

    Attributes:
        metric_name: name of the main metric, which selects the best model.
        greater_is_better: whether larger values of the main metric are better.

    Raises:
        ConfigError: an object is not a metric, two metrics have the same name, or no metric has the chosen name.
    """

    def __init__(self, metrics: Sequence[Metric], chosen: str | None = None) -> None:
        self.metrics = list(metrics)
        owners: dict[str, Metric] = {}
        for metric in self.metrics:
            _check_metric(metric)
            for name in metric.names:
                if owners.setdefault(name, metric) is not metric:
                    both = f"{qualified_name(owners[name])} and {qualified_name(metric)}"
                    raise ConfigError(f"two metrics give {name}: {both}", "rename one")
        if chosen is not None and chosen not in owners:
            raise ConfigError(f"metric={chosen} is not among the metrics that are computed: {', '.join(owners)}")
        self._owners = owners
        self.metric_name = chosen if chosen is not None else next(iter(owners))
        self.greater_is_better = bool(owners[self.metric_name].greater_is_better)

    @property
    def names(self) -> list[str]:
        """The names of all metrics."""
        return list(self._owners)

    @property
    def units(self) -> dict[str, str]:
        """Unit of a metric by name."""
        return {name: unit for metric in self.metrics for name, unit in metric.units.items()}

    @property
    def baselines(self) -> dict[str, str]:
        """The metrics that are those of a baseline, with the metric that they compare with."""
        return {name: other for metric in self.metrics for name, other in metric.baseline_of.items()}

    @property
    def alike(self) -> list[str]:
        """The metrics of the main metric's class, which are better in the same direction; without baselines."""
        owner = self._owners[self.metric_name]
        return [name for name in owner.names if name not in owner.baseline_of]

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics:
            metric.reset()

    def shape_error(self, outputs: Any, batch: Mapping[str, Any]) -> str | None:
        """Which shape outputs must have for a metric, and which they have; None: they fit."""
        actual = getattr(outputs, "shape", None)
        for metric in self.metrics:
            expected = metric.expected_shape(batch)
            if expected is not None and (actual is None or tuple(actual) != tuple(expected)):
                shape = type(outputs).__name__ if actual is None else tuple(actual)
                return f"must return shape {tuple(expected)} for {qualified_name(metric)}, not {shape}"
        return None

    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Accumulate one batch in all metrics."""
        for metric in self.metrics:
            metric.update(outputs, batch)

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """All metrics over all ranks, by name; those of rank 0, so that no rank decides otherwise by a last digit.

        Raises:
            ConfigError: a metric does not return a number for each of its names.
            RunError: a metric differs between ranks.
        """
        values_by_name = {}
        for metric in self.metrics:
            values: Any = metric.compute(distributed)
            for name in metric.names:
                values_by_name[name] = plain_cell(values.get(name)) if isinstance(values, Mapping) else None
                if not isinstance(values_by_name[name], (int, float)):
                    raise _error(metric, f".compute must return a dict with a number for {name}, not {values!r:.200}")
        first, *others = distributed.gather(values_by_name)
        for rank, other in enumerate(others, 1):
            for name, metric in self._owners.items():
                if not _agree(first[name], other[name]):
                    problem = (
                        f".compute returns {name}={first[name]:.6g} on rank 0, and {other[name]:.6g} on rank {rank}: "
                        "add up counts and sums over all ranks with distributed.sum(tensor) before you divide"
                    )
                    raise _error(metric, problem, RunError)
        return first  # type: ignore[no-any-return]

    def tables(self, taken: Container[str] = ()) -> tuple[list[Table], list[str]]:
        """All tables of all metrics, as they can be written; call it after :meth:`compute`.

        Args:
            taken: names that no table may have.

        Returns:
            The tables: their names are file names, and differ; their rows are strings, and their cells plain values.
            And a line for the user for each table that has another name, or is left out because it is no table.
        """
        tables: dict[str, Table] = {}
        notes = []
        for metric in self.metrics:
            for table in metric.tables():
                qualified = f"{table.name}_{metric.names[0]}"
                candidates = (
                    re.sub(r"[^\w.-]", "_", text)[:80]
                    for text in (str(table.name), qualified, *(f"{qualified}_{number}" for number in range(2, 100)))
                )
                name = next(text for text in candidates if text not in tables and text not in taken)
                if name != table.name:
                    notes.append(f"warning: the table {table.name} of {qualified_name(metric)} is written as {name}")
                try:
                    rows = [str(plain_cell(row)) for row in table.rows]
                    columns = {str(key): [plain_cell(cell) for cell in cells] for key, cells in table.columns.items()}
                    if any(len(cells) != len(rows) for cells in columns.values()):
                        raise ValueError(f"{len(rows)} rows, and columns of other lengths")
                    tables[name] = Table(name, str(table.key), rows, columns, dict(table.units))
                except (AttributeError, TypeError, ValueError) as error:
                    notes.append(f"warning: the table {table.name} of {qualified_name(metric)} is left out: {error}")
        return list(tables.values()), notes


def plain_cell(value: Any) -> Any:
    """A number of NumPy or torch as one of Python; what is neither a number nor text as text."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _agree(first: float, other: float) -> bool:
    """Whether two ranks have the same number; processors may round functions such as exp differently."""
    return math.isclose(first, other, rel_tol=1e-6, abs_tol=1e-12) or (math.isnan(first) and math.isnan(other))


def _check_metric(metric: Any) -> None:
    if not isinstance(metric, Metric):
        raise _error(metric, " is not an exp.metrics.Metric")
    names = metric.names
    taken = [name for name in names if name in LINE_KEYS]
    if isinstance(names, str) or not names or taken:
        wrong = f"names must be a list of names without {', '.join(LINE_KEYS)}, not {names!r}"
    elif not isinstance(getattr(metric, "greater_is_better", None), bool):
        wrong = f"greater_is_better must be True or False: whether larger values of {names[0]} are better"
    else:
        return
    raise _error(metric, f".{wrong}")


def _error(metric: Any, problem: str, kind: type[ExpError] = ConfigError) -> ExpError:
    return kind(f"metric: {qualified_name(metric)}{problem}", f"see {EXPERIMENT_PAGE}")
