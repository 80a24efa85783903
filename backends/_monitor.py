"""Readings of the vendors' monitors: utilization, memory, temperature, power and processes of their cards.

Each parser takes the output of one program and returns one dict per card, with the keys of :func:`reading`. Parsers
skip what they do not recognize and never raise: a monitor of another version must not break a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

__all__ = [
    "MIB", "ask", "efsmi", "kfd_processes", "number", "nvidia_smi", "parse_efsmi", "parse_nvidia_processes",
    "parse_nvidia_smi", "parse_rocm_smi", "processes_with_open", "reading", "rocm_smi", "rows_of_two_lines", "size",
]  # fmt: skip

_TIMEOUT_S = 10
_EFSMI_PLACES = ("/usr/bin", "/usr/sbin", "/usr/local/efsmi", "/opt/tops/bin")  # PATH may lack some of these
_EFSMI_DEVICE = re.compile(r"/dev/(?:dtu|gcu(?:\d+vid)?)(\d+)")  # T20; S60 and later
_KFD = Path("/sys/class/kfd/kfd")
MIB = 2**20
_BUS_ID = re.compile(r"[0-9a-fA-F]+:[0-9a-fA-F]+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

_NVIDIA_FIELDS = (
    ("index", "index"),
    ("uuid", "uuid"),
    ("pci.bus_id", "bus_id"),
    ("name", "name"),
    ("utilization.gpu", "utilization_percent"),
    ("memory.used", "memory_used"),
    ("memory.total", "memory_total"),
    ("temperature.gpu", "temperature_c"),
    ("power.draw", "power_w"),
)


def reading(index: int, **values: Any) -> dict[str, Any]:
    """The reading of one card; values that the monitor does not report are None.

    Args:
        index: number of the card on its host, visible or not.
        **values: ``name``, ``uuid``, ``bus_id``, ``utilization_percent``, ``memory_used`` and ``memory_total`` (bytes),
            ``temperature_c``, ``power_w``, ``state`` (as the monitor prints it, such as ``Sleep``), ``serial``,
            ``processes`` (ids of those that use the card).
    """
    keys = ("name", "uuid", "bus_id", "utilization_percent", "memory_used", "memory_total", "temperature_c", "power_w")
    return {"index": index, **{key: values.get(key) for key in (*keys, "state", "serial", "processes")}}


def efsmi() -> list[dict[str, Any]]:
    """Readings of Enflame's cards; the monitor lists no processes, so those count that have the device file open."""
    cards = ask(parse_efsmi, ["efsmi"], _EFSMI_PLACES)
    users = processes_with_open(_EFSMI_DEVICE) if cards else {}
    return [{**card, "processes": users.get(card["index"])} for card in cards]


def rocm_smi() -> list[dict[str, Any]]:
    """Readings of AMD's cards."""
    options = ["--showuse", "--showmeminfo", "vram", "--showtemp", "--showpower", "--showbus", "--showproductname"]
    cards = ask(parse_rocm_smi, ["rocm-smi", *options, "--showuniqueid", "--json"])
    users = kfd_processes(_KFD) if cards else {}
    return [{**card, "processes": users.get(str(card["bus_id"]).lower())} for card in cards]


def nvidia_smi() -> list[dict[str, Any]]:
    """Readings of NVIDIA's cards."""
    fields = ",".join(field for field, _ in _NVIDIA_FIELDS)
    cards = ask(parse_nvidia_smi, ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader,nounits"]
    users = ask(parse_nvidia_processes, query) if cards else []
    return [{**card, "processes": [pid for uuid, pid in users if uuid == card["uuid"]]} for card in cards]


def processes_with_open(pattern: re.Pattern[str]) -> dict[int, list[int]]:
    """Ids of the processes that have a card's device file open, by the number in ``pattern``.

    Only root sees the files of other users' processes.
    """
    users: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            names = {os.readlink(link.path) for link in os.scandir(str(entry / "fd"))}
            for match in filter(None, map(pattern.fullmatch, names)):
                users.setdefault(int(match[1]), []).append(int(entry.name))
    return users


def kfd_processes(root: Path) -> dict[str, list[int]]:
    """Ids of the processes with memory on an AMD card, by its PCI bus id (``0000:2f:00.0``).

    Args:
        root: the kernel driver's folder in sysfs, which all users can read.
    """
    users: dict[str, list[int]] = {}
    for node in (root / "topology" / "nodes").glob("*"):
        with contextlib.suppress(OSError, KeyError, ValueError):  # the driver refuses cards of other containers
            card = (node / "gpu_id").read_text().strip()
            lines = (node / "properties").read_text().splitlines()
            facts = {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}
            place = facts["location_id"]
            bus_id = f"{facts['domain']:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
            files = (root / "proc").glob(f"*/vram_{card}") if card != "0" else ()  # 0: a processor
            users[bus_id] = [int(file.parent.name) for file in files if int(file.read_text())]
    return users


def ask(parse: Callable[[str], list[Any]], command: list[str], folders: Sequence[str] = ()) -> list[Any]:
    """Run a monitor and parse its output; empty if it is missing, cannot run, or takes longer than 10 s.

    Args:
        parse: parser of the output.
        command: the program, looked for on PATH, and its arguments.
        folders: further folders to look in.
    """
    program = shutil.which(command[0], path=os.pathsep.join([os.environ.get("PATH", os.defpath), *folders]))
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse(done.stdout.decode("utf-8", errors="replace"))


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """Parse rows of ``--query-gpu=... --format=csv,noheader,nounits``; missing values are ``[N/A]`` there."""
    cards = []
    for line in text.splitlines():
        row = [cell.strip() for cell in line.split(",")]  # no cell is quoted or has a comma
        if len(row) != len(_NVIDIA_FIELDS) or not row[0].isdigit():
            continue
        cells = {key: cell for (_, key), cell in zip(_NVIDIA_FIELDS, row)}
        values: dict[str, Any] = {key: _text(cells[key]) for key in ("uuid", "bus_id", "name")}
        for key in ("utilization_percent", "temperature_c", "power_w"):
            values[key] = number(cells[key])
        for key in ("memory_used", "memory_total"):
            values[key] = size(cells[key], MIB)
        cards.append(reading(int(cells["index"]), **values))
    return cards


def parse_nvidia_processes(text: str) -> list[tuple[str, int]]:
    """Parse rows of ``--query-compute-apps=gpu_uuid,pid --format=csv,noheader``: UUIDs of cards, and process ids."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [(row[0], int(row[1])) for row in rows if len(row) == 2 and row[1].isdigit()]


def parse_rocm_smi(text: str) -> list[dict[str, Any]]:
    """Parse the JSON of ``--json``, whose keys vary between releases."""
    try:
        cards = json.loads(text[text.index("{") :])  # warnings may come before the JSON
    except ValueError:
        return []
    readings = []
    for name, card in cards.items() if isinstance(cards, dict) else ():
        match = re.fullmatch(r"card(\d+)", name)
        if match is None or not isinstance(card, dict):
            continue
        values = {str(key).lower(): value for key, value in card.items()}
        readings.append(
            reading(
                int(match.group(1)),
                name=_text(_first(values, "card series", "card model", "product name")),
                uuid=_text(_first(values, "unique id")),
                bus_id=_text(_first(values, "pci bus")),
                utilization_percent=number(_first(values, "gpu use (%)")),
                memory_used=size(_first(values, "vram total used memory (b)")),
                memory_total=size(_first(values, "vram total memory (b)")),
                temperature_c=number(_first(values, "temperature (sensor edge", "temperature (sensor junction")),
                power_w=number(
                    _first(values, "average graphics package power", "current socket graphics package power")
                ),
            )
        )
    return sorted(readings, key=lambda card: card["index"])


def parse_efsmi(text: str) -> list[dict[str, Any]]:
    """Parse the table of ``efsmi``.

    Each card has two lines; only the first has the card's number. Rows are framed by ``|``, on the T20 by ``*``.
    """
    return [
        reading(
            int(head[0][0]),
            name=" ".join(head[0][1:]) or None,
            bus_id=head[2][0],
            utilization_percent=number(next((word for word in cells[2] if word.endswith("%")), None)),
            memory_total=size(cells[1][0]),
            temperature_c=number(cells[0][0]),
            power_w=number(next((word for word in cells[0] if re.fullmatch(r"\d+(\.\d+)?W", word)), None)),
            state=next((word for word in cells[0] if re.fullmatch(r"Sleep|Active|L(P)?\d+", word)), None),
            serial=_text(cells[2][-1]) if not cells[2][-1].endswith("%") else None,
        )
        for head, cells in rows_of_two_lines(text, lambda head: bool(_BUS_ID.match(head[2][0])))
    ]


def rows_of_two_lines(
    text: str, is_head: Callable[[list[list[str]]], bool]
) -> Iterator[tuple[list[list[str]], list[list[str]]]]:
    """The rows of a table of three columns in which each card has two lines.

    Args:
        text: what the monitor printed; its lines are framed by ``|`` or ``*``.
        is_head: whether a line whose first word is a number is the first of a card.

    Yields:
        Words by column of the first and of the second line.
    """
    head: list[list[str]] | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|*").split("|")]
        if len(cells) != 3 or not all(cells):
            head = None if not line.strip().startswith(("|", "*")) else head
        elif head is not None:
            yield head, cells
            head = None
        elif cells[0][0].isdigit() and is_head(cells):
            head = cells


def _first(values: dict[str, Any], *beginnings: str) -> Any:
    for beginning in beginnings:
        for key, value in values.items():
            if key.startswith(beginning) and value not in (None, "", "N/A"):
                return value
    return None


def number(value: Any) -> float | None:
    """The first number in a cell, or None."""
    match = _NUMBER.search(str(value)) if value is not None else None
    return float(match.group()) if match else None


def size(value: Any, unit: int = 1) -> int | None:
    """Bytes of a size in units of ``unit`` bytes, or with a unit of its own, as ``49120MiB`` and ``32G``."""
    match = re.fullmatch(r"(\d+)(MiB|G|GiB)?", str(value))
    units = {"MiB": MIB, "G": 2**30, "GiB": 2**30, None: unit}
    return None if match is None else int(match[1]) * units[match[2]]


def _text(value: Any) -> str | None:
    text = "" if value is None else str(value).strip()
    return None if text.strip("[]").upper() in ("", "N/A", "UNKNOWN", "NOT SUPPORTED", "NONE") else text
