"""Every module can be imported, also by the oldest Python and torch, whose lane leaves out many of the tests."""

from __future__ import annotations

import importlib
from pathlib import Path

from exp.hardware.compat import TORCH_VERSION

ROOT = Path(__file__).parents[1]
NEWER = "exp.hardware.operators"  # kernels that are registered from Python: torch 2.0


def test_every_module_can_be_imported():
    files = [path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src" / "exp").rglob("*.py")]
    names = {".".join(file.parts).replace(".__init__", "") for file in files}
    names |= {f"exp.backends.{path.stem}" for path in (ROOT / "backends").glob("*.py")}
    assert {"exp.backends.cpu", "exp.engine.train", "exp.vision.models"} < names
    for name in sorted(names):
        if not name.endswith("__main__") and (TORCH_VERSION >= (2, 0) or not name.startswith(NEWER)):
            importlib.import_module(name)
