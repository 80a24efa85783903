"""Imports what the workers will need; only the fork server imports this module (:mod:`exp.launcher.agent`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

from exp.worker.processes import PRELOAD_VARIABLE, name_process

_MODULES = [
    "torch",
    "torch._dynamo",  # torch >= 2.0 imports it with the first optimizer
    "mmengine.runner",
    "exp.distributed",
    "exp.engine.build",
    "exp.engine.train",
    "exp.worker.session",
    "exp.launcher.agent",
    "exp.worker.main",
    *os.environ.get(PRELOAD_VARIABLE, "").split(","),
]

name_process("exp-fork-server")
gc.disable()  # saves a fifth of the time: imports make a million objects, and none of them is garbage
for module in filter(None, _MODULES):
    # An import that fails here fails again in the workers, which have a log and an error file.
    with contextlib.suppress(Exception):
        importlib.import_module(module)
# Otherwise the collector would write to all these objects in every worker, and so copy their memory pages.
gc.freeze()
gc.enable()
