"""Counting, identity and monitoring of GCU cards by a library that is compiled here, with the vendor's functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import clean_environment

LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct memory { unsigned long long total, free, used; };
struct rates { unsigned gcu, memory; };
struct pci { unsigned domain, bus, device, function, id, subsystem; char bus_id[32]; };
static int ready;
static int number(void *card) { return (int)((char *)card - (char *)0x7fff00000000) - 1; }
#ifdef OLD
int efmlInit(void) { ready = 1; return 0; }
#else
int efmlInit(void) { return 9; }  /* as where the new one has to be called */
int efmlInit_v2(void) { ready = getenv("NO_DRIVER") == NULL; return ready ? 0 : 9; }
int efmlDeviceGetPowerUsage(void *card, unsigned *milliwatts) { *milliwatts = 96500 + number(card); return 0; }
#endif
int efmlDeviceGetCount_v2(unsigned *count) { *count = 3; return ready ? 0 : 1; }
/* Handles need all 64 bits. */
int efmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = (char *)0x7fff00000000 + index + 1; return 0; }
int efmlDeviceGetUUID(void *card, char *text, unsigned length) {
  return length == 96 ? (sprintf(text, "GCU-%d0ab", number(card)), 0) : 7;
}
int efmlDeviceGetName(void *card, char *text, unsigned length) { strncpy(text, "Enflame S60", length); return 0; }
int efmlDeviceGetMemoryInfo(void *card, struct memory *memory) {
  *memory = (struct memory){48ull << 30, 47ull << 30, 1ull << 30};
  return number(card) == 2 ? 3 : 0;
}
int efmlDeviceGetUtilizationRates(void *card, struct rates *rates) { rates->gcu = 10 * number(card); return 0; }
int efmlDeviceGetPciInfo_v3(void *card, struct pci *pci) { strcpy(pci->bus_id, "0000:3d:00.0"); return 0; }
int efmlDeviceGetTemperature(void *card, int sensor, int *degrees) { *degrees = 40 + sensor; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Folders with the library as today's drivers have it, and as an older one may."""
    folder = tmp_path_factory.mktemp("efml")
    (folder / "efml.c").write_text(LIBRARY)
    for kind, defined in (("new", []), ("old", ["-DOLD"])):
        (folder / kind).mkdir()
        command = [shutil.which("cc") or "c++", "-shared", "-fPIC", *defined, "-o", str(folder / kind / "libefml.so.1")]
        subprocess.run([*command, str(folder / "efml.c")], check=True)
    return folder


def ask(expression: str, folder, **environment: str):
    """What a fresh process answers, which must not have imported torch for it."""
    script = (
        "import json, sys\nfrom exp.backends import _efml, _gcu_cards\n"
        "from exp.backends_registry import create_backend\n"
        "backend = create_backend({'_target_': 'gcu', 'name': 'gcu'})\n"
        f"print(json.dumps({expression}))\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=clean_environment(LD_LIBRARY_PATH=str(folder), **environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_card_is_read(library):
    first, second, third = ask("backend.monitor()", library / "new")
    assert (first["index"], first["name"], first["uuid"]) == (0, "Enflame S60", "GCU-00ab")
    assert (first["memory_used"], first["memory_total"]) == (2**30, 48 * 2**30)
    assert (first["utilisation_percent"], first["temperature_c"], first["power_w"]) == (0.0, 40.0, 96.5)
    assert (first["bus_id"], first["state"], first["serial"]) == ("0000:3d:00.0", None, None)
    assert (second["uuid"], second["utilisation_percent"], third["memory_total"]) == ("GCU-10ab", 10.0, None)


def test_an_older_library_tells_what_it_can(library):
    first, *_ = ask("backend.monitor()", library / "old")
    assert (first["uuid"], first["power_w"]) == ("GCU-00ab", None)


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("", []),
        ("0,0", []),
        ("GCU-1,GCU-00ab", [1, 0]),
        ("GCU-1,GCU-9,GCU-0", [1]),
        ("GCU-1,GCU-10ab", []),
        ("DRS-3", None),  # a part of a card: the plug-in knows
    ],
)
def test_the_variable_chooses(library, visible, cards):
    given = {} if visible is None else {"TOPS_VISIBLE_DEVICES": visible}
    assert ask("_gcu_cards.visible_cards()", library / "new", **given) == cards


def test_identity_is_the_number_on_the_host_and_the_uuid(library):
    assert ask("backend._place(0)", library / "new", TOPS_VISIBLE_DEVICES="GCU-2") == {"card": 2, "uuid": "GCU-20ab"}


def test_without_a_driver_or_the_library_the_plug_in_is_asked(library, tmp_path):
    assert ask("_gcu_cards.visible_cards()", library / "new", NO_DRIVER="1") is None
    assert ask("[_gcu_cards.visible_cards(), _efml.readings(), _efml.utilisation(0)]", tmp_path) == [None, [], None]


def test_how_busy_one_card_is(library):
    assert ask("[_efml.utilisation(2), _efml.utilisation(7)]", library / "new") == [20.0, None]


def test_counting_needs_no_process(library, tmp_path):
    (tmp_path / "torch_gcu.py").write_text("raise AssertionError('it was imported')")
    answer = ask("[backend.why_unavailable(), backend.device_count()]", library / "new", PYTHONPATH=str(tmp_path))
    assert answer == [None, 3]
