"""Tasks of images alone."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional, Sequence

from exp.errors import ConfigError, UnavailableError, nearest
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["Export", "Features", "Probe", "Stats"]


_FORMATS = ("huggingface", "torchscript", "torch_export")


def refuse_unknown(key: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` where there is no value, or one that is not known."""
    wrong = [value for value in values if value not in known]
    if wrong or not values:
        shown, hint = (wrong[0], nearest(wrong[0], known)) if wrong else ("[]", "")
        raise ConfigError(f"{key}={shown} must be of {', '.join(known)}{hint}")


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
        refuse_unknown("task.formats", self.formats, _FORMATS)
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
    max_images: int = 16
    """How many images are pictured: maps, and tiles of the contact sheet."""
    feature_dtype: str = "float16"
    """``float16`` or ``float32``."""
    store: Optional[str] = None
    """A folder that keeps the features of all images of the data, for task=probe, instead of files for each image; what
    it has and fits is not computed again."""
    patches: bool = False
    """``store``: also keep the features of every patch, for segmentation: (h, w, D) for each image."""

    needs_weights: ClassVar[bool] = True
    paths: ClassVar[Sequence[str]] = ("input", "store")

    def check(self, config: ExpConfig) -> None:
        """Refuse keys that would do nothing, and dtypes that features are not kept in."""
        refuse_unknown("task.feature_dtype", [self.feature_dtype], ("float16", "float32"))
        if self.store is not None and self.input:
            raise ConfigError("task.input does not go with task.store, which takes the data; leave it out")

    def run(self, session: Session) -> dict[str, Any]:
        """See :mod:`exp.vision.features`."""
        from exp.vision.features import keep_features, write_features

        return write_features(session) if self.store is None else keep_features(session)


@dataclass
class Stats(Task):
    """task=stats: what the training images hold: mean, standard deviation and percentiles of each band."""

    _target_: str = "exp.vision.tasks.Stats"
    name: str = "stats"
    percentiles: List[float] = field(default_factory=lambda: [1.0, 2.0, 50.0, 98.0, 99.0])
    """Of the values of each band, from 0 to 100."""

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.data.statistics.write_statistics`."""
        from exp.vision.data.statistics import write_statistics

        return write_statistics(session)


@dataclass
class Probe(Task):
    """task=probe: what frozen features tell, by neighbors and linear probes, without the backbone."""

    _target_: str = "exp.vision.tasks.Probe"
    name: str = "probe"
    store: Optional[str] = None
    """The folder that task=features has kept features in."""
    probes: List[str] = field(default_factory=lambda: ["knn", "logistic", "sgd"])
    """``knn`` (nearest neighbors), ``logistic`` (regression by L-BFGS), ``sgd`` (linear heads of 13 learning
    rates, the authors' grid)."""
    features: Optional[str] = None
    """``cls``, ``mean`` (of the patches), ``cls+mean`` (side by side) or ``patches``; null: ``patches`` where
    pixels have labels, else ``cls+mean``."""
    k: List[int] = field(default_factory=lambda: [5, 10, 20, 100])
    """knn: how many neighbors; the best on validation counts, as for all lists here."""
    temperature: List[float] = field(default_factory=lambda: [0.07])
    """knn: a neighbor votes with the weight exp(cosine similarity / temperature)."""
    strengths: List[float] = field(default_factory=lambda: [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])
    """logistic: inverse strengths of the regularisation (C of scikit-learn), of the sum of the losses."""
    iterations: int = 1000
    """logistic: of L-BFGS, at most."""
    epochs: int = 10
    """sgd: over all rows, in batches of 128."""
    standardize: bool = True
    """logistic, sgd: columns less their mean, over their standard deviation, of the training rows."""
    shots: List[int] = field(default_factory=list)
    """Train on so many images of each class; empty: on all."""
    seeds: List[int] = field(default_factory=lambda: [0])
    """Of the draws of ``shots`` and of sgd; results are means over them."""
    metric: str = "cosine"
    """knn: how alike features are: ``cosine``, or ``l2``, the distance between them."""
    refit: bool = False
    """logistic: train again on the training and validation images at each strength, before testing."""

    uses_data: ClassVar[bool] = False
    paths: ClassVar[Sequence[str]] = ("store",)

    def check(self, config: ExpConfig) -> None:
        """Refuse unknown probes, and a store that is not there or not done; the experiment is that of the features."""
        from exp.vision.store import Store  # loads numpy

        if self.store is None:
            raise ConfigError(
                "task=probe needs task.store=<folder>: features that task=features task.store=<folder> has kept"
            )
        refuse_unknown("task.probes", self.probes, ("knn", "logistic", "sgd"))
        refuse_unknown("task.features", [self.features or "cls"], ("cls", "mean", "cls+mean", "patches"))
        refuse_unknown("task.metric", [self.metric], ("cosine", "l2"))
        for key in ("k", "temperature", "strengths", "seeds"):
            if not getattr(self, key):
                raise ConfigError(f"task.{key}=[] must have at least one value")
        if importlib.util.find_spec("sklearn") is None:
            raise UnavailableError(
                "task=probe needs scikit-learn, which is not installed: pip install 'exp-accelerators[probe]'"
            )
        store = Store(self.store)
        store.check_complete()
        config.name = store.about["experiment"]

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.probe.run_probes`."""
        from exp.vision.probe import run_probes

        return run_probes(session)
