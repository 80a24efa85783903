"""Marks for tests that run on a simulated card."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest


def _why_not(*generations: str) -> str:
    if importlib.util.find_spec("simulated_gcu") is None:
        return "needs the package simulated_gcu (pip install simulators/gcu)"
    import simulated_gcu
    from simulated_gcu.build import cached_extension

    try:
        generation = simulated_gcu.generation()
    except RuntimeError as error:
        return str(error)
    if generation not in generations:
        return f"this torch goes with the {generation} generation of the card"
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    if not cached_extension().is_file() and not any(shutil.which(name) for name in compilers if name):
        return "the simulated card has not been compiled, and there is no C++ compiler"
    return ""


def _mark(*generations: str) -> pytest.MarkDecorator:
    reason = _why_not(*generations)
    return pytest.mark.skipif(bool(reason), reason=reason)


needs_card = _mark("current", "legacy")
needs_current_card = _mark("current")
needs_legacy_card = _mark("legacy")


def plugin_on_path() -> dict[str, str]:
    """What puts the simulated plug-in, compiled, where torch finds it by itself, as an installed one is found."""
    import simulated_gcu
    from simulated_gcu.build import extension

    extension()
    return {"PYTHONPATH": str(simulated_gcu.path())}
