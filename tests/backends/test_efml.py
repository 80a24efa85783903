"""Counting of GCU cards by a library that is compiled here, with the vendor's functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from tests.conftest import clean_environment

LIBRARY = """
#include <stdlib.h>
static int ready;
int efmlInit(void) { return 9; }  /* as where the new one has to be called */
int efmlInit_v2(void) { ready = getenv("NO_DRIVER") == NULL; return ready ? 0 : 9; }
int efmlDeviceGetCount_v2(unsigned *count) { *count = 3; return ready ? 0 : 1; }
"""
PLUGIN = """
import types, torch
def device_count():
    return 7
torch.gcu = types.SimpleNamespace(device_count=device_count)
"""


def test_the_library_counts_cards_and_the_plug_in_those_that_have_names(tmp_path):
    """Without the driver the plug-in is asked for all; the asking process imports neither it nor torch."""
    (tmp_path / "torch_gcu.py").write_text(PLUGIN)
    compiler = [shutil.which("cc") or "c++", "-x", "c", "-shared", "-fPIC", "-o", str(tmp_path / "libefml.so.1"), "-"]
    subprocess.run(compiler, input=LIBRARY, text=True, check=True)
    script = (
        "import json, os, sys\nfrom exp.hardware.registry import create_backend\n"
        "backend = create_backend({'_target_': 'gcu', 'name': 'gcu'})\n"
        "def counted(value):\n    os.environ['TOPS_VISIBLE_DEVICES'] = value\n    return backend.device_count()\n"
        "print(json.dumps([counted(value) for value in ('2,0', '1,7,0', '', '0,0', 'GCU-10ab')]))\n"
        "assert backend.unavailable_reason() is None and 'torch' not in sys.modules and 'torch_gcu' not in "
        "sys.modules\n"
    )
    for more, counts in (({}, [2, 1, 0, 0, 7]), ({"NO_DRIVER": "1"}, [7] * 5)):
        environment = clean_environment(LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=str(tmp_path), **more)
        done = subprocess.run([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True)
        assert json.loads(done.stdout) == counts
