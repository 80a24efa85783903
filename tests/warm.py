"""Imported by the template of the tests' runs (:mod:`tests.conftest`), after torch: what a run imports and computes.

Composing once fills the caches of Hydra's and OmegaConf's parsers, a third of the time of a short run. Nothing that a
run decides is kept: not what is installed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

from hydra import compose, initialize_config_module

from exp import plugins
from exp.config.sources import _structures, choices, register

_MODULES = [
    "exp.launcher.execute", "exp.launcher.local", "exp.launcher.torchrun", "exp.session", "exp.engine.train",
    "exp.forecasting.data.dataset", "exp.forecasting.timebridge.model", "exp.vision.data.base",
    "exp.vision.data.dataset", "exp.vision.models", "rich.table",
]  # fmt: skip

for module in _MODULES:
    with contextlib.suppress(ImportError):  # it is told by the runs
        importlib.import_module(module)

register()
with initialize_config_module("exp.conf", version_base="1.3"):
    compose("config", ["backend=cpu", "experiment=timebridge_etth1", "model.d_model=16"])
for cache in (_structures, choices, plugins.installed, plugins.entry_points):
    cache.cache_clear()
gc.freeze()
