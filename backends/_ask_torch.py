"""Asks torch which accelerator it has, without importing it here."""

from __future__ import annotations

import functools
import json
import os
import platform
from importlib import util
from pathlib import Path

from exp.backends._probe import AUTOLOAD, ask_python

__all__ = ["ask", "built_in"]

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
