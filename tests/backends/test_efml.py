"""Counting, identity and monitoring of GCU cards by a library that is compiled here, with the vendor's functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Folders with the library as today's drivers have it, and as an older one may."""
    folder = tmp_path_factory.mktemp("efml")
    source = Path(__file__).with_name("efml.c")
    for kind, defined in (("new", []), ("old", ["-DOLD"])):
        (folder / kind).mkdir()
        command = [shutil.which("cc") or "c++", "-shared", "-fPIC", *defined, "-o", str(folder / kind / "libefml.so.1")]
        subprocess.run([*command, str(source)], check=True)
    return folder


def ask(expression: str, folder, **environment: str):
    """What a fresh process answers, which must not have imported torch for it."""
    script = (
        "import json, os, sys\nfrom exp.backends import _efml, gcu\n"
        "from exp.hardware.registry import create_backend\n"
        "backend = create_backend({'_target_': 'gcu', 'name': 'gcu'})\n"
        "def visible(value):\n    os.environ['TOPS_VISIBLE_DEVICES'] = value\n    return gcu.visible_cards()\n"
        f"print(json.dumps({expression}))\nassert 'torch' not in sys.modules\n"
    )
    environment = clean_environment(LD_LIBRARY_PATH=str(folder), **environment)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def test_every_card_is_read(library):
    cards, third_alone, fourth = ask("[backend.monitor(), _efml.readings(2), _efml.readings(7)]", library / "new")
    first, second, third = cards
    assert first == {
        "index": 0, "name": "Enflame S60", "uuid": "GCU-00ab", "bus_id": "0000:3d:00.0", "utilization_percent": 0.0,
        "memory_used": 2**30, "memory_total": 48 * 2**30, "temperature_c": 40.0, "power_w": 96.5, "state": None,
        "serial": None,
    }  # fmt: skip
    assert (second["uuid"], second["utilization_percent"], third["memory_total"]) == ("GCU-10ab", 10.0, None)
    assert (third_alone, fourth) == ([third], [])
    older, *_ = ask("backend.monitor()", library / "old")  # has no function for the power
    assert older == {**first, "power_w": None}


def test_the_variable_chooses(library):
    cards = {
        "2,0": [2, 0],
        "1,7,0": [1],
        "": [],
        "0,0": [],
        "GCU-1,GCU-00ab": [1, 0],
        "GCU-1,GCU-9,GCU-0": [1],
        "GCU-1,GCU-10ab": [],
        "DRS-3": None,  # a part of a card: the plug-in knows
    }
    answers = f"[{{value: visible(value) for value in {list(cards)}}}, visible('GCU-2'), backend._place(0)]"
    # Identity is the number on the host, and the UUID.
    assert ask(answers, library / "new") == [cards, [2], {"card": 2, "uuid": "GCU-20ab"}]


def test_counting_loads_no_plug_in_and_without_a_driver_or_the_library_it_is_asked(library, tmp_path):
    (tmp_path / "torch_gcu.py").write_text("raise AssertionError('it was imported')")
    found = ask("[backend.why_unavailable(), backend.device_count()]", library / "new", PYTHONPATH=str(tmp_path))
    assert found == [None, 3]
    answers = "[gcu.visible_cards(), _efml.readings(), _efml.readings(0)]"
    assert ask(answers, library / "new", NO_DRIVER="1") == [None, [], []]
    assert ask(answers, tmp_path) == [None, [], []]
