"""Tasks of images alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional

from exp.errors import ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["Export", "Features", "Stats"]


_FORMATS = ("huggingface", "torchscript", "torch_export")


@dataclass
class Export(Task):
    """task=export: a trained model as files for other programs, compared with the model."""

    _target_: str = "exp.vision.tasks.Export"
    name: str = "export"
    formats: List[str] = field(default_factory=lambda: ["huggingface", "torchscript"])
    """``huggingface`` (the backbone, for transformers), ``torchscript``, ``torch_export`` (torch >= 2.5)."""
    size: Optional[int] = None
    """Side in pixels of the images that ``torchscript`` and ``torch_export`` take; null: ``data.size``."""
    tolerance: float = 1e-4
    """How far outputs may be from the model's, as a share of the largest."""

    needs_weights: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Formats are known; one process does it."""
        unknown = [name for name in self.formats if name not in _FORMATS]
        if unknown or not self.formats or len(set(self.formats)) < len(self.formats):
            raise ConfigError(f"task.formats={list(self.formats)} must name some of {', '.join(_FORMATS)}, each once")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"task.size={self.size} must be at least 1")
        if config.nproc > 1 or config.launcher.nnodes > 1:
            raise ConfigError("task=export runs in one process; set nproc=1")
        config.compile = False  # what is recorded is the model's own code

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.export.export`."""
        from exp.vision.export import export

        return export(session)


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
