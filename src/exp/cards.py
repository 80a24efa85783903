"""Which physical card a rank has: two descriptions of one card must compare equal. Imports no torch."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

__all__ = ["identity", "reading_of", "shared"]


def identity(device: Mapping[str, Any]) -> str:
    """What tells a card from the others of its host.

    Args:
        device: from :meth:`exp.backend.Backend.describe`. The first of ``uuid``, ``bus_id`` and ``card`` (its number on
            the host) that is known; torch's index only where nothing else is, because visible-device variables, which
            may differ from one process to the next, give one card several indices.
    """
    if device.get("uuid"):
        return _uuid(device["uuid"])
    if device.get("bus_id"):
        return _bus(device["bus_id"])
    number = device.get("card")
    return f"card {device.get('index') if number is None else number}"


def shared(devices: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Pairs of ranks that have one card.

    Args:
        devices: by rank, as :func:`identity` takes them, with ``host``.
    """
    first: dict[tuple[str, str], int] = {}
    pairs = []
    for rank, device in sorted(devices.items()):
        owner = first.setdefault((device["host"], identity(device)), rank)
        if owner != rank:
            pairs.append((owner, rank))
    return pairs


def reading_of(device: Mapping[str, Any], readings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The monitor's reading of one card, or None where it has none.

    Args:
        device: from :meth:`exp.backend.Backend.describe`.
        readings: from :meth:`exp.backend.Backend.monitor`.
    """
    for key, normal in (("uuid", _uuid), ("bus_id", _bus)):
        for row in readings:
            if device.get(key) and row.get(key) and normal(device[key]) == normal(row[key]):
                return row
    number = device.get("card")
    number = device.get("index") if number is None else number
    return next((row for row in readings if row["index"] == number), None)


def _uuid(value: Any) -> str:
    return str(value).lower().replace("gpu-", "", 1)


def _bus(value: Any) -> str:
    """``00000000:3B:00.0`` and ``0000:3b:00.0`` are one bus."""
    parts = str(value).lower().split(":")
    return ":".join([parts[-3][-4:].zfill(4) if len(parts) > 2 else "0000", *parts[-2:]])
