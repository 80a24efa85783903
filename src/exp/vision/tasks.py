"""Tasks for image data: features, stats, probe."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional, Sequence

from exp.errors import ConfigError, UnavailableError, nearest
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["Features", "Probe", "Stats"]


def refuse_unknown(key: str, values: Sequence[str], choices: Sequence[str]) -> None:
    """Raise a :class:`ConfigError` if ``values`` is empty or has a value that is not in ``choices``."""
    unknown = [value for value in values if value not in choices]
    if unknown or not values:
        value, hint = (unknown[0], nearest(unknown[0], choices)) if unknown else ("[]", "")
        raise ConfigError(f"{key}={value} must be of {', '.join(choices)}{hint}")


@dataclass
class Features(Task):
    """task=features: write the features of a backbone as files or to a store, with plots of them."""

    _target_: str = "exp.vision.tasks.Features"
    name: str = "features"
    input: Optional[str] = None
    """An image file, a folder of images (searched recursively) or a glob; null: the test split."""
    max_images: int = 16
    """Number of images whose feature maps are drawn, each on its own and on a contact sheet."""
    feature_dtype: str = "float16"
    """``float16`` or ``float32``."""
    store: Optional[str] = None
    """Folder for the features of all images of the data, for task=probe; null: a file for each image. Features that the
    folder already has are not computed again."""
    patches: bool = False
    """With ``store``: also store the features of every patch, (h, w, D) for each image, for segmentation."""

    needs_weights: ClassVar[bool] = True
    paths: ClassVar[Sequence[str]] = ("input", "store")

    def check(self, config: ExpConfig) -> None:
        """Refuse ``task.input`` with ``task.store``, and unknown dtypes."""
        refuse_unknown("task.feature_dtype", [self.feature_dtype], ("float16", "float32"))
        if self.store is not None and self.input:
            raise ConfigError("task.input does not go with task.store, which takes the data; leave it out")

    def run(self, session: Session) -> dict[str, Any]:
        """See :mod:`exp.vision.features`."""
        from exp.vision.features import store_features, write_features

        return write_features(session) if self.store is None else store_features(session)


@dataclass
class Stats(Task):
    """task=stats: measure mean, standard deviation and percentiles of each band of the training images."""

    _target_: str = "exp.vision.tasks.Stats"
    name: str = "stats"
    percentiles: List[float] = field(default_factory=lambda: [1.0, 2.0, 50.0, 98.0, 99.0])
    """Percentiles of the values of each band, from 0 to 100."""

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.data.statistics.write_statistics`."""
        from exp.vision.data.statistics import write_statistics

        return write_statistics(session)


@dataclass
class Probe(Task):
    """task=probe: classify stored features by nearest neighbors and linear probes, without the backbone."""

    _target_: str = "exp.vision.tasks.Probe"
    name: str = "probe"
    store: Optional[str] = None
    """The folder in which task=features stores features. Must be set."""
    probes: List[str] = field(default_factory=lambda: ["knn", "logistic", "sgd"])
    """``knn`` (nearest neighbors), ``logistic`` (regression by L-BFGS), ``sgd`` (linear heads with 13 learning
    rates, the authors' grid)."""
    features: Optional[str] = None
    """``cls``, ``mean`` (of the patches), ``cls+mean`` (concatenated) or ``patches``; null: ``patches`` if pixels have
    labels, else ``cls+mean``."""
    k: List[int] = field(default_factory=lambda: [5, 10, 20, 100])
    """knn: numbers of neighbors. As for all lists here, the best value on the validation split is reported."""
    temperature: List[float] = field(default_factory=lambda: [0.07])
    """knn: a neighbor votes with the weight exp(similarity / temperature)."""
    C: List[float] = field(default_factory=lambda: [1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])
    """logistic: inverse strengths of the regularization (C of scikit-learn), relative to the sum of the losses."""
    max_iter: int = 1000
    """logistic: most iterations of L-BFGS."""
    epochs: int = 10
    """sgd: epochs over all rows, in batches of 128."""
    standardize: bool = True
    """logistic, sgd: whether columns are standardized by mean and standard deviation of the training rows."""
    shots: List[int] = field(default_factory=list)
    """Numbers of training images per class; empty: all."""
    seeds: List[int] = field(default_factory=lambda: [0])
    """Seeds of the draws of ``shots`` and of sgd; results are means over seeds."""
    metric: str = "cosine"
    """knn: similarity of features: ``cosine``, or ``l2`` (Euclidean distance)."""
    refit: bool = False
    """logistic: whether to train again on training and validation images at each strength before testing."""

    uses_data: ClassVar[bool] = False
    paths: ClassVar[Sequence[str]] = ("store",)

    def check(self, config: ExpConfig) -> None:
        """Refuse unknown probes, and a missing or incomplete store; take the experiment's name from the store."""
        from exp.vision.feature_store import FeatureStore  # loads numpy

        if self.store is None:
            raise ConfigError(
                "task=probe needs task.store=<folder>: features that task=features task.store=<folder> has stored"
            )
        refuse_unknown("task.probes", self.probes, ("knn", "logistic", "sgd"))
        refuse_unknown("task.features", [self.features or "cls"], ("cls", "mean", "cls+mean", "patches"))
        refuse_unknown("task.metric", [self.metric], ("cosine", "l2"))
        if importlib.util.find_spec("sklearn") is None:
            raise UnavailableError(
                "task=probe needs scikit-learn, which is not installed: pip install 'exp-accelerators[probe]'"
            )
        store = FeatureStore(self.store)
        store.check_complete()
        config.name = store.about["experiment"]

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.vision.probe.run_probes`."""
        from exp.vision.probe import run_probes

        return run_probes(session)
