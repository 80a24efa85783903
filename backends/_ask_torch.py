"""Asks torch which accelerator it has, without importing it here."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from importlib import util
from pathlib import Path

from exp.backends import _probe
from exp.backends._probe import AUTOLOAD, ask_python

from exp.plugins import entry_points

__all__ = ["ask", "built_in", "why_hopeless"]

_FIRST = (2, 6)
_PLUGINS = "torch.backends"

_TIMEOUT_S = 60
_ASK = """
import importlib, json, sys, torch
for name in sys.argv[1:]:
    importlib.import_module(name)
device = torch.accelerator.current_accelerator()
print("accelerator", json.dumps([device and device.type, torch.accelerator.device_count() if device else 0]))
"""


@functools.lru_cache(maxsize=None)
def ask(imports: tuple[str, ...], environment: tuple[str | None, ...]) -> tuple[str | None, int, str | None]:
    """Ask torch for its accelerator, in a process of its own: that takes torch, and the vendor's plug-in.

    Args:
        imports: what has to be imported first.
        environment: values that the answer depends on; here they only tell answers apart.

    Returns:
        Its device type, the number of cards, and why there is no answer, or None.
    """
    del environment
    autoload = os.environ.get(AUTOLOAD, "1")
    answer, problem = ask_python(_ASK, r"accelerator (\[.*, \d+\])", autoload, imports, timeout_s=_TIMEOUT_S)
    kind, count = (None, 0) if answer is None else json.loads(answer)
    return kind, count, problem


def built_in() -> bool:
    """Whether torch itself was built for a card with no backend of its own here; the others announce themselves."""
    spec = util.find_spec("torch")
    places = [] if spec is None else spec.submodule_search_locations or []
    return platform.system() == "Darwin" or any(list(Path(place, "lib").glob("libtorch_xpu*")) for place in places)


def why_hopeless(imports: tuple[str, ...]) -> str | None:
    """Why torch need not be started to ask it, or None; costs milliseconds.

    Args:
        imports: what would be imported first.
    """
    missing = _probe.torch_missing()
    if missing:
        return missing
    version = _probe.torch_build()["version"] or "0.0"
    if tuple(int(part) for part in version.split(".")[:2]) < _FIRST:
        return f"looked for torch.accelerator, which torch has from 2.6 on, and found torch {version}; update it"
    absent = [name for name in imports if util.find_spec(name.partition(".")[0]) is None]
    if absent:
        return f"looked for the package {absent[0]} in {sys.executable} and found none; install it"
    if imports or entry_points(_PLUGINS) or built_in():
        return None
    return (
        f"torch {version} is built for no card that torch.accelerator could name, and no package announces one to "
        f"it (entry points '{_PLUGINS}' in {sys.executable}); install the vendor's plug-in, or name one that does "
        "not announce itself: 'backend.options.imports=[torch_<vendor>]'"
    )
