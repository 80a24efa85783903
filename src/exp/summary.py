"""A run from its frozen configuration to its end, as the parent sees it: folder, launch, what is printed and recorded.

It prints a few lines before a run, a table after it, and commands to go on with, which work as they stand.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from omegaconf import OmegaConf

from exp import console
from exp.console import flops, size
from exp.errors import EXIT_OK, EXIT_PREEMPTED, REFUSED
from exp.launcher import describe_failure
from exp.runs.files import read_json
from exp.runs.folder import last_known
from exp.runs.record import blank_result, number_text, selecting_value
from exp.task import create_task, task_class

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["Finished", "begin", "end", "remember", "to_continue", "to_continue_sweep"]


@dataclass(frozen=True)
class Finished:
    """What became of a run, for the command line and for a sweeper."""

    exit_code: int = EXIT_OK
    metric: float | None = None
    """What a sweeper is given, measured on validation; nan where the run failed."""
    interrupted_by: str | None = None
    """Name of the signal that ended it."""
    runs: Sequence[Path] = ()
    """Folders of other runs, of which it has made a table."""


def begin(config: ExpConfig, folder: RunFolder, backend: Backend) -> None:
    """Say what is about to run, and where it goes."""
    processes = config.nproc * config.launcher.nnodes
    terminal = console.make_console()
    if config.backend.simulate:
        terminal.print(
            f"SIMULATED: no {config.backend.name} card is used. Every device of this run is made up in host memory; "
            "its speed says nothing about a real one.",
            style="bold yellow",
            soft_wrap=True,
        )
    if create_task(config).announce(config, folder):
        return
    batch = ""
    if config.global_batch_size is not None:
        batch = f", global batch {config.global_batch_size}"
        if processes > 1 or config.accumulate > 1:
            batch += f" = {config.batch_size} x {processes} processes x {config.accumulate} micro-batches"
    terminal.print(
        f"{config.name}: {config.task.name} on {backend}, {config.precision}{batch}\n"
        f"run folder: {console.shown(folder.path)}",
        highlight=False,
        soft_wrap=True,
    )
    if config.record.trained_in is not None:
        terminal.print(f"as trained in {console.shown(Path(config.record.trained_in))}", soft_wrap=True)
        for line in config.record.differs:
            terminal.print(f"  but {line}", style="yellow", soft_wrap=True)
    devices = backend.device_count() if backend.exclusive_devices else 0
    if devices > config.nproc:
        terminal.print(
            f"{devices - config.nproc} of {devices} {config.backend.name} devices stay idle; nproc={devices} uses all",
            style="dim",
            soft_wrap=True,
        )


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> Finished:
    """Print the outcome, and record one that is no success."""
    if outcome.left or outcome.reported:
        metric = selecting_value(read_json(folder.result)) if outcome.reported else None
        return Finished(outcome.exit_code, metric, outcome.interrupted_by)
    told = create_task(config).tell_end(config, folder, outcome)
    if told is not None:
        return Finished(told)
    result = read_json(folder.result)
    if outcome.exit_code == EXIT_OK and result is not None:
        if outcome.restarts != result["restarts"]:
            result["restarts"] = outcome.restarts
            folder.write_result(result)
        _print_table(config, folder, result)
        return Finished(metric=selecting_value(result))
    if outcome.preempted is not None:
        return _preempted(config, folder, outcome)
    if outcome.exit_code != EXIT_OK:
        first = outcome.failures[0] if outcome.failures else None
        failed = blank_result(config)
        failed.update(restarts=outcome.restarts, **last_known(folder))
        if outcome.interrupted_by is not None:
            failed["error"] = {"rank": None, "type": "Interrupted", "message": f"by {outcome.interrupted_by}"}
        elif first is not None:
            failed["error"] = {"rank": first.rank, "type": first.type, "message": first.message}
        elif outcome.detail is not None:
            failed["error"] = {"rank": None, "type": "RunError", "message": outcome.detail}
        unwritten = _record(folder, failed, outcome)
        text = describe_failure(outcome) + unwritten
        if outcome.interrupted_by is not None:
            command = to_continue(config, folder)
            text += f"\n  to continue from the last checkpoint: {command}" if command else "; nothing has been saved"
        console.error(text)
        return Finished(outcome.exit_code, float("nan"), outcome.interrupted_by)
    return Finished()  # a node other than rank 0's


def _record(folder: RunFolder, result: dict[str, Any], outcome: Outcome) -> str:
    """Write ``result.json``; but a start that has not begun changes nothing of the record of the run before.

    Returns:
        A line to add where it cannot be written.
    """
    if outcome.recorded:
        return ""
    try:
        if folder.pending:
            folder.drop_start()
        else:
            folder.write_result(result)
            if outcome.exit_code not in REFUSED:
                folder.drop_earlier()
    except OSError as error:
        return f"\n  {folder.result} could not be written: {error.strerror}"
    return ""


def _preempted(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> Finished:
    """The record of a run that ended on notice, and how it goes on."""
    assert outcome.preempted is not None
    step: int | None = outcome.preempted["step"]
    record = blank_result(config)
    record.update(status="preempted", steps=step or 0, restarts=outcome.restarts)
    unwritten = _record(folder, record, outcome)
    if step is None:
        text = f"preempted: task={config.task.name} has no state to save; run it again"
    else:
        text = f"preempted after step {step}, which is saved; to continue: {to_continue(config, folder)}"
    console.make_console().print(text + unwritten, soft_wrap=True, markup=False)
    return Finished(EXIT_PREEMPTED, float("nan"))


def _print_table(config: ExpConfig, folder: RunFolder, result: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    terminal = console.make_console()
    published = result.get("published")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(result["measured_on"])
    table.add_column("this run", justify="right")
    if published:
        table.add_column("published", justify="right")
    for name, value in result["metrics"].items():
        first, *more = name.split("_")
        short = len(first) <= 3 or (len(first) == 4 and first.isalpha() and first.islower())
        title = " ".join([first.upper() if short else first, *more])  # MSE and MASE, but mIoU and accuracy
        unit = result.get("metric_units", {}).get(name)
        title += f" ({unit})" if unit else ""
        row = [title, _shown(value)]
        if published:
            row.append(f"{published[name]:.3f}" if name in published else "")
        table.add_row(*row)
    terminal.print()
    terminal.print(table)
    if published:
        terminal.print(f"published: {published['source']}, horizon {config.data.horizon}", style="dim", soft_wrap=True)
        if published["differs"]:
            experiment = config.record.chosen["experiment"]
            unlike = ", ".join(published["differs"])
            terminal.print(f"this run is not as experiment={experiment}: {unlike}", style="yellow", soft_wrap=True)
    for line in (result.get("data") or {}).get("warnings", ()):
        terminal.print(line, style="yellow", highlight=False, soft_wrap=True)
    left = _left_device(result.get("left_device"))
    if left is not None:
        terminal.print(left, style="yellow", highlight=False, soft_wrap=True)
    speed = f", {result['samples_per_second']:,.0f} samples/s" if result.get("samples_per_second") else ""
    if result.get("flops_per_second"):
        speed += f", {flops(result['flops_per_second'])}FLOP/s ({result['flops_share']:.0%} of plain matrix products)"
    steps = f"{result['steps']} steps, " if result["steps"] else ""
    terminal.print(f"{steps}{result['wall_s']:.0f} s{speed}; results in {console.shown(folder.path)}", soft_wrap=True)


def _left_device(left: dict[str, Any] | None) -> str | None:
    """What to say of operators that have left the device at each step; None: nothing."""
    if left is None or not left["calls_per_step"]:
        return None

    def told(figures: dict[str, Any]) -> str:
        moved = figures["bytes_per_step"]
        return f"{figures['calls_per_step']:.3g}x" + ("" if moved is None else f", {size(moved)}")

    worst = ", ".join(f"{name} ({told(figures)})" for name, figures in list(left["operators"].items())[:3])
    return (
        f"left the device at each step, for the CPU and back: {told(left)}, most of it {worst}; "
        "docs/guide/train.md has what to do about it"
    )


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else number_text(value)


_given: list[str] = []
"""Arguments of the command line, where this is its process."""


def remember(arguments: Sequence[str]) -> None:
    """Keep what the user has typed: among it may be options of Hydra's, which are in no configuration."""
    _given[:] = arguments


def to_continue(config: ExpConfig, folder: RunFolder, *changes: str) -> str | None:
    """The command that continues a run.

    Args:
        config: of the run.
        folder: the run folder.
        *changes: overrides that it is to go on with, in place of those given.

    Returns:
        None where nothing is saved, or the task cannot go on.
    """
    if not task_class(config).saves_state or not folder.has_checkpoint():
        return None
    arguments = _given
    if not _given or {"-m", "--multirun"} & set(_given):
        written = folder.in_use(folder.overrides)
        if not written.is_file():
            return None
        content: Any = OmegaConf.to_container(OmegaConf.load(written))
        arguments = [str(override) for override in content]
    new = {"output_dir": console.shown(folder.path), "resume": "auto", **dict(each.split("=", 1) for each in changes)}
    return _command(arguments, (*new, "overwrite"), [f"{key}={value}" for key, value in new.items()])


def to_continue_sweep(folder: Path) -> str | None:
    """The command that does what is left of a sweep; None outside its process."""
    if not _given:
        return None
    new = [f"output_dir={console.shown(folder)}", "sweep.resume=true"]
    return _command(_given, ("sweep.resume", "output_dir"), new)


def _command(arguments: Sequence[str], without: Sequence[str], new: Sequence[str]) -> str:
    kept = [word for word in arguments if word.lstrip("+").partition("=")[0] not in without]
    program = ["exp"] if Path(sys.argv[0]).name == "exp" else ["python", "-m", "exp"]
    return " ".join(map(shlex.quote, [*program, *kept, *new]))
