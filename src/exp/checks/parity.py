"""task=parity in the parent: two runs, one after the other, and what differs between their traces. Imports no torch.

The experiment is launched twice through the launcher of the run: on the backend under test, and on the reference. Each
leaves a trace (:mod:`~exp.checks.training`). Two launches, because the plug-ins of two devices need not live in one
process.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

import numpy as np
from omegaconf import DictConfig, OmegaConf

from exp import console, summary
from exp.csvfile import csv_content
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.result import blank_result, in_role
from exp.runfolder import RunFolder, read_json, read_records, write_atomically, write_json
from exp.summary import Finished

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from exp.config.schema import ExpConfig
    from exp.frozen import FrozenRun
    from exp.launcher.base import Launcher

__all__ = [
    "EARLY_STEPS",
    "Difference",
    "apart",
    "compare",
    "compare_backends",
    "largest",
    "read_losses",
    "tolerances",
]

EARLY_STEPS = 20
"""Steps in which losses are held to the tolerance; later ones to a thousand times as much. Training magnifies rounding
errors: on a card that computes what the CPU does, the default experiment was 1e-5 away after 33 to more than 100 steps,
and up to 2e-4 after 100."""

_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3, "tf32": 2e-3, "efp": 2e-2}
_LARGEST = 0.5  # beyond it, nothing would ever depart
_FLOOR = 1e-3


class _Kind(NamedTuple):
    title: str
    phase: str
    factor: float | None  # of the loss's tolerance; None: reported only, nothing is expected of it


# Differences grow on the way from a sum over many values (the loss) to single ones, and through the optimizer.
# Gradients of later steps are not judged: where a loss has a kink, as an absolute value has, two models that differ by
# rounding errors may get gradients of opposite sign.
_KINDS = {
    "output": _Kind("forward (step 1)", "the forward pass", 10.0),
    "loss": _Kind("loss", "the loss", 1.0),
    "late_loss": _Kind(f"loss (after step {EARLY_STEPS})", "the loss", 1000.0),
    "gradient": _Kind("gradients (step 1)", "the backward pass", 100.0),
    "parameter": _Kind("parameters (step 1)", "the optimizer's step", 100.0),
    "later": _Kind("gradients (later)", "", None),
    "drift": _Kind("parameters (at the end)", "", None),
}


def tolerances(precision: str, loss: float | None) -> dict[str, float]:
    """Largest relative difference that still agrees, by kind; infinite for those that are reported only.

    Args:
        precision: one of :data:`exp.hardware.backend.PRECISIONS`.
        loss: for the loss; None: the default of the precision. The others follow from it.
    """
    base = _LOSS_TOLERANCE[precision] if loss is None else loss
    return {
        name: math.inf if kind.factor is None else min(base * kind.factor, _LARGEST) for name, kind in _KINDS.items()
    }


@dataclass(frozen=True)
class Difference:
    """How far two tensors (or losses) are apart."""

    kind: str
    """``output``, ``loss``, ``late_loss`` (after :data:`EARLY_STEPS`), ``gradient`` (first step), ``later`` (gradients
    of other steps), ``parameter`` (first step, values with a clear gradient only: optimizers that divide a gradient by
    its size move a value whose gradient is a rounding error by a whole step, in either direction) or ``drift``
    (parameters after the last step)."""
    step: int
    """Optimizer step, from 1."""
    name: str
    absolute: float
    """Largest absolute difference; infinite where there is nothing to compare, or one of the two is not finite."""
    relative: float
    """The same, relative to the tensor's largest absolute value in the reference, or to a thousandth of the largest of
    its kind in this step where that is larger: a tensor that is zero but for rounding has no scale of its own."""


def compare(tested: RunFolder, reference: RunFolder, clear: float) -> Iterator[Difference]:
    """All differences in the order in which they can arise: forward, loss, backward, optimizer; step by step.

    Args:
        tested: run folder with ``trace.npz`` and ``metrics.jsonl``.
        reference: the same of the reference.
        clear: how large a gradient must be, relative to the tensor's largest, to tell its direction.
    """
    # Read as they are asked for: of a large model, not all would fit into memory.
    with _open(tested) as ours, _open(reference) as theirs:
        prefix = "output/000001/"
        scale, known = _scale(theirs, prefix), set(_names(ours, prefix))
        for name in _names(theirs, prefix):
            # A fused kernel of one of the two may do without a module; what comes after it shows whether it is right.
            if name in known:
                yield _difference("output", 1, name, ours[prefix + name], theirs[prefix + name], scale)
        our_losses, their_losses = read_losses(tested), read_losses(reference)
        steps = sorted(set(our_losses) & set(their_losses))
        order = {str(name): place for place, name in enumerate(theirs["order"])}
        for step in steps:
            gap, expected = abs(our_losses[step] - their_losses[step]), abs(their_losses[step])
            yield Difference(
                "loss" if step <= EARLY_STEPS else "late_loss", step, "loss", gap, gap / max(expected, 1e-12)
            )
            yield from _backward(step, ours, theirs, order)
            if step == 1:
                yield from _first_update(ours, theirs, clear)
        prefix = f"parameter/{steps[-1]:06d}/"
        for name in _names(theirs, prefix):
            yield _difference("drift", steps[-1], name, ours[prefix + name], theirs[prefix + name], 0.0)


def _open(folder: RunFolder) -> Any:
    return np.load(folder.path / "trace.npz", allow_pickle=False)


def _backward(step: int, ours: Any, theirs: Any, order: dict[str, int]) -> Iterator[Difference]:
    prefix = f"gradient/{step:06d}/"
    scale = _scale(theirs, prefix)

    def place(parameter: str) -> tuple[int, str]:
        """When the module of a parameter ran: where it was never called itself, the nearest that holds it."""
        module = parameter.rpartition(".")[0]
        while module and module not in order:
            module = module.rpartition(".")[0]
        return order.get(module, 0), parameter

    for name in sorted({*_names(ours, prefix), *_names(theirs, prefix)}, key=place, reverse=True):
        mine, expected = (trace[prefix + name] if prefix + name in trace.files else None for trace in (ours, theirs))
        yield _difference("gradient" if step == 1 else "later", step, name, mine, expected, scale)


def _first_update(ours: Any, theirs: Any, clear: float) -> Iterator[Difference]:
    prefix = "gradient/000001/"
    scale = _scale(theirs, prefix)
    for name in _names(theirs, prefix):
        gradient = np.abs(theirs[prefix + name])
        told = gradient > max(clear * gradient.max(initial=0.0), _FLOOR * _FLOOR * scale)
        mine, expected = (trace[f"parameter/000001/{name}"] for trace in (ours, theirs))
        if mine.shape == expected.shape:
            yield _difference("parameter", 1, name, mine[told], expected[told], 0.0)


def _names(trace: Any, prefix: str) -> list[str]:
    return [key[len(prefix) :] for key in trace.files if key.startswith(prefix)]


def read_losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, by step."""
    records = read_records(folder.metrics.read_bytes().splitlines())
    return {record["step"]: record["loss"] for record in records if record["split"] == "train"}


def _scale(trace: Any, prefix: str) -> float:
    return max((largest(trace[prefix + name]) for name in _names(trace, prefix)), default=0.0)


def largest(values: Any) -> float:
    """Largest absolute value of an array; a mask may hold infinite ones, which are no scale."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def apart(ours: Any, theirs: Any, floor: float) -> tuple[float, float]:
    """Largest absolute difference of two arrays of one shape, and the same relative to the largest value of ``theirs``.

    Both are infinite where only one of the two is finite.

    Args:
        ours: under test.
        theirs: the reference.
        floor: least scale of the relative difference.
    """
    differ = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)))
    absolute = float(np.abs(ours[differ] - theirs[differ]).max(initial=0.0))
    if not math.isfinite(absolute):
        return math.inf, math.inf
    return absolute, absolute / max(largest(theirs), floor, 1e-30)


def _difference(kind: str, step: int, name: str, ours: Any, theirs: Any, scale: float) -> Difference:
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return Difference(kind, step, name, math.inf, math.inf)
    return Difference(kind, step, name, *apart(ours, theirs, _FLOOR * scale))


def compare_backends(run: FrozenRun, reference: ExpConfig, launcher: Launcher) -> Finished:
    """Both runs, in ``tested/`` and ``reference/`` (only after the first succeeded), and their comparison."""
    config, folder, terminal = run.config, run.folder, console.make_console()
    changed: list[str] = []
    for each in (config, reference):
        changed = _without_dropout(each.model, "model")
        each.max_steps, each.log_every = each.steps, 1
        each.max_epochs = max(each.max_epochs or 0, each.steps)
    reference.compile = False  # what compiling changes is a part of what is compared
    if changed:
        terminal.print(f"dropout is off in both runs: {', '.join(changed)}", soft_wrap=True)
    folders = RunFolder(folder.path / "tested"), RunFolder(folder.path / "reference")
    for part, settings in zip(folders, (config, reference)):
        part.create()
        settings.output_dir = str(part.path)
        write_atomically(part.config, OmegaConf.to_yaml(settings, resolve=True).encode())
        terminal.print(f"{part.path.name}: {settings.backend.name}")
        outcome = launcher.launch(part, settings.nproc, saves=False)
        if outcome.exit_code != EXIT_OK:
            break
    run.check_folder()
    if outcome.exit_code != EXIT_OK:
        return summary.end(config, folder, outcome)
    return _finish(config, folder, *folders)


def _without_dropout(node: DictConfig, prefix: str) -> list[str]:
    """Set the probabilities of dropout (``dropout``, ``attn_drop``, ``drop_path_rate``, ...) in ``node`` to 0.

    Returns:
        The keys that were changed, with what they were.
    """
    changed = []
    for key, value in node.items():
        name = f"{prefix}.{key!s}"
        if isinstance(value, DictConfig):
            changed += _without_dropout(value, name)
        elif isinstance(value, float) and value > 0 and "drop" in str(key):
            node[key] = 0.0
            changed.append(f"{name} was {value}")
    return changed


def _finish(config: ExpConfig, folder: RunFolder, tested: RunFolder, reference: RunFolder) -> Finished:
    """Compare, print and write. The traces are kept where the two do not agree, to be looked into."""
    allowed = tolerances(config.precision, config.task.tolerance)
    found = list(compare(tested, reference, clear=allowed["gradient"]))
    known = {d.kind for d in found}  # a single step has none later
    largest = {
        kind: max((d for d in found if d.kind == kind), key=lambda d: d.relative) for kind in _KINDS if kind in known
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
        "tolerances": {kind: value for kind, value in allowed.items() if math.isfinite(value)},
        "first_departure": None if first is None else asdict(first),
        "largest": {kind: asdict(difference) for kind, difference in largest.items()},
        "loss_differences": [difference.relative for difference in losses],
        "losses": {"tested": list(read_losses(tested).values()), "reference": list(read_losses(reference).values())},
        "random_modules": done["random_modules"],
    }
    write_json(folder.path / "parity.json", report)
    rows: list[Sequence[object]] = [
        (d.kind, d.step, d.name, d.absolute, d.relative, allowed[d.kind] if math.isfinite(allowed[d.kind]) else "")
        for d in found
    ]
    titles = ("kind", "step", "name", "absolute", "relative", "allowed")
    write_atomically(folder.path / "differences.csv", csv_content([titles, *rows]))
    from exp.draw.files import encoded  # matplotlib's

    figure = _losses_figure(losses, allowed, f"{config.backend.name} and {config.reference}")
    for form, content in encoded(figure, config.figures).items():
        write_atomically(folder.plots / f"parity.{form}", content)
    metric = max(difference.relative for difference in losses)
    message = "" if first is None else _message(config, first, allowed[first.kind], report["random_modules"])
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
    if first is not None:
        result["error"] = {"rank": None, "type": RunError.__name__, "message": message}
    folder.write_result(result)
    _print(report, largest, allowed, console.shown(folder.path))
    if first is not None:
        console.error(message)
        return Finished(EXIT_FAILED, metric)
    for part in (tested, reference):
        (part.path / "trace.npz").unlink()
    return Finished(EXIT_OK, metric)


def _message(config: ExpConfig, first: Difference, allowed: float, random_modules: Sequence[str]) -> str:
    how_far = f"{first.relative:.1e} relative difference, {allowed:.0e} allowed"
    if first.absolute == math.inf:
        how_far = "missing, of another shape or not finite on one of the two"
    advice = "compare this layer on both, or set task.tolerance"
    if random_modules:
        advice = f"turn off the random numbers that {_listed(random_modules)} still draws, which differ between devices"
    return (
        f"{config.backend.name} departs from {config.reference} first in {_KINDS[first.kind].phase} of step "
        f"{first.step}, at {first.name}: {how_far}; {advice}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")


def _print(report: dict[str, Any], largest: dict[str, Difference], allowed: dict[str, float], where: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("largest difference", "relative", "absolute", "allowed", "step", "at"):
        table.add_column(title, justify="left" if title in ("largest difference", "at") else "right")
    for kind, d in largest.items():
        limit = f"{allowed[kind]:.0e}" if math.isfinite(allowed[kind]) else ""
        row = (_KINDS[kind].title, f"{d.relative:.1e}", f"{d.absolute:.1e}", limit, str(d.step), d.name)
        table.add_row(*row, style="" if d.relative <= allowed[kind] else "bold red")
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
        f"\n{report['backend']} and {report['reference']} {verdict} over {report['steps']} steps; all figures in "
        f"{where}: parity.json, differences.csv, plots/parity.png",
        soft_wrap=True,
    )


def _losses_figure(losses: Sequence[Difference], allowed: dict[str, float], title: str) -> Figure:
    """The relative difference of the loss over the steps, with a line at what is allowed."""
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
