"""The data interface: three splits, and what belongs to the weights that are trained on them."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from exp.data.sampler import preserved_generators, seed_sample
from exp.errors import EXPERIMENT_PAGE, ConfigError, DataError, SampleError, is_of_user, message_of, place_of, shown

if TYPE_CHECKING:
    from exp.data.fingerprint import Fingerprint
    from exp.draw.figure import Picture
    from exp.engine.outputs import RankedSample
    from exp.metrics import Evaluator, Metric, SampleMetric
    from exp.session import Session

__all__ = ["Data", "ExampleBatch", "Extras", "Prediction", "split_of"]


class Prediction(NamedTuple):
    """What ``task=predict`` has come to.

    Attributes:
        metrics: figures by name.
        files: below the run folder; of all ranks on rank 0.
        measured_on: what the figures are of.
    """

    metrics: dict[str, float]
    files: Sequence[str]
    measured_on: str


class ExampleBatch(NamedTuple):
    """What batches look like, where the files are not there (``task=estimate``).

    Attributes:
        train: a training batch of one sample: tensors (1, ...), whose values do not matter.
        val: the same of the validation split.
        model_arguments: of :meth:`Data.model_arguments`.
        eval_batch_size: samples per rank and batch in evaluation.
        notes: what is assumed, a line each.
    """

    train: Mapping[str, Any]
    val: Mapping[str, Any]
    model_arguments: Mapping[str, Any]
    eval_batch_size: int
    notes: Sequence[str] = ()


@dataclass
class Extras:
    """What data add to a run besides samples and metrics: :meth:`Data.setup` sets some of ``session.extras``.

    A picture is a matplotlib figure, pixels (RGB (H, W, 3), uint8), or the bytes of a PNG file; pictures come by the
    name of a PNG file in ``plots/``. ``figures.format`` and the like are seen to.
    """

    fingerprint: Callable[[], Fingerprint] | None = None
    """Gives what the files hold, in short (:mod:`exp.data.fingerprint`): a training that goes on compares it."""
    record: Callable[[Callable[[Any], list[Any]]], dict[str, Any]] | None = None
    """Gives what ``result.json`` has of the data, by default the lengths of the splits. All ranks call it, with what
    gives a list of what every rank has handed in."""
    pictures: Callable[[Any, Evaluator], Mapping[str, Picture]] | None = None
    """Draws what a training has come to; called by rank 0 alone, with the model (wrapped or not, on the session's
    device, with the tested weights; in eval mode afterwards) and the evaluator after the test."""
    ranking: SampleMetric | None = None
    """The figure by which ``task=eval`` finds the worst and the best samples to draw. Batches need ``index``, the
    numbers of the samples in their split, int64 (B,)."""
    draw_samples: Callable[[Sequence[RankedSample], Sequence[RankedSample]], Mapping[str, Picture]] | None = None
    """Draws samples of the test split, the worst first and the best first; none is in both. Called by rank 0 alone."""


class Data(abc.ABC):
    """A data set for training, validation and test.

    A subclass sets :attr:`train`, :attr:`val` and :attr:`test` and writes :meth:`metrics`; the rest has defaults. What
    its constructor takes are the keys of ``data`` in the configuration. It reads what it must know to build a model
    (how many classes, channels), and leaves the samples to the splits, which loader processes read.

    Attributes:
        train: a map-style dataset: ``len(...)``, and ``[i]`` gives sample i, a dict of tensors, arrays and numbers. Or
            one that is indexed by a whole batch: it has ``takes_batches = True``, and ``[indices]`` with int64 (B,),
            or (B, 2) with the epoch where it has ``needs_epoch = True``, gives the batch. Where a batch
            holds no arrays, ``gives_tensors = True`` saves a look at each. If it can have a card cut
            its batches, it also has ``on_device(device, free)``, which takes the bytes that are free there (None: not
            known) and gives a function from numbers of samples on the device, int64 (B,), to the batch there, or None
            where they are better cut on the host; and ``numbers(keys)``, which gives these numbers.
        val: likewise.
        test: likewise.
        collate: makes a batch, a dict, of a list of samples; None: torch's ``default_collate``.
        tested_on: the split that metrics are of in the end, as it is called in tables.
        notes: what the user should be told of the files, a line each.
        eval_batch_size: samples per rank and batch in evaluation.
        num_workers: data-loader processes per rank.
    """

    train: Any
    val: Any
    test: Any
    collate: Callable[[list[Any]], dict[str, Any]] | None = None
    tested_on: str = "test"
    notes: Sequence[str] = ()
    eval_batch_size: int = 32
    num_workers: int = 0

    @abc.abstractmethod
    def metrics(self, detailed: bool = False) -> Metric | Sequence[Metric]:
        """New accumulators of what is measured (:class:`exp.metrics.Metric`).

        The first name of the first one chooses the best model, where the configuration's ``metric`` does not.

        Args:
            detailed: for ``task=eval``: with tables, whatever they cost.
        """

    def model_arguments(self) -> dict[str, Any]:
        """What the model must know of the files, as arguments of its constructor, such as the number of classes."""
        return {}

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch | None:  # noqa: ARG003
        """What batches look like, as far as the keys of ``data`` alone tell; None: only the files do.

        Args:
            **keys: of ``data`` in the configuration, without ``_target_``.
        """
        return None

    def state_dict(self) -> dict[str, Any] | None:
        """What belongs to weights that are trained on these data, such as mean and standard deviation; every checkpoint
        keeps it. Plain values, lists, dicts and tensors.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be used with weights that were trained on other files: called before anything is loaded.

        Args:
            state: :meth:`state_dict` of the data that they were trained on.

        Raises:
            DataError: these data do not go with them.
        """
        raise DataError(
            f"data: {shown(self)} has state_dict(), and no load_state_dict(state) that takes it; see {EXPERIMENT_PAGE}"
        )

    def setup(self, session: Session) -> None:
        """What takes all ranks, or the run folder, before the model is built, such as to measure a mean over all files.

        Args:
            session: the session; called on every rank, after :meth:`load_state_dict`. What needs the model goes into
                :meth:`exp.session.Session.when_built`, what is drawn and recorded into its ``extras``
                (:class:`Extras`).
        """

    def predict(self, session: Session, model: Any) -> Prediction | None:
        """``task=predict``; None: ``predictions/rank<n>.npz``, what the model gives for each sample of the test split
        (:func:`exp.engine.outputs.predict_split`).

        Args:
            session: the session; called on every rank.
            model: on the session's device, in eval mode.
        """
        return None


def split_of(data: Data, split: str, seed: int) -> Any:
    """A split, indexed by a whole batch.

    Args:
        data: the data set.
        split: ``train``, ``val`` or ``test``.
        seed: of what samples draw at random.

    Raises:
        ConfigError: there is none, it is no dataset, or it is empty; names the member, the class and the page.
    """
    dataset: Any = getattr(data, split, None)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"data: {shown(data)}.{split} ({type(dataset).__qualname__}) must be a dataset with a length and [index]; "
            f"see {EXPERIMENT_PAGE}"
        )
    if not len(dataset):
        raise DataError(
            f"data: {shown(data)}.{split} has no sample; give it some, or make another split; see {EXPERIMENT_PAGE}"
        )
    if getattr(dataset, "takes_batches", False):
        return dataset
    return _Batched(dataset, data.collate or default_collate, seed, f"{shown(data)}.{split}")


class _Batched(Dataset[Any]):
    """Random numbers that a sample draws, of Python's, NumPy's and torch's global generators, depend on seed, epoch and
    sample alone: runs are the same for any number of ranks and loader processes, and after resuming.
    """

    takes_batches = True
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
            with preserved_generators(with_torch=True):
                for number, epoch in pairs:
                    seed_sample(self.seed, epoch, number, with_torch=True)
                    samples.append(self.dataset[number])
            batch = self.collate(samples)
        except Exception as error:  # a dataset may raise anything
            if not is_of_user(error):
                raise
            # Here, since a loader process hands on no more of it than its text.
            numbers = [number for number, _ in pairs]
            which = ", ".join(map(str, numbers[len(samples) :][:1] or numbers))
            first = f"{type(error).__name__}: {message_of(error).strip()}".splitlines()[0]
            hint = _difference(samples) if len(samples) == len(numbers) else ""
            raise SampleError(f"data: {self.name}[{which}] raises {first}{place_of(error)}{hint}") from error
        if not isinstance(batch, dict) or not all(isinstance(key, str) for key in batch):
            found = f"with the keys {list(batch)}" if isinstance(batch, dict) else f"not a {type(batch).__name__}"
            raise DataError(
                f"data: a batch must be a dict by the names that the model's forward takes, {found}; give samples of "
                f"{shown(self.dataset)} as such dicts, or set data.collate; see {EXPERIMENT_PAGE}"
            )
        return batch


def _difference(samples: list[Any]) -> str:
    """The first key whose values differ in shape or type, or are None: the error of torch may mislead."""
    for key in samples[0] if isinstance(samples[0], dict) else ():
        values = [each.get(key) for each in samples]
        kinds = {str(tuple(each.shape)) if hasattr(each, "shape") else type(each).__name__ for each in values}
        if len(kinds) > 1 or "NoneType" in kinds:
            return f"; {key} is {' or '.join(sorted(kinds))}"
    return ""
