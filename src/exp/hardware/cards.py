"""Identifies the physical card of a rank, and limits a job to its cards. Imports no torch."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from exp.errors import RunError

if TYPE_CHECKING:
    from exp.hardware.backend import Backend


def visible_devices_env(backend: Backend, devices: Sequence[int]) -> dict[str, str]:
    """Environment variables that make only some devices visible to a job.

    Args:
        backend: has the visible-devices variables.
        devices: indices among the devices that are visible to this process; some vendors need them in ascending order,
            so the variable lists them so.
    """
    for variable in backend.visible_variables:
        if variable in os.environ:
            visible = os.environ[variable].split(",")
            return {variable: ",".join(visible[device].strip() for device in sorted(devices))}
    return {variable: ",".join(map(str, sorted(devices))) for variable in backend.visible_variables[:1]}


def identity(device: Mapping[str, Any]) -> str:
    """Name of a card that is unique on its host, for messages.

    It is the first that the description has of ``uuid``, ``serial``, ``bus_id`` and ``card`` (its number on the host);
    otherwise torch's index.

    Args:
        device: from :meth:`exp.hardware.backend.Backend.device_info`.
    """
    identifiers = _identifiers(device)
    address = next((identifiers[key] for key in _ADDRESSES if key in identifiers), None)
    return address or f"card {identifiers.get('card', device.get('index'))}"


def shared_cards(devices: Mapping[int, Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Find ranks that share a card.

    Two descriptions are of the same card if all identities (UUID, serial, bus id, number) that both have are equal.
    Partitions of one card share its bus id or its UUID, but not both. If the two have no identity in common, they are
    of the same card only if torch's index and the list of visible cards are equal.

    Args:
        devices: by rank, as for :func:`identity`, with ``host`` and, if known, ``device`` and ``shared_device``:
            whether any number of ranks may share it.

    Returns:
        Pairs of ranks: the first rank with the card, and another one.
    """
    owners: dict[str, list[int]] = {}
    pairs = []
    for rank, device in sorted(devices.items()):
        if device.get("shared_device"):  # in a job with other cards
            continue
        others = owners.setdefault(device["host"], [])
        owner = next((other for other in others if _is_same_card(devices[other], device)), None)
        if owner is None:
            others.append(rank)
        else:
            pairs.append((owner, rank))
    return pairs


def monitor_row(device: Mapping[str, Any], readings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The monitor's reading of one card, or None if there is none.

    Args:
        device: from :meth:`exp.hardware.backend.Backend.device_info`.
        readings: from :meth:`exp.hardware.backend.Backend.monitor`.
    """
    identifiers = _identifiers(device)
    for key in _ADDRESSES:
        for row in readings:
            if key in identifiers and _identifiers(row).get(key) == identifiers[key]:
                return row
    number = identifiers.get("card", device.get("index"))
    return next((row for row in readings if row["index"] == number), None)


def _is_same_card(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    one, other = _identifiers(first), _identifiers(second)
    common = one.keys() & other.keys()
    if common:
        return all(one[key] == other[key] for key in common)
    if one or other:
        return False
    # With visible-devices variables, which may differ between processes, one card can have several indices.
    return all(first.get(key) == second.get(key) for key in ("index", "device", "visible"))


def _identifiers(device: Mapping[str, Any]) -> dict[str, Any]:
    """The identifiers in a description, in normalized spelling."""
    identifiers: dict[str, Any] = {}
    for key, normalize in _ADDRESSES.items():
        value = normalize(str(device[key])) if device.get(key) else ""
        if value.strip("0:.-"):  # zeros stand for an unknown address
            identifiers[key] = value
    if device.get("card") is not None:
        identifiers["card"] = device["card"]
    return identifiers


def _uuid(value: str) -> str:
    """A UUID in lower case, without the prefix that only some programs write."""
    return re.sub("^(gpu-|0x)", "", value.lower())


def _bus(value: str) -> str:
    """A PCI bus id as ``0000:3b:00.0``: four digits of the domain, lower case."""
    parts = value.lower().split(":")
    return ":".join([parts[-3][-4:].zfill(4) if len(parts) > 2 else "0000", *parts[-2:]])


_ADDRESSES: dict[str, Callable[[str], str]] = {"uuid": _uuid, "serial": str, "bus_id": _bus}


def check_distinct(devices: Sequence[Mapping[str, Any]]) -> None:
    """Check that no two ranks share a card.

    Args:
        devices: by rank, as for :func:`shared_cards`.

    Raises:
        RunError: two ranks share a card.
    """
    for first, second in shared_cards(dict(enumerate(devices))):
        raise RunError(
            f"ranks {first} and {second} share one card ({devices[second]['device']} on {devices[second]['host']})",
            "give each rank its own: lower nproc, or correct the visible-devices variable",
        )
