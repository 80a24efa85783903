"""Tasks of images alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional

from exp.task import Task

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Features", "Stats"]


@dataclass
class Features(Task):
    """task=features: what a backbone sees in images, as files for further work and as maps to look at."""

    _target_: str = "exp.vision.tasks.Features"
    name: str = "features"
    input: Optional[str] = None
    """An image file, a folder of them (with those below it) or a glob; null: the test split."""
    window: Optional[int] = None
    """Larger images are cut into windows of so many pixels a side; null: 1024."""
    on_error: str = "raise"
    """What an image that cannot be read means: ``raise``: the run fails once the others are done; ``skip``: it is only
    named."""
    max_images: int = 16
    """How many images are pictured: maps, and tiles of the contact sheet."""
    feature_dtype: str = "float16"
    """``float16`` or ``float32``."""
    resize: Optional[int] = None
    """Images are scaled so that their longer side has so many pixels; null: not."""

    needs_weights: ClassVar[bool] = True

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.features.write_features`."""
        from exp.vision.features import write_features

        return write_features(session)


@dataclass
class Stats(Task):
    """task=stats: what the training images hold: mean, standard deviation and percentiles of each band."""

    _target_: str = "exp.vision.tasks.Stats"
    name: str = "stats"
    percentiles: List[float] = field(default_factory=lambda: [1.0, 2.0, 50.0, 98.0, 99.0])
    """Of the values of each band, from 0 to 100."""

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.stats.write_statistics`."""
        from exp.vision.stats import write_statistics

        return write_statistics(session)
