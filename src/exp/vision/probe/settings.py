"""What the parent checks of task=probe before anything starts. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.config.explain import nearest
from exp.errors import ConfigError
from exp.vision.probe.store import Store

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.vision.tasks import Probe

__all__ = ["FEATURES", "PROBES", "check_probe"]

PROBES = ("knn", "logistic", "sgd")
FEATURES = ("cls", "mean", "cls+mean", "patches")


def check_probe(task: Probe, config: ExpConfig) -> None:
    """Refuse settings that mean nothing, and a store that is not there or not done; takes its experiment's name.

    Raises:
        ConfigError: names the key.
    """
    if task.store is None:
        raise ConfigError(
            "task=probe needs task.store=<folder>: features that task=features task.store=<folder> has kept"
        )
    for name in task.probes:
        if name not in PROBES:
            raise ConfigError(f"task.probes: {name} is not one of {', '.join(PROBES)}{nearest(name, PROBES)}")
    if task.features is not None and task.features not in FEATURES:
        raise ConfigError(
            f"task.features={task.features} is not one of {', '.join(FEATURES)}{nearest(task.features, FEATURES)}"
        )
    for key in ("probes", "k", "temperature", "strengths", "learning_rates", "seeds"):
        values = getattr(task, key)
        if not values or (key not in ("probes", "seeds") and min(values) <= 0):
            raise ConfigError(f"task.{key}={values} must be a list of at least one value, above 0")
    for key in ("iterations", "epochs", "batch_size"):
        if getattr(task, key) < 1:
            raise ConfigError(f"task.{key}={getattr(task, key)} must be at least 1")
    if task.resident_mib < 0 or any(shots < 1 for shots in task.shots):
        raise ConfigError(
            f"task.resident_mib={task.resident_mib} and task.shots={task.shots} must not be negative or 0"
        )
    if config.init_from is not None:
        raise ConfigError(
            "task=probe takes features, not weights; give init_from to task=features, and leave it out here"
        )
    store = Store(task.store)
    store.check_complete()
    if len(store.about["parts"]) < 2 or "train" not in store.about["parts"]:
        raise ConfigError(
            f"task.store={task.store} has only {', '.join(store.about['parts'])}; make it with all task.parts"
        )
    config.name = store.about["experiment"]
