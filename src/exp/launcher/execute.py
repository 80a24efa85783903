"""The parent's work with a frozen run: write the folder, launch, print and record the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp import console
from exp.errors import EXIT_OK, EXIT_PREEMPTED, REFUSAL_CODES, ExpError
from exp.hub import download
from exp.launcher.outcome import Outcome, describe_failure
from exp.runs.files import read_json
from exp.runs.folder import last_progress
from exp.runs.record import empty_result
from exp.task import resume_command

if TYPE_CHECKING:
    from exp.launcher.base import FrozenRun

__all__ = ["execute", "print_header", "report_outcome"]


def execute(run: FrozenRun, tracebacks: bool = False) -> Outcome:
    """Write the run folder, launch, wait, print and record the end; a run that is refused leaves no folder.

    Args:
        run: the frozen run.
        tracebacks: if workers refuse the run, print their logs, which have the tracebacks.

    Returns:
        The outcome, with the exit code of the command.

    Raises:
        ExpError: the run cannot be started.
    """
    config, folder, started = run.config, run.folder, False
    try:
        launcher = run.launcher
        script = launcher.preflight([run], folder.path / "slurm")
        if script is not None:
            console.make_console().out(script, highlight=False)
            return Outcome()
        download(config)
        if launcher.owns_run_folder:
            run.write(launcher.job_id())
            print_header(run)
        started = True
        try:
            outcome = launcher.launch(run)
        finally:
            run.check_folder()  # if it is lost, SIGTERM may end the run after the launcher
        if launcher.owns_run_folder:
            outcome.exit_code = report_outcome(run, outcome)
        if _leaves(run, outcome) and run.lock is not None:
            run.lock.release(keep_file=True)  # the nodes that stay hold it
        if outcome.exit_code in REFUSAL_CODES:
            for file in sorted(folder.logs.glob("rank*.error.json")) if tracebacks else ():
                log = file.with_name(file.name.replace(".error.json", ".log"))
                print(log.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)  # noqa: T201
            run.rollback()
        return outcome
    except (ExpError, KeyboardInterrupt) as error:
        if error.exit_code in REFUSAL_CODES if isinstance(error, ExpError) else not started:
            run.rollback()
        raise
    finally:
        run.release()


def print_header(run: FrozenRun) -> None:
    """Print what will run, and the run folder."""
    config = run.config
    processes = config.nproc * config.launcher.nnodes
    if config.backend.simulate:
        _print_line(
            f"SIMULATED: no {config.backend.name} card is used. Every device of this run is made up in host memory;"
            " its speed says nothing about a real one.",
            "bold yellow",
        )
    if run.task.print_header(config, run.folder) or run.task.is_diagnostic:
        return
    batch = ""
    if config.global_batch_size is not None:
        batch = f", global batch {config.global_batch_size}"
        if config.launcher.share is not None or config.launcher.shares:
            batch += f" over {processes} processes by their shares, x {config.accumulate} micro-batches"
        elif config.launcher.min_nnodes is not None:
            nodes = f"{config.launcher.min_nnodes} to {config.launcher.nnodes} nodes of {config.nproc}"
            batch += f" over {nodes} processes, x {config.accumulate} micro-batches"
        elif config.launcher.mixed:
            batch += f" over {config.launcher.nnodes} nodes, x {config.accumulate} micro-batches"
        elif processes > 1 or config.accumulate > 1:
            batch += f" = {config.batch_size} x {processes} processes x {config.accumulate} micro-batches"
    # The name of an experiment tells its data and model, unless the user has chosen others.
    chosen = (override for override in run.overrides if override.startswith(("data=", "model=")))
    title = " ".join([config.name, *chosen])
    _print_line(f"{title}: {config.task.name} on {run.backend}, {config.precision}{batch}")
    _print_line(f"run folder: {console.display_path(run.folder.path)}")
    if not (run.backend.capabilities.shared_device or run.classes.launcher.is_external or run.is_remote):
        count = run.backend.device_count()
        if count > config.nproc:
            _print_line(f"{count - config.nproc} of {count} devices stay idle; nproc={count} uses all", "yellow")
    if config.launcher.min_nnodes is not None and not config.dropout_by_sample:
        text = (
            "dropout draws other numbers when nodes come or go; dropout_by_sample=true makes losses independent of it"
        )
        _print_line(text, "yellow")
    if config.record.trained_in is not None:
        _print_line(f"as trained in {console.display_path(Path(config.record.trained_in))}")
        for line in config.record.differs:
            _print_line(f"  but {line}", "yellow")


def report_outcome(run: FrozenRun, outcome: Outcome) -> int:
    """Print how the run ended, record an end without success in ``result.json``, and return the exit code."""
    config, folder = run.config, run.folder
    if outcome.still_running or outcome.printed:
        return outcome.exit_code
    code = None if outcome.interrupted_by is not None else run.task.report_outcome(config, folder, outcome)
    if code is not None or (run.task.is_diagnostic and outcome.exit_code == EXIT_OK):
        return code or EXIT_OK
    if outcome.exit_code == EXIT_OK:
        result = read_json(folder.result)
        if result is not None:  # None on a node without rank 0
            if outcome.restarts > result["restarts"]:
                result["restarts"] = outcome.restarts
                folder.write_result(result)
            _print_table(run, result)
        return EXIT_OK
    record = {**empty_result(config), "restarts": outcome.restarts}
    if outcome.preempted is not None:
        step: int | None = outcome.preempted["step"]
        if _leaves(run, outcome):
            saved = "" if step is None else f" after step {step}, which is saved"
            _print_line(f"this node has left{saved}; the others go on, and the same command joins them again")
            return EXIT_PREEMPTED
        record.update(status="preempted", steps=step or 0)
        text = f"preempted: task={config.task.name} has no state to save; run it again"
        if step is not None:
            text = f"preempted after step {step}, which is saved; to continue: {resume_command(config, folder)}"
        _print_line(text + _record_end(run, record, outcome))
        return EXIT_PREEMPTED
    record.update(last_progress(folder))
    text = describe_failure(outcome, folder)
    rank, kind, message = None, "RunError", outcome.detail
    if outcome.interrupted_by is not None:
        kind, message = "Interrupted", f"by {outcome.interrupted_by}"
        command = resume_command(config, folder)
        text += f"\n  to continue from the last checkpoint: {command}" if command else "; nothing has been saved"
    elif outcome.failures:
        rank, kind, message = outcome.failures[0].rank, outcome.failures[0].type, str(outcome.failures[0].error)
    if message is not None:
        record["error"] = {"rank": rank, "type": kind, "message": message}
    outcome.reported = text + _record_end(run, record, outcome)
    console.error(outcome.reported)
    return outcome.exit_code


def _record_end(run: FrozenRun, result: dict[str, Any], outcome: Outcome) -> str:
    """Write ``result.json``; if the run has not started, keep the records of the earlier run in the folder instead.

    Returns:
        A line for the user if the file cannot be written; otherwise empty.
    """
    try:
        if not (outcome.result_written or _leaves(run, outcome)) and (
            run.config.launcher.nnodes == 1 or run.folder.claim_end()
        ):
            run.folder.discard_pending() if run.folder.has_pending else run.folder.write_result(result)
    except OSError as error:
        return f"\n  {run.folder.result} could not be written: {error.strerror}"
    return ""


def _leaves(run: FrozenRun, outcome: Outcome) -> bool:
    """Whether it is only this node that ends, in a job whose nodes come and go."""
    ended = outcome.preempted is not None or outcome.interrupted_by is not None
    return ended and run.config.launcher.min_nnodes is not None


def _print_line(text: str, style: str | None = None) -> None:
    console.make_console().print(text, style=style, highlight=False, soft_wrap=True, markup=False)


def _print_table(run: FrozenRun, result: dict[str, Any]) -> None:
    from exp.report.formats import Table, as_rich

    reference = result.get("reference") or {}
    rows = []
    for name, value in result["metrics"].items():
        first, *more = name.split("_")
        short = len(first) <= 3 or (len(first) == 4 and first.isalpha() and first.islower())
        title = " ".join([first.upper() if short else first, *more])  # MSE and MASE, but mIoU and accuracy
        unit = result.get("metric_units", {}).get(name)
        text = "-" if value is None else f"{value:,}" if isinstance(value, int) else console.format_metric(value)
        other = f"{reference[name]:.3f}" if name in reference else ""
        rows.append([title + (f" ({unit})" if unit else ""), text, *[other] * bool(reference)])
    heads = [result["measured_on"], "this run", *["reference"] * bool(reference)]
    terminal = console.make_console()
    terminal.print()
    terminal.print(as_rich(Table(heads, rows, [False, True, True])))
    if reference:
        _print_line(f"reference: {reference['source']}, {reference['by']}", "dim")
        if reference["differs"]:
            differences = ", ".join(reference["differs"])
            _print_line(
                f"this run is not as experiment={run.config.record.chosen['experiment']}: {differences}", "yellow"
            )
    for line in (result.get("data") or {}).get("warnings", ()):
        _print_line(line, "yellow")
    fallbacks = result.get("cpu_fallbacks")
    if fallbacks is not None and fallbacks["calls_per_step"]:
        few = ", ".join(list(fallbacks["operators"])[:3])
        _print_line(
            f"CPU fallbacks per step: {fallbacks['calls_per_step']:.3g} calls, mostly {few}; see docs/guide/train.md",
            "red",
        )
    speed = f", {result['samples_per_second']:,.0f} samples/s" if result.get("samples_per_second") else ""
    steps = f"{result['steps']} steps, " if result["steps"] else ""
    _print_line(f"{steps}{result['wall_s']:.0f} s{speed}")
    _print_line(f"results in {console.display_path(run.folder.path)}")
