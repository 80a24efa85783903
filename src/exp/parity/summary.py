"""The table, ``parity.json``, the picture and ``result.json`` of ``task=parity``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Sequence

from exp import console
from exp.csvfile import csv_content
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.parity.compare import EARLY_STEPS, Difference, compare, read_losses, tolerances
from exp.result import blank_result, in_role
from exp.runfolder import read_json, write_atomically, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from exp.config.schema import ExpConfig
    from exp.runfolder import RunFolder

__all__ = ["finish"]

_TITLES = {
    "output": "forward (step 1)",
    "loss": "loss",
    "late_loss": f"loss (after step {EARLY_STEPS})",
    "gradient": "gradients (step 1)",
    "parameter": "parameters (step 1)",
    "later": "gradients (later)",
    "drift": "parameters (at the end)",
}
_TOLD = ("later", "drift")  # for information: nothing is expected of them


def finish(
    config: ExpConfig, folder: RunFolder, tested: RunFolder, reference: RunFolder, where: str
) -> tuple[int, float]:
    """Compare, print and write. The traces are kept where the two do not agree, to be looked into.

    Args:
        config: of the run.
        folder: its folder.
        tested: the sub-folder of the backend under test.
        reference: that of the reference.
        where: the run folder, as shown to the user.

    Returns:
        The exit code, and the largest relative difference of the loss.
    """
    allowed = tolerances(config.precision, config.task.tolerance)
    found = list(compare(tested, reference, clear=allowed["gradient"]))
    largest = {
        kind: max((d for d in found if d.kind == kind), key=lambda d: d.relative)
        for kind in _TITLES
        if any(d.kind == kind for d in found)  # a single step has none later
    }
    first = next((d for d in found if d.relative > allowed[d.kind]), None)
    losses = [d for d in found if d.kind in ("loss", "late_loss")]
    done = read_json(tested.result)
    report = {
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "reference": config.reference,
        "steps": len(losses),
        "world_size": config.nproc * config.launcher.nnodes,
        "precision": config.precision,
        "agrees": first is None,
        "tolerances": {kind: value for kind, value in allowed.items() if kind not in _TOLD},
        "first_departure": None if first is None else asdict(first),
        "largest": {kind: asdict(difference) for kind, difference in largest.items()},
        "loss_differences": [difference.relative for difference in losses],
        "losses": {"tested": list(read_losses(tested).values()), "reference": list(read_losses(reference).values())},
        "random_modules": done["random_modules"],
    }
    write_json(folder.path / "parity.json", report)
    _write_table(folder.path / "differences.csv", found, allowed)
    from exp.draw.files import encoded  # matplotlib's

    figure = losses_figure(losses, allowed, f"{config.backend.name} and {config.reference}")
    for form, content in encoded(figure, config.figures).items():
        write_atomically(folder.plots / f"parity.{form}", content)
    metric = max(difference.relative for difference in losses)
    result = blank_result(config)
    result.update({key: done[key] for key in ("device_type", "devices", "process_group", "fallback", "wall_s")})
    result.update(
        status="completed" if first is None else "failed",
        metrics={"loss_difference": metric},
        metric_name="loss_difference",
        metric=metric,
        selected_by=in_role("loss_difference", "parity", metric),
        reported=in_role("loss_difference", "parity", metric),
        steps=len(losses),
    )
    message = ""
    if first is not None:
        message = _message(config, first, allowed[first.kind], report["random_modules"])
        result["error"] = {"rank": None, "type": RunError.__name__, "message": message}
    folder.write_result(result)
    _print(config, report, largest, allowed, where)
    if first is None:
        for part in (tested, reference):
            (part.path / "trace.npz").unlink()
        return EXIT_OK, metric
    console.error(message)
    return EXIT_FAILED, metric


def _write_table(path: Path, found: Sequence[Difference], allowed: dict[str, float]) -> None:
    """All differences, one per line, in the order in which they can arise."""
    rows: list[list[object]] = [["kind", "step", "name", "absolute", "relative", "allowed"]]
    for d in found:
        rows.append([d.kind, d.step, d.name, d.absolute, d.relative, "" if d.kind in _TOLD else allowed[d.kind]])
    write_atomically(path, csv_content(rows))


def _message(config: ExpConfig, first: Difference, allowed: float, random_modules: Sequence[str]) -> str:
    phases = {
        "output": "the forward pass",
        "loss": "the loss",
        "late_loss": "the loss",
        "gradient": "the backward pass",
    }
    phase = phases.get(first.kind, "the optimizer's step")
    how_far = f"{first.relative:.1e} relative difference, {allowed:.0e} allowed"
    if first.absolute == math.inf:
        how_far = "missing, of another shape or not finite on one of the two"
    advice = "compare this layer on both, or set task.tolerance"
    if random_modules:
        advice = f"turn off the random numbers that {_listed(random_modules)} still draws, which differ between devices"
    return (
        f"{config.backend.name} departs from {config.reference} first in {phase} of step {first.step}, at "
        f"{first.name}: {how_far}; {advice}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")


def _print(config: ExpConfig, report: dict[str, Any], largest: dict[str, Difference], allowed: Any, where: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("largest difference", "relative", "absolute", "allowed"):
        table.add_column(title, justify="left" if title == "largest difference" else "right")
    table.add_column("step", justify="right")
    table.add_column("at")
    for kind, d in largest.items():
        style = "" if d.relative <= allowed[kind] else "bold red"
        limit = "" if kind in _TOLD else f"{allowed[kind]:.0e}"
        row = (_TITLES[kind], f"{d.relative:.1e}", f"{d.absolute:.1e}", limit, str(d.step), d.name)
        table.add_row(*row, style=style)
    terminal = console.make_console()
    terminal.print()
    terminal.print(table)
    if report["random_modules"]:
        terminal.print(
            f"\n{_listed(report['random_modules'])} still drew random numbers, although dropout is off; "
            "two devices draw different ones",
            style="yellow",
            soft_wrap=True,
        )
    verdict = "agree" if report["agrees"] else "DO NOT AGREE"
    terminal.print(
        f"\n{config.backend.name} and {config.reference} {verdict} over {report['steps']} steps; all figures in "
        f"{where}: parity.json, differences.csv, plots/parity.png",
        soft_wrap=True,
    )


def losses_figure(losses: Sequence[Difference], allowed: dict[str, float], title: str) -> Figure:
    """The relative difference of the loss over the steps, with a line at what is allowed.

    Args:
        losses: one per step.
        allowed: the tolerances, by kind.
        title: the two backends.
    """
    from exp.draw.figure import new_figure, title_and_legend

    figure = new_figure(6, 3.2)
    axes = figure.add_subplot()
    smallest = 1e-9  # where the two are equal, a logarithm has nothing to show
    axes.semilogy([d.step for d in losses], [max(d.relative, smallest) for d in losses], marker="o", markersize=3)
    limits = [allowed[d.kind] for d in losses]
    edges = [d.step - 0.5 for d in losses] + [losses[-1].step + 0.5]
    axes.step(edges, [limits[0], *limits], linestyle="--", color="tab:red", label="allowed")
    axes.set(xlabel="step", ylabel="relative difference of the loss")
    axes.set_ylim(bottom=smallest / 2)
    axes.locator_params(axis="x", integer=True)
    title_and_legend(axes, title)
    return figure
