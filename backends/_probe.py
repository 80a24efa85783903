"""Finds out about cards without importing torch or making a device context in this process."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Sequence

__all__ = [
    "AUTOLOAD", "NO_CUDA", "ask_torch", "built_for_another", "cards_by_library", "count_visible", "torch_build",
    "visible_card", "visible_name",
]  # fmt: skip

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Whether torch loads plug-ins with an entry point in ``torch.backends``: ``1`` (the default) or ``0``."""

NO_CUDA = {"CUDA_VISIBLE_DEVICES": ""}
"""For backends that fork workers and do not use CUDA. MMEngine's import initializes CUDA where it finds a card; then
autograd fails in every process that is forked (``cudaErrorInitializationError``)."""

_TIMEOUT_S = 60
_NO_SYMBOL = "undefined symbol"


def torch_build() -> dict[str, str | None]:
    """``version``, ``cuda`` and ``hip`` of the installed torch, read from its ``version.py`` without importing it."""
    spec = importlib.util.find_spec("torch")
    build: dict[str, str | None] = {"version": None, "cuda": None, "hip": None}
    if spec is None or not spec.submodule_search_locations:
        return build
    text = (Path(next(iter(spec.submodule_search_locations))) / "version.py").read_text(encoding="utf-8")
    for match in re.finditer(r"^(?:__)?(version|cuda|hip)(?:__)?(?:\s*:[^=]*)?\s*=\s*'([^']*)'", text, re.MULTILINE):
        build[match.group(1)] = match.group(2)
    return build


@functools.lru_cache(maxsize=None)
def ask_torch(script: str, autoload: str, environment: tuple[str | None, ...]) -> tuple[Any, str | None]:
    """Run a script with torch in another process, which takes seconds, and may make a device context there. Cached.

    Args:
        script: prints a line with ``answer`` and JSON.
        autoload: whether torch loads plug-ins by itself there, ``"1"`` or ``"0"``.
        environment: values of the environment variables on which the answer depends; used as cache key only.

    Returns:
        The answer and None; or None and the reason why there is no answer.
    """
    del environment
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, AUTOLOAD: autoload},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_TIMEOUT_S} s"
    for line in done.stdout.splitlines():
        if line.startswith("answer "):
            return json.loads(line.partition(" ")[2]), None
    lines = done.stderr.strip().splitlines()
    cause = [line for line in lines if _NO_SYMBOL in line]  # the last line is torch's, without the cause
    return None, (cause or lines or [f"exit status {done.returncode}"])[-1].strip()


def built_for_another(problem: str, version: str | None = None) -> str | None:
    """What to do if a plug-in does not load because it was built for another torch; None: there is another cause.

    Args:
        problem: message of the error.
        version: of a plug-in whose version numbers follow torch's; None: not known, or numbered otherwise.
    """
    torch = torch_build()["version"] or ""
    release, torch_release = ((number or "").split(".")[:2] for number in (version, torch))
    if _NO_SYMBOL not in problem and (version is None or release == torch_release):
        return None
    which = f" {version}" if version else ""
    return f"the plug-in{which} was built for another torch than {torch}: install the two that go together"


@functools.lru_cache(maxsize=None)
def cards_by_library(library: str, initializers: tuple[str, ...], counter: str) -> int | None:
    """Number of cards of this host, visible or not, by a vendor's management library, within milliseconds. Cached.

    The library is never shut down: the vendor's plug-in may use it in the same process.

    Args:
        library: file name, such as ``libnvidia-ml.so.1``.
        initializers: names of its functions that prepare it, the newest first; they vary between releases. Empty: it
            needs none.
        counter: name of its function that writes the number of cards to its argument.

    Returns:
        The number; None if the library is missing, or its driver does not answer.
    """
    try:
        loaded = ctypes.CDLL(library)
    except OSError:
        return None
    count = ctypes.c_uint(0)
    ready = not initializers or any(getattr(loaded, name)() == 0 for name in initializers if hasattr(loaded, name))
    answered = ready and hasattr(loaded, counter) and getattr(loaded, counter)(ctypes.byref(count)) == 0
    return count.value if answered else None


def _visible(variables: Sequence[str]) -> list[str] | None:
    """The entries of the first of ``variables`` that is set; None: none is set."""
    values = (os.environ.get(variable) for variable in variables)
    value = next((value for value in values if value is not None), None)
    return None if value is None else [item.strip() for item in value.split(",")]


def count_visible(total: int, *variables: str) -> int:
    """Number of visible cards out of ``total``, by the first of ``variables`` that is set.

    The list is read as drivers (and ``torch.cuda._parse_visible_devices``) read it: it ends at the first number that is
    not a card, and a list that names a card twice hides all cards. Names (UUIDs, ``MIG-...``) are assumed to exist;
    :meth:`Backend.set_device` checks them with torch.
    """
    items = _visible(variables)
    if items is None:
        return total
    visible: list[str] = []
    for item in items:
        if not item or (item.lstrip("-").isdigit() and not 0 <= int(item) < total):
            break
        if item in visible:
            return 0
        visible.append(item)
    return min(len(visible), total)


def visible_card(index: int, *variables: str) -> int | None:
    """Number on the host of the ``index``-th visible card, by the first of ``variables`` that is set.

    Returns:
        The number; None if the variable has a name (UUID) at this position, or fewer entries.
    """
    if _visible(variables) is None:
        return index
    name = visible_name(index, *variables)
    return int(name) if name is not None and name.isdigit() else None


def visible_name(index: int, *variables: str) -> str | None:
    """Entry of the ``index``-th visible card in the first of ``variables`` that is set; None: no such entry."""
    items = _visible(variables)
    return items[index] if items is not None and index < len(items) else None
