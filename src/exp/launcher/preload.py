"""Imported by the fork server alone (:mod:`exp.launcher.agent`): imports what the workers will need."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from exp.launcher.processes import PRELOAD_VARIABLE, name_process

_MODULES = [
    "torch",
    "torch._dynamo",  # of torch >= 2.0: imported when the first optimizer is made
    "exp.engine",  # imports MMEngine, and waits where another process does so for the first time
    "mmengine.runner",
    "matplotlib.backends.backend_agg",  # MMEngine's visualizer makes a figure, used or not
    "matplotlib.figure",
    "exp.engine.distributed",
    "exp.engine.device",
    "exp.engine.registries",
    "exp.session",
    "exp.launcher.agent",
    "exp.launcher.worker",
    *os.environ.get(PRELOAD_VARIABLE, "").split(","),
]

name_process("exp-fork-server")
gc.disable()  # a fifth of the time: imports make a million objects, and none of them garbage
for module in filter(None, _MODULES):
    # What fails here fails in the workers again, where there is a log and an error file for it.
    with contextlib.suppress(Exception):
        importlib.import_module(module)
# The collector would otherwise touch, and so copy, the pages of all these objects in every worker.
gc.freeze()
gc.enable()
