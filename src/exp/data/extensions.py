"""What data may add to a run: records, pictures, a ranking of samples, and the units of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

if TYPE_CHECKING:
    import torch

    from exp.data.fingerprint import Fingerprint
    from exp.draw.figure import Picture
    from exp.metrics import Evaluator, SampleMetric


class RankedSample(NamedTuple):
    """A sample of the test split.

    Attributes:
        number: index of the sample in the split.
        value: value of the metric by which samples are ranked.
        outputs: the model's prediction for it, without the batch axis, on the CPU.
    """

    number: int
    value: float
    outputs: torch.Tensor


class Units(NamedTuple):
    """How values of files become those of a batch: ``(value - offset) / scale``, then clipped; for ``task=export``.

    Attributes:
        offset: broadcasts against the values of a sample, such as (C,) for series and (C, 1, 1) for images.
        scale: likewise; None: batches have the values of files.
        limits: the lowest and the highest value in a batch; None: values are not clipped.
        about: entries of ``export.json``, such as the names of columns.
    """

    offset: torch.Tensor | float = 0.0
    scale: torch.Tensor | None = None
    limits: tuple[float, float] | None = None
    about: Mapping[str, Any] = {}

    def to_model(self, values: torch.Tensor) -> torch.Tensor:
        """The values in a batch of values (B, ...) of files, float64 if there is a scale; without the limits."""
        return values if self.scale is None else (values.double() - self.offset) / self.scale

    def to_file(self, values: torch.Tensor) -> torch.Tensor:
        """The values of files, float32 if there is a scale, of values (B, ...) in a batch."""
        return values if self.scale is None else (values.double() * self.scale + self.offset).float()


@dataclass
class DataExtensions:
    """Optional functions with which data extend a run; :meth:`Data.setup` sets them in ``session.extensions``.

    A picture is a matplotlib figure, or pixels (RGB, (H, W, 3), uint8). Functions return
    pictures by the name of a PNG file in ``plots/``; the caller applies ``figures.format`` and other settings.

    Attributes:
        fingerprint: returns a fingerprint of the data files (:mod:`exp.data.fingerprint`); a resumed training compares
            it.
        record: returns the entries about the data in ``result.json``, by default the lengths of the splits. All ranks
            call it; the argument is a function that gathers a value of every rank into a list.
        pictures: draws the results of a training. Called on rank 0 after the test, with the model (wrapped or not, on
            the session's device, with the tested weights; leave it in eval mode) and the evaluator.
        ranking: the metric by which ``task=eval`` finds the worst and the best samples to draw. Batches need ``index``,
            the indices of the samples in their split, int64 (B,).
        draw_samples: draws samples of the test split. Called on rank 0, with the worst samples (worst first) and the
            best samples (best first); no sample is in both.
        units: returns the units of files, by the keys of a batch and ``output``; called after the model is built.
    """

    fingerprint: Callable[[], Fingerprint] | None = None
    record: Callable[[Callable[[Any], list[Any]]], dict[str, Any]] | None = None
    pictures: Callable[[Any, Evaluator], Mapping[str, Picture]] | None = None
    ranking: SampleMetric | None = None
    draw_samples: Callable[[Sequence[RankedSample], Sequence[RankedSample]], Mapping[str, Picture]] | None = None
    units: Callable[[], Mapping[str, Units]] | None = None
