"""The data interface: three splits, their metrics, and state that checkpoints keep (such as normalization)."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from exp.data.loader import preserved_generators, seed_sample
from exp.errors import (
    EXPERIMENT_PAGE,
    ConfigError,
    DataError,
    SampleError,
    qualified_name,
    raised_by_user_code,
    typed_line,
    user_location,
)

if TYPE_CHECKING:
    from exp.metrics import Metric
    from exp.session import Session


class Prediction(NamedTuple):
    """The result of ``task=predict``.

    Attributes:
        metrics: values by name.
        files: paths of the written files, relative to the run folder; on rank 0 those of all ranks.
        measured_on: the split or input of the metrics.
    """

    metrics: dict[str, float]
    files: Sequence[str]
    measured_on: str


class ExampleBatch(NamedTuple):
    """Example batches, for ``task=estimate`` on a machine without the data files.

    Attributes:
        train: a training batch of one sample: tensors (1, ...), whose values do not matter.
        val: likewise, of the validation split.
        model_arguments: as :meth:`Data.model_arguments` returns them.
        eval_batch_size: samples per rank and batch in evaluation.
        notes: assumptions, one line each.
    """

    train: Mapping[str, Any]
    val: Mapping[str, Any]
    model_arguments: Mapping[str, Any]
    eval_batch_size: int
    notes: Sequence[str] = ()


class Data(abc.ABC):
    """A data set for training, validation and test.

    A subclass sets :attr:`train`, :attr:`val` and :attr:`test` and writes :meth:`metrics`; everything else has a
    default. The constructor's arguments are the keys of ``data`` in the configuration. The constructor reads only what
    is needed to build a model (number of classes, channels); samples are read by the splits, in loader processes.

    Attributes:
        train: a map-style dataset: ``len(...)``, and ``[i]`` returns sample i, a dict of tensors, arrays and numbers.

            A dataset with ``is_batched = True`` is indexed by a whole batch: ``[indices]`` with int64 (B,) returns
            the batch; with ``needs_epoch = True``, indices are (B, 2), sample and epoch. With ``yields_tensors = True``
            its batches have no NumPy arrays, so that the loader need not convert them.

            A dataset may also build batches on the device. Then it has ``device_builder(device, free)``, with the free
            bytes there (None: not known), which returns a function from sample ids on the device, int64 (B,), to the
            batch there, or None if the host should build batches; and ``sample_ids(keys)``, which maps indices to these
            ids.
        val: likewise.
        test: likewise.
        collate: makes a batch (a dict) from a list of samples; None: torch's ``default_collate``.
        test_split_name: name of the split on which the final metrics are computed, for tables.
        notes: messages for the user about the files, one line each.
        eval_batch_size: samples per rank and batch in evaluation.
        num_workers: data-loader processes per rank.
    """

    train: Any
    val: Any
    test: Any
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    test_split_name: str = "test"
    notes: Sequence[str] = ()
    eval_batch_size: int = 32
    num_workers: int = 0

    @abc.abstractmethod
    def metrics(self, detailed: bool = False) -> Metric | Sequence[Metric]:
        """New metric objects (:class:`exp.metrics.Metric`).

        The first name of the first metric selects the best model, unless the configuration sets ``metric``.

        Args:
            detailed: compute tables, too, even if that is expensive (``task=eval``).
        """

    def model_arguments(self) -> dict[str, Any]:
        """Arguments for the model's constructor that depend on the files, such as the number of classes."""
        return {}

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch | None:  # noqa: ARG003
        """Example batches that follow from the keys of ``data`` alone; None: the files are needed.

        Args:
            **keys: of ``data`` in the configuration, without ``_target_``.
        """
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """State that belongs to weights trained on these data, such as mean and standard deviation.

        Every checkpoint keeps it. Plain values, lists, dicts and tensors; None: no state. ``classes`` are the names of
        the classes in the order of their labels, by which ``init_from`` sorts the rows of a head
        (:attr:`exp.models.base.Model.class_rows`).
        """
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of the data on which the given weights were trained; called before any sample is loaded.

        Args:
            state: :meth:`state_dict` of those data.

        Raises:
            DataError: these data cannot be used with the weights.
        """
        raise DataError(
            f"data: {qualified_name(self)} has state_dict(), but no load_state_dict(state); see {EXPERIMENT_PAGE}"
        )

    def setup(self, session: Session) -> None:
        """Prepare the data with all ranks or the run folder, for example compute the mean over all files.

        Called on every rank after :meth:`load_state_dict`, before the model is built.

        Args:
            session: the session. Register work that needs the model with :meth:`exp.session.Session.on_model`; set
                functions for pictures and records in its ``extensions`` (:class:`exp.data.extensions.DataExtensions`).
        """

    def predict(self, session: Session, model: Any) -> Prediction | None:
        """Do ``task=predict``; called on every rank.

        Args:
            session: the session.
            model: on the session's device, in eval mode.

        Returns:
            The result. None: the engine writes the model's outputs for the test split to ``predictions/rank<n>.npz``
            (:func:`exp.engine.evaluate.predict_split`).
        """
        return None


def split_of(data: Data, split: str, seed: int) -> Any:
    """A split as a dataset that is indexed by a whole batch.

    Args:
        data: the data set.
        split: ``train``, ``val`` or ``test``.
        seed: of the random numbers that samples draw.

    Raises:
        ConfigError: the split is missing, or is not a dataset.
        DataError: the split is empty.
    """
    dataset: Any = getattr(data, split, None)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"data: {qualified_name(data)}.{split} ({type(dataset).__qualname__}) must be a dataset with a length and "
            f"[index]; see {EXPERIMENT_PAGE}"
        )
    if not len(dataset):
        raise DataError(
            f"data: {qualified_name(data)}.{split} has no sample; add some, or change the split; see {EXPERIMENT_PAGE}"
        )
    if getattr(dataset, "is_batched", False):
        return dataset
    return _Batched(dataset, data.collate or default_collate, seed, f"{qualified_name(data)}.{split}")


class _Batched(Dataset[Any]):
    """Wraps a map-style dataset: loads the samples of a batch and collates them.

    Random numbers that a sample draws from the global generators of Python, NumPy and torch depend on seed, epoch and
    sample alone, so runs are equal for any number of ranks and loader processes, and after resuming.
    """

    is_batched = True
    needs_epoch = True

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, name: str) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.name = name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: torch.Tensor) -> Any:
        pairs = keys.tolist() if keys.dim() == 2 else [(number, 0) for number in keys.tolist()]
        samples: list[Any] = []
        try:
            with preserved_generators():
                for number, epoch in pairs:
                    seed_sample(self.seed, epoch, number)
                    samples.append(self.dataset[number])
            batch = self.collate(samples)
        except Exception as error:  # a dataset may raise anything
            if not raised_by_user_code(error):
                raise
            # Located here, because a loader process passes on only the text of an error.
            numbers = [number for number, _ in pairs]
            which = ", ".join(map(str, numbers[len(samples) :][:1] or numbers))
            first = typed_line(error)
            hint = _difference(samples) if len(samples) == len(numbers) else ""
            raise SampleError(f"data: {self.name}[{which}] raises {first}{user_location(error)}{hint}") from error
        if not isinstance(batch, dict) or not all(isinstance(key, str) for key in batch):
            description = f"with the keys {list(batch)}" if isinstance(batch, dict) else f"not a {type(batch).__name__}"
            raise DataError(
                f"data: a batch must be a dict whose keys are the arguments of the model's forward, {description}; "
                f"make samples of {qualified_name(self.dataset)} such dicts, or set data.collate; see {EXPERIMENT_PAGE}"
            )
        return batch


def _difference(samples: list[Any]) -> str:
    """The first key whose values differ in shape or type, or are None; torch's own error does not name it."""
    for key in samples[0] if all(isinstance(sample, dict) for sample in samples) else ():
        values = [sample.get(key) for sample in samples]
        kinds = {str(tuple(sample.shape)) if hasattr(sample, "shape") else type(sample).__name__ for sample in values}
        if len(kinds) > 1 or "NoneType" in kinds:
            return f"; {key} is {' or '.join(sorted(kinds))}"
    return ""
