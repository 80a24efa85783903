"""task=env: what this machine and this installation are, as plain text to paste into a bug report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

from exp import console
from exp.console import size
from exp.environment import SHM, describe_environment, process_limits, variables
from exp.errors import ExpError
from exp.hardware.cards import identity
from exp.hardware.registry import create_backend, installed
from exp.launcher.rank import this_host
from exp.result import blank_result
from exp.runfolder import write_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["describe"]


def describe(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Print the facts and write them to ``env.json``; what cannot be found out is said, and no error."""
    del info
    cards = list(_cards(backend))
    environment = {
        **describe_environment(backend, [card for card in cards if "error" not in card]),
        "backends": _backends(config, backend),
        "backend_packages": backend.packages(),
        "monitor": backend.monitor(),
        "variables": variables(backend),
        "limits": process_limits(),
    }
    lines = "\n".join(f"{name:<14} {text}" if text else name for name, text in _facts(environment, cards))
    console.make_console().print(lines, highlight=False, markup=False, soft_wrap=True)
    write_json(folder.env, environment)
    folder.write_result({**blank_result(config), "status": "completed"})


def _backends(config: ExpConfig, chosen: Backend) -> dict[str, str]:
    """Of every installed backend, how many devices it has, or why it cannot be used."""
    found = {}
    for name in sorted(installed()):
        try:
            backend = chosen if name == config.backend.name else create_backend({"_target_": name, "name": name})
            reason = backend.why_unavailable()
            found[name] = f"not available: {reason}" if reason else f"available, {backend.device_count()} devices"
        except (ExpError, TypeError) as error:  # another's package
            found[name] = f"does not load: {error}"
    if config.backend.name not in found:
        reason = chosen.why_unavailable()
        found[config.backend.name] = reason or f"available, {chosen.device_count()} devices"
    return found


def _cards(backend: Backend) -> Iterator[dict[str, Any]]:
    """What torch says of each device of the chosen backend."""
    if backend.why_unavailable() is not None:
        return
    for index in range(backend.device_count() if backend.exclusive_devices else 1):
        try:
            device = backend.set_device(index)
            described = {**backend.describe(device), "device": str(device), "host": this_host()}
            usage = backend.usage()
        except Exception as error:  # noqa: BLE001 - a broken card is what the report is about
            yield {"device": str(index), "error": f"{type(error).__name__}: {error}"}
            continue
        if backend.exclusive_devices:
            described["identity"] = identity(described)
        if "free" in usage:
            described.update(memory_free=usage["free"], memory=usage["total"])
        yield described


def _facts(found: dict[str, Any], cards: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The report, one fact per line: what, and its value; what belongs to a line before is indented."""
    packages, limits = {**found["packages"], **found["backend_packages"]}, found["limits"]
    files, most = limits["open_files"] or "no limit", limits["open_files_hard"] or "no limit"
    yield "exp", f"{found['exp']} ({found['git_revision'] or 'no git checkout'})"
    yield "python", f"{found['python']}  {found['executable']}"
    yield "platform", f"{found['platform']}, {found['cpu_count']} cores"
    yield "host", found["host"]
    yield "packages", ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    yield "backend", found["backend"]
    yield from ((f"  {name}", state) for name, state in found["backends"].items())
    yield "devices", "" if cards else "none"
    yield from ((f"  {card['device']}", _card(card)) for card in cards)
    yield "monitor", "" if found["monitor"] else "none"
    yield from ((f"  {row['index']}", _reading(row)) for row in found["monitor"])
    yield "limits", ""
    yield f"  {SHM}", f"{size(limits['shm_free'])} free of {size(limits['shm_total'])}"
    yield "  open files", f"{files} (hard: {most})"
    yield "variables", "" if found["variables"] else "none of those that matter"
    yield from ((f"  {name}={value}", "") for name, value in found["variables"].items())


def _card(card: dict[str, Any]) -> str:
    if "error" in card:
        return str(card["error"])
    memory = f"{size(card['memory_free'])} free of {size(card['memory'])}" if "memory_free" in card else ""
    driver = f"driver {card['driver']}" if card.get("driver") else ""
    return ", ".join(part for part in (card["name"], card.get("identity"), memory, driver) if part)


def _reading(row: dict[str, Any]) -> str:
    """One card of the monitor's, in a line."""
    parts = [row["name"] or "card", row["bus_id"]]
    for key, unit in (("utilisation_percent", "%"), ("temperature_c", "C"), ("power_w", "W")):
        parts.append(f"{row[key]:.0f} {unit}" if row[key] is not None else None)
    if row["memory_total"] is not None:
        parts.append(f"{size(row['memory_used'])} used of {size(row['memory_total'])}")
    return ", ".join(part for part in (*parts, row["state"]) if part)
