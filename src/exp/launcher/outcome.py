"""How runs of other processes continue and end: the display of progress, the outcome, and the text about a failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp import console
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_UNAVAILABLE, REFUSAL_CODES
from exp.runs.failures import AGENT_LOST, RankFailure
from exp.runs.files import read_json
from exp.runs.folder import TAIL_BYTES
from exp.runs.job import PREEMPT_SIGNAL, signal_name

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder

__all__ = ["Outcome", "ProgressDisplay", "describe_failure", "outcome_file", "progress_of", "tail_of"]


@dataclass
class Outcome:
    """The outcome of a launch.

    Attributes:
        exit_code: of the command.
        failures: the first to fail comes first.
        interrupted_by: name of the signal that ended the run.
        preempted: if the run was preempted: ``step``, the optimizer step of the saved state (null: nothing to save),
            and, under torchrun, ``signals``, the names of the signals that this node received.
        printed: whether the process that ran the run has printed and recorded the outcome.
        result_written: whether ``result.json`` is final: the process that ran the run has written it, or left it on
            purpose.
        still_running: whether the run still goes on, without anybody waiting for it here.
        detail: what went wrong, if it was not the failure of a rank.
        unkillable: ids of processes that survived SIGKILL.
        reported: the text of the error, once it was printed.
    """

    exit_code: int = EXIT_OK
    restarts: int = 0
    failures: list[RankFailure] = field(default_factory=list)
    interrupted_by: str | None = None
    preempted: dict[str, Any] | None = None
    printed: bool = False
    result_written: bool = False
    still_running: bool = False
    detail: str | None = None
    unkillable: list[int] = field(default_factory=list)
    reported: str | None = None

    @classmethod
    def of(cls, failures: list[RankFailure], detail: str | None = None) -> Outcome:
        """The outcome of a failed launch. Its exit code is that of exp's own errors, otherwise 1."""
        exit_code = failures[0].exit_code if failures and failures[0].is_exp_error else EXIT_FAILED
        return cls(exit_code, failures=failures, detail=detail)

    @classmethod
    def of_signal(cls, number: int, saves: bool) -> Outcome:
        """The outcome of a launch that a signal has ended.

        Args:
            number: of the signal. Preemption ends a launch only if there is no state to save, or if it was repeated.
            saves: whether there is a state to save.
        """
        if number == PREEMPT_SIGNAL and not saves:
            return cls(EXIT_PREEMPTED, preempted={"step": None})
        return cls(128 + number, interrupted_by=signal_name(number))

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """The outcome that a job has written to a file; None if there is no file."""
        content = read_json(path)
        if content is None:
            return None
        content["failures"] = [RankFailure(**failure) for failure in content["failures"]]
        return cls(**content)


def outcome_file(folder: RunFolder, job: str) -> Path:
    """File for the :class:`Outcome` of a job, which the job writes: on Slurm, its first node.

    Args:
        folder: the run folder.
        job: Slurm's job id; of a job on this machine, the process id.
    """
    return folder.logs / f"outcome-{job}.json"


def describe_failure(outcome: Outcome, folder: RunFolder) -> str:
    """Text for the user: the first failing rank and its error on the first line, details below."""
    lines: list[str] = []
    if outcome.interrupted_by is not None:
        lines.append(f"interrupted by {outcome.interrupted_by}")
    elif outcome.failures:
        first, others = outcome.failures[0], outcome.failures[1:]
        log = folder.log_file(first.rank)
        kind = "" if first.names_type else f"{first.type}: "
        who = f"rank {first.rank} (local_rank {first.local_rank}, {first.host}) failed: {kind}"
        lines += [("" if first.type == AGENT_LOST else who) + str(first.error)]
        if others and first.type != AGENT_LOST:
            lines.append(f"  failed after it: {', '.join(f'rank {failure.rank}' for failure in others)}")
        if outcome.exit_code == EXIT_UNAVAILABLE:
            lines += tail_of(log)[1:]  # the log itself is removed with the run folder
        elif log.is_file() and outcome.exit_code not in REFUSAL_CODES:
            lines.append(f"  log: {log}")
    else:
        detail = outcome.detail or "no rank left an error"
        lines.append(detail if outcome.printed else f"the run ended without a result: {detail}")
    if outcome.unkillable:
        lines.append(f"  still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}")
    return "\n".join(lines)


def tail_of(log: Path, lines: int = 12) -> list[str]:
    """The path and the last lines of a log, for an error's details.

    Args:
        log: the file; it may be missing.
        lines: maximum number of lines; empty lines are left out.
    """
    if not log.is_file():
        return [f"  there is no log at {log}"]
    written = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return [f"  log: {log}", *(f"  | {line}" for line in written[-lines:])]


def progress_of(folder: RunFolder) -> str:
    """``step 120  loss 0.4312`` from the last record in ``metrics.jsonl``; empty before the first."""
    for record in reversed(folder.records(TAIL_BYTES)):
        values = [f"{name} {value:.4f}" for name, value in record.items() if name in ("loss", "metric")]
        if record.get("split") == "train" and values:
            return f"step {record['step']}  {'  '.join(values)}"
        if record.get("split") in ("val", "test"):
            return f"step {record['step']}  {record['split']}"
    return ""


class ProgressDisplay:
    """Receives progress and outcomes of runs. This class shows a single run: one line, redrawn on a terminal.

    Attributes:
        live: rich's live display; None without a terminal.
        rows: the rows of the display, by number of the run.
    """

    def __init__(self) -> None:
        self.console = console.make_console()
        self.live: Any = None
        self.rows: dict[int, Any] = {}
        self._printed_state = ""

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            from rich.progress import Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
            self.live = Progress(*columns, console=self.console, transient=True)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def draw(self, number: int, text: str) -> None:
        """Draw a row and the time since it was first drawn; only on a terminal."""
        if self.live is not None:
            if number not in self.rows:
                self.rows[number] = self.live.add_task("")
            self.live.update(self.rows[number], description=text)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def state(self, number: int, text: str) -> None:
        """Show the state of a run; called often. Without a terminal, print it when the part before the figures changes.

        Args:
            number: of the run, in the order in which the runs were given.
            text: the state, and after two spaces the figures.
        """
        self.draw(number, text)
        if self.live is None and text.partition("  ")[0] != self._printed_state:
            self._printed_state = text.partition("  ")[0]
            self.say(self._printed_state)

    def ended(self, number: int, outcome: Outcome) -> None:
        """Called when a run has ended; shows nothing here, because a single run has its own final report."""
