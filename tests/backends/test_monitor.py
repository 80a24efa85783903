"""Parsers of the vendors' monitors, on what these print on real machines, and on what they should not print."""

from __future__ import annotations

import sys

import pytest
from exp.backends import _monitor
from exp.backends._monitor import parse_efsmi, parse_nvidia_smi, parse_rocm_smi

from exp.backends_registry import create_backend
from exp.cards import reading_of

EFSMI_LONG = """
-------------------------------------------------------------------------------
--------------------- Enflame System Management Interface ---------------------
--------- Enflame Tech, All Rights Reserved. 2024-2025 Copyright (C) ----------
-------------------------------------------------------------------------------
DEV ID 0
    Driver Info
        Ver                     : 1.4.3.4
    Device Info
        Dev Name                : S60
        Dev UUID                : TR6Y46010302
        Dev SN                  : A0A1650510676
    PCIe Info
        Vendor ID               : 1e36
        Device ID               : c035
        Domain                  : 0000
        Bus                     : 17
        Dev                     : 00
        Func                    : 0
    Power Info
        Power Capa              : 300 W
        Cur Power               : 96 W
        Dpm Level               : Sleep
    Device Mem Info
        Total Size              : 42976 MiB
        Reserved Size           : 1129 MiB
        Used Size               : 0 MiB
        Free Size               : 41846 MiB
    Temperature Info
        GCU Temp                : 35 \u2103
    Device Usage Info
        GCU Usage               : 0.0 %
DEV ID 1
    Device Mem Info
        Mem Size                : 42976 MiB
        Mem Usage               : 1129 MiB
    Temperature Info
        GCU Temp                : 41 C
    Device Usage Info
        GCU Usage               : 98.5 %
"""

EFSMI_TABLE = """
+2024-12-06, 11:33:56 CST--------------------------------------------------+
|EFSMI    V1.2.0.301       Driver Ver: 1.2.0.301                           |
| DEV    NAME                | FW VER          | BUS-ID      ECC           |
| TEMP   Dpm   Pwr(Usage/Cap)| Mem     GCU Virt| DUsed       SN            |
|--------------------------------------------------------------------------|
| 0      S60                 | 33.6.2          | 00:01:00.0  Disable       |
| 39 C   Sleep    105W  300W | 49120MiB Disable|   0.0%      A073640510015 |
+--------------------------------------------------------------------------+
| 1      Enflame S60G        | 33.6.5          | 00:09:00.0  Enable        |
| 46\u2103    LP0      N/A       | 42976MiB Disable|   97%       C807J40510285 |
+--------------------------------------------------------------------------+
"""

EFSMI_T20 = """
-------- Enflame Tech, All Rights Reserved. 2023 Copyright (C) --------

*Sat Oct  7 15:54:28 2023-------------------------------------------------*
*EFSMI    V1.20.0          Driver Ver: 2.4.20230829                       *
*-------------------------------------------------------------------------*
*-------------------------------------------------------------------------*
* DEV    NAME                | FW VER          | BUS-ID     ECC           *
* TEMP   DPM   Pwr(Usage/Cap)| Mem         vGCU| DEV-Util   UUID          *
*-------------------------------------------------------------------------*
* 0      T20                 | 10.19.3         | 00:3d:0.0  Enable        *
* 30C    Sleep   48.0W  300W | 32G      Disable|   0.0%     W00000000001  *
*-------------------------------------------------------------------------*
*-------------------------------------------------------------------------*
* 1      T20                 | 10.19.3         | 00:3e:0.0  Enable        *
* 31C    Active  96.5W  300W | 32G      Disable|  88.0%     W00000000002  *
*-------------------------------------------------------------------------*
"""

NVIDIA = """\
0, GPU-6fd0e7e5-1b0c-4d32-8f3c-0f2a6f1e9b11, 00000000:3B:00.0, NVIDIA A100-SXM4-80GB, 97, 70123, 81920, 61, 350.27
1, GPU-0e6a2f11-9a10-4a4e-a3b5-6a4a0c1c2d22, 00000000:5E:00.0, NVIDIA A100-SXM4-80GB, [N/A], 4, 81920, 33, [N/A]
"""

ROCM = """\
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card1": {"GPU use (%)": "0", "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10960896",
 "Temperature (Sensor junction) (C)": "35.0", "Current Socket Graphics Package Power (W)": "N/A"},
 "card0": {"Unique ID": "0x719d230578348e8c", "PCI Bus": "0000:2F:00.0", "Card Series": "AMD Instinct MI250X",
 "GPU use (%)": "99", "Temperature (Sensor edge) (C)": "52.0", "Temperature (Sensor junction) (C)": "66.0",
 "Average Graphics Package Power (W)": "489.0", "VRAM Total Memory (B)": "68702699520",
 "VRAM Total Used Memory (B)": "34351349760"},
 "system": {"Driver version": "6.7.0"}}
"""


def test_efsmi_long():
    first, second = parse_efsmi(EFSMI_LONG)
    assert [first[key] for key in ("index", "name", "uuid", "bus_id")] == [0, "S60", "TR6Y46010302", "0000:17:00.0"]
    assert [first[key] for key in ("memory_used", "memory_total")] == [0, 42976 * 2**20]
    assert [first[key] for key in ("utilisation_percent", "temperature_c", "power_w")] == [0.0, 35.0, 96.0]
    assert (first["state"], first["serial"]) == ("Sleep", "A0A1650510676")
    assert second["index"] == 1
    assert second["utilisation_percent"] == 98.5
    assert second["memory_used"] == 1129 * 2**20
    assert second["uuid"] is None


def test_efsmi_table():
    first, second = parse_efsmi(EFSMI_TABLE)
    assert first["index"] == 0
    assert first["name"] == "S60"
    assert first["bus_id"] == "00:01:00.0"
    assert (first["utilisation_percent"], first["state"]) == (0.0, "Sleep")
    assert (first["temperature_c"], first["power_w"]) == (39.0, 105.0)
    assert first["memory_total"] == 49120 * 2**20
    assert (second["name"], second["utilisation_percent"], second["state"]) == ("Enflame S60G", 97.0, "LP0")
    assert (second["temperature_c"], second["power_w"]) == (46.0, None)
    assert (first["serial"], second["serial"]) == ("A073640510015", "C807J40510285")


def test_efsmi_table_of_a_t20():
    first, second = parse_efsmi(EFSMI_T20)
    assert [first[key] for key in ("index", "name", "uuid", "bus_id")] == [0, "T20", None, "00:3d:0.0"]
    assert [first[key] for key in ("memory_used", "memory_total")] == [None, 32 * 2**30]
    assert [first[key] for key in ("utilisation_percent", "temperature_c", "power_w")] == [0.0, 30.0, 48.0]
    assert (first["state"], first["serial"]) == ("Sleep", "W00000000001")
    assert (second["index"], second["utilisation_percent"], second["power_w"]) == (1, 88.0, 96.5)
    assert (second["state"], second["serial"]) == ("Active", "W00000000002")


def test_nvidia_smi():
    first, second = parse_nvidia_smi(NVIDIA)
    assert (first["index"], first["utilisation_percent"], first["power_w"]) == (0, 97.0, 350.27)
    assert first["memory_used"] == 70123 * 2**20
    assert (second["utilisation_percent"], second["power_w"], second["temperature_c"]) == (None, None, 33.0)


def test_rocm_smi():
    first, second = parse_rocm_smi(ROCM)
    assert (first["index"], first["name"], first["utilisation_percent"]) == (0, "AMD Instinct MI250X", 99.0)
    assert (first["temperature_c"], first["power_w"], first["memory_used"]) == (52.0, 489.0, 34351349760)
    assert (second["index"], second["temperature_c"], second["power_w"]) == (1, 35.0, None)


@pytest.mark.parametrize("parse", [parse_efsmi, parse_nvidia_smi, parse_rocm_smi])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "{",
        '{"card0": 3, "cardx": {}, "card1": null}',
        "[1, 2]",
        "DEV ID x\n",
        "| 0 | 1 | 2 |\n| a | b | c |",
        "0, a, b\n,,,,,,,,\n\x00\xff",
        "\n".join(line[::-1] for line in EFSMI_TABLE.splitlines()),
    ],
)
def test_garbage_gives_nothing_and_raises_nothing(parse, text):
    assert parse(text) == []


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_efsmi, EFSMI_LONG),
        (parse_efsmi, EFSMI_TABLE),
        (parse_efsmi, EFSMI_T20),
        (parse_nvidia_smi, NVIDIA),
        (parse_rocm_smi, ROCM),
    ],
)
def test_output_that_is_cut_off_anywhere_raises_nothing(parse, text):
    for length in range(0, len(text), 7):
        assert len(parse(text[:length])) <= 2


def test_a_card_is_found_by_identity_before_number():
    rows = parse_nvidia_smi(NVIDIA)
    assert reading_of({"uuid": "0e6a2f11-9a10-4a4e-a3b5-6a4a0c1c2d22", "index": 0}, rows)["index"] == 1
    assert reading_of({"bus_id": "0000:5e:00.0", "index": 0}, rows)["index"] == 1
    assert reading_of({"index": 0, "card": 1}, rows)["index"] == 1
    assert reading_of({"index": 0}, rows)["index"] == 0
    assert reading_of({"index": 5}, rows) is None


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program on PATH."""

    def write(name: str, *lines: str) -> None:
        path = tmp_path / name
        path.write_text("\n".join([f"#!{sys.executable}", *lines]))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return write


def test_the_program_is_asked_in_both_forms_and_what_fails_is_no_monitor(program, tmp_path, monkeypatch):
    program("efsmi", "import sys", f"print({EFSMI_LONG!r} if sys.argv[1:] == ['-q'] else '')")
    backend = create_backend({"_target_": "gcu", "name": "gcu"})
    assert [card["state"] for card in backend.monitor()] == ["Sleep", None]
    program("efsmi", "import sys", f"print('unknown option -q') if sys.argv[1:] else print({EFSMI_TABLE!r})")
    assert [card["name"] for card in backend.monitor()] == ["S60", "Enflame S60G"]
    program("nvidia-smi", "import sys", "sys.stdout.buffer.write(bytes(range(256)))", "sys.exit(9)")
    assert _monitor.nvidia_smi() == []
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    for name in ("cpu", "cuda", "rocm", "gcu"):
        assert create_backend({"_target_": name, "name": name}).monitor() == []
