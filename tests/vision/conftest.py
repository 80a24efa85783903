from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

# `make test` installs transformers there, apart from the environment: MMEngine imports it wherever it finds it, and
# every worker process would start a second later.
REFERENCE = Path(sys.prefix) / "reference"


@pytest.fixture(scope="module")
def transformers():
    if not REFERENCE.is_dir():
        pytest.skip(f"no {REFERENCE}: make installs transformers there, where Python is 3.10 or newer")
    sys.path.append(str(REFERENCE))
    try:
        yield importlib.import_module("transformers")
    finally:
        sys.path.remove(str(REFERENCE))
