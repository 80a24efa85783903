"""Pictures of a run: writing them, the curves of a training, and the worst and best samples of a test."""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Callable, Mapping

import torch

from exp.engine.wrapper import is_sharded, unwrapped
from exp.runs.files import write_atomically

if TYPE_CHECKING:
    from exp.draw.figure import Picture
    from exp.metrics import Evaluator, SampleMetric
    from exp.session import Session


logger = logging.getLogger(__name__)


def write_picture(session: Session, name: str, picture: Picture) -> list[str]:
    """Write a picture into the run folder.

    Args:
        session: the session.
        name: path of the PNG file, relative to the run folder; other formats get their own suffix.
        picture: a picture (:class:`exp.data.extensions.DataExtensions`).

    Returns:
        Paths of the files, relative to the run folder; empty with ``plots=false``.
    """
    # Imported here, because it imports matplotlib.
    from exp.draw.figure import encode_picture

    files: list[str] = []
    if not session.config.plots:
        return files
    for form, content in encode_picture(picture, session.config.figures).items():
        files.append(str(PurePosixPath(name).with_suffix(f".{form}")))
        write_atomically(session.folder.path / files[-1], content)
    return files


def draw_pictures(session: Session, make: Callable[[], Mapping[str, Picture]]) -> None:
    """Draw and write pictures on rank 0; an error is reported, but does not end the run."""
    if session.config.plots and session.distributed.is_main:
        try:
            for name, picture in make().items():
                write_picture(session, f"plots/{name}", picture)
        except Exception as error:
            logger.exception("plots")
            session.print(f"plots: not drawn: {type(error).__name__}: {error}; the log of rank 0 has the traceback")


def training_pictures(session: Session, model: Any, evaluator: Evaluator) -> dict[str, Picture]:
    """Draw ``curves.png`` and the pictures of the data.

    Args:
        session: the session.
        model: wrapped or not, on the session's device, with the tested weights; is left in eval mode.
        evaluator: that of the test.

    Returns:
        Pictures by name.
    """
    from exp.draw.figure import training_curves

    pictures: dict[str, Picture] = {}
    if session.folder.metrics.is_file():
        metric, greater = evaluator.metric_name, evaluator.greater_is_better
        pictures["curves.png"] = training_curves(session.folder.records(), metric, greater, session.config.name)
    draw = session.extensions.pictures
    if draw is not None and is_sharded(unwrapped(model)):  # a forward pass is a collective, and this is rank 0 alone
        session.print("plots: no pictures of predictions with wrapper=fsdp; task=predict draws them")
    elif draw is not None:
        pictures.update(draw(model, evaluator))
    return pictures


class Ranking:
    """Keeps the metric of each tested sample, on the device.

    Args:
        metric: ``ranking`` of :class:`exp.data.extensions.DataExtensions`; batches must have ``index``.
    """

    def __init__(self, metric: SampleMetric) -> None:
        self.metric = metric
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Compute the metric for the samples of a batch."""
        self._values.append((batch["index"], self.metric.per_sample(outputs, batch).detach().float()))

    def worst_and_best(self, distributed: Any, worst: int, best: int) -> tuple[list[Any], list[Any]]:
        """The worst and the best samples over all ranks. A collective.

        Of equal samples, those with a smaller index are taken. Samples with NaN are left out.

        Args:
            distributed: gathers the values of the ranks.
            worst: number of worst samples.
            best: number of best samples.

        Returns:
            Pairs (index, value) of the worst samples, worst first, and of the best ones, best first. No sample is in
            both.
        """
        pairs = [pair for index, values in self._values for pair in zip(index.tolist(), values.tolist())]
        ranked = [pair for part in distributed.gather(pairs) for pair in part if pair[1] == pair[1]]
        sign = 1.0 if self.metric.greater_is_better else -1.0
        first = sorted(ranked, key=lambda pair: (sign * pair[1], pair[0]))[:worst]
        others = sorted(set(ranked) - set(first), key=lambda pair: (-sign * pair[1], pair[0]))
        return first, others[:best]
