"""Readings of the vendors' monitors: utilization, memory, temperature and power of their cards.

Each parser takes the output of one program and returns one dict per card, with the keys of :func:`reading`. Parsers
skip what they do not recognize and never raise: a monitor of another version must not break a run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any, Callable, Sequence

__all__ = ["efsmi", "nvidia_smi", "parse_efsmi", "parse_nvidia_smi", "parse_rocm_smi", "reading", "rocm_smi"]

_TIMEOUT_S = 10
_EFSMI_PLACES = ("/usr/bin", "/usr/sbin", "/usr/local/efsmi", "/opt/tops/bin")  # PATH may lack some of these
_MIB = 2**20
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
            ``temperature_c``, ``power_w``, ``state`` (as the monitor prints it, such as ``Sleep``), ``serial``.
    """
    keys = ("name", "uuid", "bus_id", "utilization_percent", "memory_used", "memory_total", "temperature_c", "power_w")
    return {"index": index, **{key: values.get(key) for key in (*keys, "state", "serial")}}


def efsmi() -> list[dict[str, Any]]:
    """Readings of Enflame's cards."""
    return _ask(parse_efsmi, ["efsmi"], _EFSMI_PLACES)


def rocm_smi() -> list[dict[str, Any]]:
    """Readings of AMD's cards."""
    options = ["--showuse", "--showmeminfo", "vram", "--showtemp", "--showpower", "--showbus", "--showproductname"]
    return _ask(parse_rocm_smi, ["rocm-smi", *options, "--showuniqueid", "--json"])


def nvidia_smi() -> list[dict[str, Any]]:
    """Readings of NVIDIA's cards."""
    fields = ",".join(field for field, _ in _NVIDIA_FIELDS)
    return _ask(parse_nvidia_smi, ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])


def _ask(
    parse: Callable[[str], list[dict[str, Any]]], command: list[str], folders: Sequence[str] = ()
) -> list[dict[str, Any]]:
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
            values[key] = _number(cells[key])
        for key in ("memory_used", "memory_total"):
            values[key] = _bytes(cells[key], _MIB)
        cards.append(reading(int(cells["index"]), **values))
    return cards


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
                utilization_percent=_number(_first(values, "gpu use (%)")),
                memory_used=_bytes(_first(values, "vram total used memory (b)")),
                memory_total=_bytes(_first(values, "vram total memory (b)")),
                temperature_c=_number(_first(values, "temperature (sensor edge", "temperature (sensor junction")),
                power_w=_number(
                    _first(values, "average graphics package power", "current socket graphics package power")
                ),
            )
        )
    return sorted(readings, key=lambda card: card["index"])


def parse_efsmi(text: str) -> list[dict[str, Any]]:
    """Parse the table of ``efsmi``.

    Each card has two lines; only the first has the card's number. Rows are framed by ``|``, on the T20 by ``*``.
    """
    cards: list[dict[str, Any]] = []
    head: list[list[str]] | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|*").split("|")]
        if len(cells) != 3 or not all(cells):
            head = None if not line.strip().startswith(("|", "*")) else head
            continue
        if head is None:
            if cells[0][0].isdigit() and re.match(r"[0-9a-fA-F]+:[0-9a-fA-F]+", cells[2][0]):
                head = cells
            continue
        card = reading(
            int(head[0][0]),
            name=" ".join(head[0][1:]) or None,
            bus_id=head[2][0],
            utilization_percent=_number(next((word for word in cells[2] if word.endswith("%")), None)),
            memory_total=_bytes(cells[1][0]),
            temperature_c=_number(cells[0][0]),
            power_w=_number(next((word for word in cells[0] if re.fullmatch(r"\d+(\.\d+)?W", word)), None)),
            state=next((word for word in cells[0] if re.fullmatch(r"Sleep|Active|L(P)?\d+", word)), None),
            serial=_text(cells[2][-1]) if not cells[2][-1].endswith("%") else None,
        )
        cards.append(card)
        head = None
    return cards


def _first(values: dict[str, Any], *beginnings: str) -> Any:
    for beginning in beginnings:
        for key, value in values.items():
            if key.startswith(beginning) and value not in (None, "", "N/A"):
                return value
    return None


def _number(value: Any) -> float | None:
    match = _NUMBER.search(str(value)) if value is not None else None
    return float(match.group()) if match else None


def _bytes(value: Any, unit: int = 1) -> int | None:
    """Bytes of a size in units of ``unit`` bytes, or with a unit of its own, as ``49120MiB`` and ``32G``."""
    match = re.fullmatch(r"(\d+)(MiB|G|GiB)?", str(value))
    units = {"MiB": _MIB, "G": 2**30, "GiB": 2**30, None: unit}
    return None if match is None else int(match[1]) * units[match[2]]


def _text(value: Any) -> str | None:
    text = "" if value is None else str(value).strip()
    return None if text.strip("[]").upper() in ("", "N/A", "UNKNOWN", "NOT SUPPORTED", "NONE") else text
