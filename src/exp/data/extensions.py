"""What data may add to a run: records, pictures, and a ranking of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

if TYPE_CHECKING:
    import torch

    from exp.data.fingerprint import Fingerprint
    from exp.draw.figure import Picture
    from exp.metrics import Evaluator, SampleMetric

__all__ = ["DataExtensions", "RankedSample"]


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
    """

    fingerprint: Callable[[], Fingerprint] | None = None
    record: Callable[[Callable[[Any], list[Any]]], dict[str, Any]] | None = None
    pictures: Callable[[Any, Evaluator], Mapping[str, Picture]] | None = None
    ranking: SampleMetric | None = None
    draw_samples: Callable[[Sequence[RankedSample], Sequence[RankedSample]], Mapping[str, Picture]] | None = None
