"""task=env: what this machine and this installation are, as plain text to paste into a bug report."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any, Iterator

from exp import console
from exp.backends_registry import create_backend, installed
from exp.cards import identity
from exp.console import size
from exp.environment import SHM, describe_environment, process_limits, variables
from exp.errors import ExpError
from exp.launcher.rank import this_host
from exp.result import blank_result
from exp.runfolder import write_json

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["describe", "wrapped"]

_COLUMN = 15  # where values begin


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
    terminal = console.make_console()
    lines = _lines(environment, cards)
    if terminal.is_terminal:  # elsewhere one fact stays one line: it is searched, and pasted
        lines = (part for line in lines for part in wrapped(line, terminal.width))
    terminal.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    write_json(folder.env, environment)
    folder.write_result({**blank_result(config), "status": "completed"})


def wrapped(line: str, width: int) -> list[str]:
    """A line of the report in ``width`` columns: what does not fit goes below its value."""
    return textwrap.wrap(line, max(width, 40), subsequent_indent=" " * _COLUMN, break_on_hyphens=False) or [line]


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
            free = backend.free_memory()
        except Exception as error:  # noqa: BLE001 - a broken card is what the report is about
            yield {"device": str(index), "error": f"{type(error).__name__}: {error}"}
            continue
        if backend.exclusive_devices:
            described["identity"] = identity(described)
        if free is not None:
            described.update(memory_free=free[0], memory=free[1])
        yield described


def _lines(environment: dict[str, Any], cards: list[dict[str, Any]]) -> Iterator[str]:
    """The report, one fact per line."""
    packages = {**environment["packages"], **environment["backend_packages"]}
    limits = environment["limits"]
    yield f"exp            {environment['exp']} ({environment['git_revision'] or 'no git checkout'})"
    yield f"python         {environment['python']}  {environment['executable']}"
    yield f"platform       {environment['platform']}, {environment['cpu_count']} cores"
    yield f"host           {environment['host']}"
    yield "packages       " + ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    yield f"backend        {environment['backend']}"
    for name, state in environment["backends"].items():
        yield f"  {name:<12} {state}"
    yield "devices" if cards else "devices        none"
    for card in cards:
        if "error" in card:
            yield f"  {card['device']:<12} {card['error']}"
            continue
        memory = f", {size(card['memory_free'])} free of {size(card['memory'])}" if "memory_free" in card else ""
        which = f", {card['identity']}" if "identity" in card else ""
        driver = f", driver {card['driver']}" if card.get("driver") else ""
        yield f"  {card['device']:<12} {card['name']}{which}{memory}{driver}"
    yield "monitor" if environment["monitor"] else "monitor        none"
    for row in environment["monitor"]:
        yield f"  {row['index']:<12} {_reading(row)}"
    yield "limits"
    yield f"  {SHM:<12} {size(limits['shm_free'])} free of {size(limits['shm_total'])}"
    yield f"  {'open files':<12} {limits['open_files'] or 'no limit'} (hard: {limits['open_files_hard'] or 'no limit'})"
    yield "variables" if environment["variables"] else "variables      none of those that matter"
    for name, value in environment["variables"].items():
        yield f"  {name}={value}"


def _reading(row: dict[str, Any]) -> str:
    """One card of the monitor's, in a line."""
    parts = [row["name"] or "card", row["bus_id"]]
    for key, form in (("utilisation_percent", "{:.0f} %"), ("temperature_c", "{:.0f} C"), ("power_w", "{:.0f} W")):
        parts.append(form.format(row[key]) if row[key] is not None else None)
    if row["memory_total"] is not None:
        parts.append(f"{size(row['memory_used'])} used of {size(row['memory_total'])}")
    return ", ".join(part for part in (*parts, row["state"]) if part)
