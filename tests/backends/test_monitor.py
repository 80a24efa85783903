"""Parsers of the vendors' monitors, on what these print on real machines, and on what they should not print."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from exp.backends import _monitor
from exp.backends._monitor import parse_efsmi, parse_nvidia_smi, parse_rocm_smi
from exp.backends.mlu import parse_cnmon
from exp.backends.npu import parse_npu_smi

from tests.backends import made

MIB = 2**20


def recorded(name: str) -> str:
    """What a monitor printed on a real machine."""
    return Path(__file__).with_name("recorded").joinpath(f"{name}.txt").read_text(encoding="utf-8")


COLUMNS = (
    "index", "name", "uuid", "bus_id", "utilization_percent", "memory_used", "memory_total", "temperature_c", "power_w",
    "state", "serial",
)  # fmt: skip
A100 = "NVIDIA A100-SXM4-80GB"
OUTPUTS = [
    (parse_efsmi, "efsmi", [
        (0, "S60", None, "00:01:00.0", 0.0, None, 49120 * MIB, 39.0, 105.0, "Sleep", "A073640510015"),
        (1, "Enflame S60G", None, "00:09:00.0", 97.0, None, 42976 * MIB, 46.0, None, "LP0", "C807J40510285"),
    ]),
    (parse_efsmi, "efsmi-t20", [
        (0, "T20", None, "00:3d:0.0", 0.0, None, 32 * 2**30, 30.0, 48.0, "Sleep", "W00000000001"),
        (1, "T20", None, "00:3e:0.0", 88.0, None, 32 * 2**30, 31.0, 96.5, "Active", "W00000000002"),
    ]),
    (parse_nvidia_smi, "nvidia-smi", [
        (0, A100, "GPU-6fd0e7e5-1b0c-4d32-8f3c-0f2a6f1e9b11", "00000000:3B:00.0", 97.0, 70123 * MIB, 81920 * MIB, 61.0,
         350.27, None, None),
        (1, A100, "GPU-0e6a2f11-9a10-4a4e-a3b5-6a4a0c1c2d22", "00000000:5E:00.0", None, 4 * MIB, 81920 * MIB, 33.0,
         None, None, None),
    ]),
    (parse_npu_smi, "npu-smi", [
        (0, "910B2", None, "0000:C1:00.0", 37.0, 3376 * MIB, 65536 * MIB, 48.0, 103.8, "OK", None),
        (1, "910ProB", None, "0000:C2:00.0", 0.0, 30711 * MIB, 32768 * MIB, 33.0, None, "Warning", None),
    ]),
    (parse_cnmon, "cnmon", [
        (0, "MLU370-X8", None, "0000:39:00.0", 0.0, 0, 23374 * MIB, 32.0, 106.0, None, None),
        (1, "MLU370-X8", None, "0000:3D:00.0", 86.0, 2010 * MIB, 23374 * MIB, 39.0, 106.0, None, None),
    ]),
    (parse_rocm_smi, "rocm-smi", [
        (0, "AMD Instinct MI250X", "0x719d230578348e8c", "0000:2F:00.0", 99.0, 34351349760, 68702699520, 52.0, 489.0,
         None, None),
        (1, None, None, None, 0.0, 10960896, 68702699520, 35.0, None, None, None),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "name", "cards"), OUTPUTS)
def test_every_card_is_read(parse, name, cards):
    assert [tuple(card[column] for column in COLUMNS) for card in parse(recorded(name))] == cards


@pytest.mark.parametrize(("parse", "name", "cards"), OUTPUTS)
def test_output_that_is_cut_off_anywhere_raises_nothing(parse, name, cards):
    text = recorded(name)
    for length in range(0, len(text), 7):
        assert len(parse(text[:length])) <= len(cards)


@pytest.mark.parametrize("parse", [parse_cnmon, parse_efsmi, parse_npu_smi, parse_nvidia_smi, parse_rocm_smi])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "{",
        '{"card0": 3, "cardx": {}, "card1": null}',
        "[1, 2]",
        "DEV ID x\n",
        "| 0 | 1 | 2 |\n| a | b | c |\n0, a, b\n,,,,,,,,\n\x00\xff",
        "\n".join(line[::-1] for line in recorded("efsmi").splitlines()),
    ],
)
def test_garbage_gives_nothing_and_raises_nothing(parse, text):
    assert parse(text) == []


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes a program the only one on PATH."""

    def write(name: str, *lines: str) -> None:
        (tmp_path / name).write_text("\n".join([f"#!{sys.executable}", "import sys", *lines]))
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return write


def test_the_program_is_asked_and_what_fails_is_no_monitor(program, tmp_path, monkeypatch):
    program("efsmi", f"print({recorded('efsmi')!r})")
    assert [card["name"] for card in made("gcu").monitor()] == ["S60", "Enflame S60G"]
    program("nvidia-smi", "sys.stdout.buffer.write(bytes(range(256)))", "sys.exit(9)")
    assert _monitor.nvidia_smi() == []
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    names = ("cpu", "cuda", "rocm", "gcu", "npu", "mlu", "musa", "xpu", "mps")
    assert [made(name).monitor() for name in names] == [[]] * len(names)


def test_processes_are_found_on_the_cards_that_they_use(tmp_path):
    held = tmp_path / "dtu3"
    with held.open("w"):
        assert _monitor.processes_with_open(re.compile(f"{tmp_path}/dtu(\\d+)")) == {3: [os.getpid()]}
    uuid = "GPU-6fd0e7e5-1b0c-4d32-8f3c-0f2a6f1e9b11"
    assert _monitor.parse_nvidia_processes(f"{uuid}, 4711\n{uuid}, [N/A]\nNo devices\n") == [(uuid, 4711)]
    files = {
        "topology/nodes/0/gpu_id": "0", "topology/nodes/0/properties": "simd_count 0\ndomain 0\nlocation_id 0",
        "topology/nodes/1/gpu_id": "51", "topology/nodes/1/properties": "domain 0\nlocation_id 12032",
        "proc/81/vram_51": "4096", "proc/82/vram_51": "0",
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert _monitor.kfd_processes(tmp_path)["0000:2f:00.0"] == [81]
    assert [card["processes"] for card in parse_npu_smi(recorded("npu-smi"))] == [[], [55115]]
    assert [card["processes"] for card in parse_cnmon(recorded("cnmon"))] == [[], [4242]]
