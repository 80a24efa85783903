"""The rows of task=qualify: which there are, in the order of their worth, how each is made, and what it has shown.

A row is one or several commands ``python -m exp``, each in a process of its own; what they leave is read and judged.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

from hydra.errors import HydraException

from exp import console
from exp.checks.check import FAILED, OK, STYLES, WARNING, Answer, fail, ok, read_journal, skip, table_of
from exp.checks.parity import read_losses
from exp.checks.verdict import value_of
from exp.config.compose import compose
from exp.config.explain import explain
from exp.console import flops, size
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE, ConfigError, RunError
from exp.frozen import check, prepare
from exp.launcher.processes import signal_name
from exp.plugins import installed
from exp.runs.files import read_json
from exp.runs.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from exp.checks.child import Ended
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.outcome import Outcome
    from exp.tasks.checks import Qualify

__all__ = ["MAKERS", "Making", "Row", "end_alone", "judge_operators", "plan"]

_SHORT = ("plots=false", "logger=none", "debug.val_batches=1", "debug.test_batches=1", "max_epochs=null")
_OWN = re.compile(
    r"[+~]*(?:task|experiment|nproc|precision|output_dir|overwrite|resume|max_steps|max_epochs|logger)(?:[.=].*)?"
)
_TRIES = 4
"""So often a row is begun anew without what has ended its process."""
_HANGS_AFTER_S = {"operators": 120.0, "collectives": 45.0}
"""A card may compile an operator when it first meets it; a collective has nothing to wait for but the other ranks."""
_KILL_AT = 5
_LOG = "look at output.log and logs/ in the row's folder"
_EFFICIENT = 0.8
_SAME_LOSS = 1e-5
_OTHER_LOSS = 1e-2
_LIMITS = {"float32": (1e-5, 1e-3), "float64": (1e-5, 1e-3), "bfloat16": (2e-2, 0.2), "float16": (2e-3, 2e-2)}
"""Largest relative difference that is equal, and that is not wrong, by the type of the result. An operator that adds up
many values in another order is a few 1e-7 off in float32."""
_ROUNDED = {"tf32": (5e-3, 5e-2), "efp": _LIMITS["bfloat16"]}
"""The same of float32, by the precision that products are rounded to."""
_ORDER = ("crashed", "failed", "wrong", "off", "left the card", "equal", "not compared")
_SHOWN = 4
_SPEED = ("step_seconds", "samples_per_second", "batch_size", "memory_by_rank")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: what it is called, and its folder.
        kind: how it is made and judged: a key of :data:`MAKERS`.
        overrides: of ``python -m exp``, without ``output_dir``.
        about: what it varies: ``experiment``, ``precision``, ``nproc``.
    """

    name: str
    kind: str
    overrides: Sequence[str]
    about: Mapping[str, Any] = field(default_factory=dict)


def plan(config: ExpConfig, overrides: Sequence[str], task: Qualify, backend: Backend) -> list[Row]:
    """All rows: what fits into the budget is made first to last.

    Args:
        config: with the backend that was chosen.
        overrides: the user's; what concerns hardware and data holds for every row.
        task: of ``config``.
        backend: likewise.

    Raises:
        ConfigError: an experiment cannot be trained as the user has it.
    """
    return list(_Plan(config, overrides, task, backend).rows())


class _Plan:
    def __init__(self, config: ExpConfig, overrides: Sequence[str], task: Qualify, backend: Backend) -> None:
        kept = [each for each in overrides if not _OWN.fullmatch(each) and each != "backend=auto"]
        if not any(override.startswith("backend=") for override in kept):
            kept.append(f"backend={config.backend.name}")
        self.kept, self.nproc, self.task, self.backend = kept, config.nproc, task, backend
        self.made_up = backend.simulate or not backend.exclusive_devices
        examples = {family.example: family.small for plugin in installed().values()
                    for family in plugin.families.values()}  # fmt: skip
        self.small = {name: list(examples.get(name, ())) for name in task.experiments or examples}
        small = self.made_up if task.small is None else task.small
        self.usual = self.small if small else {name: [] for name in self.small}
        self.by_card = any(override.lstrip("+").startswith("batch_size=") for override in kept)
        self._alone: dict[tuple[str, ...], int] = {}

    def rows(self) -> Iterator[Row]:
        """In order."""
        any_experiment = [f"experiment={name}" for name in self.small][:1]  # keys of the user's may be of his alone
        yield self._row("doctor", "doctor", "task=doctor", *any_experiment, nproc=self.nproc)
        yield from self._operators(self.backend.capabilities.precisions[:1])
        if self.nproc > 1:
            sums = ["task=collectives", "launcher.timeout_s=60", *any_experiment]
            sums += ["task.sizes_kib=[4,64,1024]"] * self.made_up
            yield self._row("collectives", "collectives", *sums, nproc=self.nproc)
        for nproc in dict.fromkeys((1, self.nproc)):
            for name, small in self.small.items():
                yield self._trained("parity", name, small, nproc, "task=parity", "task.steps=5", "max_steps=5",
                                    nproc=nproc)  # fmt: skip
        yield from self._operators(self.backend.capabilities.precisions[1:])
        for name, usual in self.usual.items():
            for nproc in [*(2**power for power in range(20) if 2**power < self.nproc), self.nproc]:
                settings = ["task=speed", f"max_steps={self.task.steps}", "val_every=10000000"]
                yield self._trained("speed", name, usual, 1, *settings, nproc=nproc)
        for name, small in list(self.small.items())[:1]:
            settings = ["task=train", "max_steps=8", "log_every=1", "checkpoint.every_steps=3"]
            yield self._trained("resume", name, small, self.nproc, *settings, "launcher.max_restarts=0",
                                nproc=self.nproc)  # fmt: skip

    def _operators(self, precisions: Sequence[str]) -> Iterator[Row]:
        for precision in precisions:
            for name, small in self.small.items():
                yield self._trained("operators", name, small, 1, "task=operators", "max_steps=1", precision=precision)

    def _trained(
        self, kind: str, experiment: str, form: Sequence[str], cards: int, *settings: str, **about: Any
    ) -> Row:
        """A row that trains an experiment in a form of it; so many cards share the batch that a single one has."""
        bare = [each for each in form if not each.startswith("global_batch_size=")]
        if self.by_card:  # the user's word, for any number of cards
            self._batch_alone(experiment, bare)
        else:
            bare += ["global_batch_size=null", f"batch_size={-(-self._batch_alone(experiment, form) // cards)}"]
        name = "-".join([kind, experiment, *map(str, about.values())])
        settings = (f"experiment={experiment}", *_SHORT, *settings, *bare)
        return self._row(name, kind, *settings, experiment=experiment, **about)

    def _row(self, name: str, kind: str, *settings: str, **about: Any) -> Row:
        about = {**about, "precision": about.get("precision", "fp32"), "nproc": about.get("nproc", 1)}
        own = [f"precision={about['precision']}", f"nproc={about['nproc']}"]
        return Row(name, kind, [*self.kept, *settings, *own], about)

    def _batch_alone(self, experiment: str, form: Sequence[str]) -> int:
        """The batch of an experiment on a single card; one that cannot be trained is found before the first row."""
        key = (experiment, *form)
        if key not in self._alone:
            short = [f"experiment={experiment}", *_SHORT, "task=speed", "max_steps=100", "nproc=1"]
            overrides = [*self.kept, *short, *form]
            try:
                config = prepare(compose(overrides), overrides)
                check(config, overrides, self.backend)
            except (HydraException, ConfigError) as error:
                found = str(error) if isinstance(error, ConfigError) else explain(error, [])
                raise ConfigError(f"the rows of {experiment} cannot be made: {found}") from error
            self._alone[key] = int(config.batch_size or 1)
        return self._alone[key]


@dataclass(frozen=True)
class Making:
    """A row that is being made.

    Attributes:
        row: which.
        folder: of it; empty.
        run: runs its command with further overrides, ``output_dir`` among them, and ends it where ``stop`` says so.
        earlier: what the rows before have found, by name.
        real: whether speeds mean something: they do not where cards are simulated, or share the processor.
    """

    row: Row
    folder: Path
    run: Callable[..., Ended]
    earlier: Mapping[str, Mapping[str, Any]]
    real: bool

    def alone(self, *more: str, **options: Any) -> Ended:
        """Run its command in its folder."""
        return self.run(*more, f"output_dir={self.folder}", **options)


def _doctor(making: Making) -> Answer:
    """See :mod:`exp.checks.doctor`."""
    ended = making.alone()
    report = read_json(making.folder / "doctor.json")
    if report is None:
        return _broken_off("the doctor", ended)
    ranks, found = report["ranks"], report["findings"]
    table = [{"rank": rank["rank"], "card": value_of(rank, "device", "name"),
              "FLOP/s": flops(value_of(rank, "burst", "flops") or 0), "free memory": size(
                  value_of(rank, "memory", "free"))} for rank in ranks]  # fmt: skip
    shown = []
    for each in found[:3]:
        which = ", ".join(map(str, each["ranks"]))
        shown.append(f"{each['check']}{f', rank {which}' if which else ''}: {each['finding']}")
    finding = "; ".join(shown) or f"{report['world_size']} ranks work together"
    return Answer(report["verdict"], finding, found[0]["advice"] if found else "", {"table": table})


def _journaled(making: Making) -> Answer:
    """See :mod:`exp.checks.operators` and :mod:`exp.checks.collectives`."""
    kind = making.row.kind
    lines, ended = _without_culprits(making)
    answer = _judge(kind, lines, making.row.about["precision"], making.folder) if lines else None
    if answer is None or (ended.code != EXIT_OK and answer.status != FAILED):
        return _broken_off(f"task={kind}", ended)
    return answer


def _judge(kind: str, lines: Sequence[Mapping[str, Any]], precision: str, folder: Path) -> Answer:
    return judge_operators(lines, precision) if kind == "operators" else _judge_collectives(lines, folder)


def end_alone(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
    """Judge and show what task=operators or task=collectives has found; returns the exit code, None where it failed."""
    if outcome.exit_code != EXIT_OK:
        return None
    lines, _ = read_journal(folder.path / f"{config.task.name}.jsonl")
    answer = _judge(config.task.name, lines, config.precision, folder.path)
    shown = [row for row in answer.values["table"] if row.get("status") != "equal"]
    terminal = console.make_console()
    terminal.print("\n".join(table_of(shown)) if shown else "", soft_wrap=True, markup=False)
    terminal.print(f"{answer.status}: ", style=STYLES[answer.status], end="")
    advice = f"\n  do: {answer.advice}" if answer.advice else ""
    terminal.print(f"{answer.finding}{advice}\nrun folder: {console.shown(folder.path)}", soft_wrap=True, markup=False)
    if answer.status != FAILED:
        return EXIT_OK
    error = {"rank": None, "type": RunError.__name__, "message": answer.finding}
    folder.write_result({**(read_json(folder.result) or {}), "status": "failed", "error": error})
    return EXIT_FAILED


def _parity(making: Making) -> Answer:
    """See :mod:`exp.checks.parity`."""
    ended = making.alone()
    report = read_json(making.folder / "parity.json")
    if report is None:
        return _broken_off("the comparison", ended)
    largest = {kind: each["relative"] for kind, each in report["largest"].items()}
    if not report["agrees"]:
        return fail(ended.error, "compare the operators of what departs first in the rows above", largest=largest)
    finding = f"losses within {largest['loss']:.1e} of the CPU's, gradients {largest['gradient']:.1e}"
    return ok(finding, largest=largest)


def _speed(making: Making) -> Answer:
    """See :func:`exp.checks.training.measure_speed`; the efficiency of several cards."""
    ended = making.alone()
    result = read_json(making.folder / "result.json")
    if ended.code != EXIT_OK or not result:
        return _broken_off("the training", ended)
    values: dict[str, Any] = {key: result[key] for key in _SPEED}
    memory = max((each for each in values["memory_by_rank"] if each), default=None)
    finding = f"{values['step_seconds'] * 1e3:.4g} ms a step, {values['samples_per_second']:.4g} samples/s"
    finding += f", {size(memory)} of memory" if memory else ""
    advice = ""
    nproc = making.row.about["nproc"]
    alone = making.earlier.get(f"speed-{making.row.about['experiment']}-1", {}).get("values", {})
    if nproc > 1 and alone.get("samples_per_second"):
        efficiency = values["efficiency"] = values["samples_per_second"] / alone["samples_per_second"] / nproc
        finding += f", {efficiency:.0%} of {nproc} times one card"
        if efficiency < _EFFICIENT and making.real:
            advice = "compare the collectives' bandwidth, and that of the loaders (data.num_workers)"
    return ok(finding, advice, **values)


def _resume(making: Making) -> Answer:
    """A training to its end; the same with one rank killed on the way, and continued: equal losses?"""
    straight, broken, mark = (making.folder / name for name in ("straight", "broken", "killed"))
    hook = f"hooks=[{{type: exp.checks.training.KillOnce, step: {_KILL_AT}, mark: '{mark}'}}]"
    for what, place, more, expected in (
        ("the training", straight, [], EXIT_OK),
        ("the training that is killed", broken, [hook], EXIT_FAILED),
        ("its continuation", broken, [hook, "resume=auto"], EXIT_OK),
    ):
        ended = making.run(*more, f"output_dir={place}")
        if ended.code != expected or ended.late:
            return _broken_off(what, ended)
    first, second = (read_losses(RunFolder(each)) for each in (straight, broken))
    if set(first) != set(second):
        return fail(f"steps {sorted(set(first) ^ set(second))} are not in both trainings", _LOG)
    apart = max(abs(second[step] - loss) / max(abs(loss), 1e-12) for step, loss in first.items())
    finding = f"one rank killed, its steps repeated: losses {'equal' if apart == 0 else f'within {apart:.1e}'}"
    status = OK if apart <= _SAME_LOSS else WARNING if apart <= _OTHER_LOSS else FAILED
    advice = "" if status == OK else "the card's sums depend on their order, or its random state is not restored"
    return Answer(status, finding, advice, {"relative": apart, "steps": len(first)})


MAKERS: dict[str, Callable[[Making], Answer]] = {
    "doctor": _doctor,
    "operators": _journaled,
    "collectives": _journaled,
    "parity": _parity,
    "speed": _speed,
    "resume": _resume,
}
"""By kind: makes a row, and judges what it leaves."""


def _without_culprits(making: Making) -> tuple[list[dict[str, Any]], Ended]:
    """Where something ends or hangs the process, it is noted, and the row begun anew without it.

    Returns:
        What the journals say (what ended the process has ``crash``), and how the last command ended.
    """
    kind = making.row.kind
    journal, patience_s = making.folder / f"{kind}.jsonl", _HANGS_AFTER_S[kind]
    found: dict[str, dict[str, Any]] = {}
    culprits: dict[str, dict[str, Any]] = {}
    for _ in range(_TRIES):
        journal.unlink() if journal.exists() else None
        names = ",".join(f'"{name}"' for name in culprits)
        ended = making.alone(f"task.skip=[{names}]", "overwrite=true", stop=_stillness(journal, patience_s))
        lines, begun = read_journal(journal)
        found.update({f"{line['name']} {line.get('detail', line.get('kib'))}": line for line in lines})
        if begun is None or ended.code == EXIT_OK or ended.late:
            break
        how = f"hung for {patience_s:.0f} s" if ended.stopped else ended.error or f"exit code {ended.code}"
        culprits[begun["name"]] = {**begun, "crash": how}
    return [*found.values(), *culprits.values()], ended


def _stillness(journal: Path, seconds: float) -> Callable[[], bool]:
    """Tells whether something was begun so long ago, and has not ended; not by a disk's clock, which may be another."""
    last, since = -1, 0.0

    def stop() -> bool:
        nonlocal last, since
        length = journal.stat().st_size if journal.exists() else 0
        if length != last:
            last, since = length, time.monotonic()
        return length > 0 and time.monotonic() - since > seconds and read_journal(journal)[1] is not None

    return stop


def _broken_off(what: str, ended: Ended) -> Answer:
    """A command that did not do what it should."""
    if ended.late:
        return fail(f"{what}: its time was over", f"{_LOG}; where it is only slow, raise task.row_minutes")
    how = ended.error or (f"killed by {signal_name(-ended.code)}" if ended.code < 0 else f"exit code {ended.code}")
    if ended.code == EXIT_CONFIG and "is not supported by" in how:
        return skip(how)
    return fail(f"{what}: {how}", "install what is missing" if ended.code == EXIT_UNAVAILABLE else _LOG)


def judge_operators(lines: Sequence[Mapping[str, Any]], precision: str) -> Answer:
    """Make the table and judge it.

    Args:
        lines: of ``operators.jsonl``; those that ended the process have ``crash``.
        precision: of the training.

    Returns:
        With the table in ``values``: per operator ``status`` (the worst of ``crashed``, ``failed``, ``wrong``, ``off``,
        ``left the card``, ``equal``, ``not compared``), the ``call`` that it is of, the ``relative`` difference,
        ``left`` (calls and bytes; bytes where they are counted), ``kernel`` (``portable`` ones are exp's own), and the
        ``reason``.
    """
    worst: dict[str, tuple[tuple[int, float], dict[str, Any]]] = {}
    for line in lines:
        status, relative = _status(line, precision)
        rank = _ORDER.index(status), -relative
        row = {
            "operator": line["name"],
            "status": status,
            "relative": None if "relative" not in line else relative,
            "left": _left(line.get("left")),
            "kernel": "portable" if line.get("portable") else "",
            "call": line.get("detail"),
            "reason": line.get("crash") or line.get("error") or line.get("uncompared"),
        }
        if line["name"] not in worst or rank < worst[line["name"]][0]:
            worst[line["name"]] = rank, row
    table = sorted((row for _, row in worst.values()), key=lambda row: (_ORDER.index(row["status"]), row["operator"]))
    counts = {status: sum(row["status"] == status for row in table) for status in _ORDER}
    portable = sum(row["kernel"] != "" for row in table)
    finding = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    finding += f" ({portable} with portable kernels)" if portable else ""
    named = [row for row in table if row["status"] not in ("equal", "not compared")]
    if named:
        finding += ": " + "; ".join(map(_described, named[:_SHOWN])) + "; ..." * (len(named) > _SHOWN)
    values = {"table": table, "counts": counts}
    if any(row["status"] in ("crashed", "failed", "wrong") for row in table):
        advice = "report these operators to the vendor, portable ones to exp; docs/hardware.md says what stands in"
        return fail(finding, advice, **values)
    if all(row["relative"] is None for row in table):
        return fail(f"nothing was compared: {finding}", "look at output.log in the row's folder", **values)
    advice = "more than rounding: see whether the card multiplies in a lower precision" if counts["off"] else ""
    advice = "these operators run on the CPU, slowly: docs/hardware.md" if counts["left the card"] else advice
    return ok(finding, advice, **values)


def _status(line: Mapping[str, Any], precision: str) -> tuple[str, float]:
    """Of one call, with its relative difference; JSON has no infinity, and says so beside."""
    relative = math.inf if "relative" in line.get("not_finite", ()) else line.get("relative")
    left = bool(line.get("left") and line["left"][0])
    if "crash" in line or "error" in line:
        return "crashed" if "crash" in line else "failed", 0.0
    if relative is None:
        return "left the card" if left else "not compared", 0.0
    equal, right = _LIMITS.get(str(line["dtype"]), (0.0, 0.0))
    if line["dtype"] == "float32":
        equal, right = _ROUNDED.get(precision, (equal, right))
    status = "wrong" if relative > right else "off" if relative > equal else "left the card" if left else "equal"
    return status, relative


def _left(left: Sequence[int] | None) -> str:
    if left is None:
        return "unknown"
    calls, moved = left
    return f"{calls} calls" * (calls > 0) + f", {size(moved)}" * (moved > 0)


def _described(row: Mapping[str, Any]) -> str:
    name = f"{row['operator']} (portable)" if row["kernel"] else row["operator"]
    if row["status"] in ("crashed", "failed"):
        return f"{name} {row['status']} ({row['reason']})"
    if row["status"] == "left the card":
        return f"{name} left the card ({row['left']})"
    return f"{name} {row['status']} by {row['relative']:.1e} at {row['call']}"


def _judge_collectives(lines: Sequence[Mapping[str, Any]], folder: Path) -> Answer:
    """Make the table of ``collectives.jsonl``, whose lines have ``crash`` where they ended the process, and judge it.

    Args:
        lines: of the journal.
        folder: where ``result.json`` says which process group it was.
    """
    measured = [line for line in lines if "seconds" in line]
    refused = [f"{line['name']}: {line['error']}" for line in lines if "error" in line]
    bad = [f"{line['name']}, {line['detail']}: {line['crash']}" for line in lines if "crash" in line]
    bad += [each for each in refused if " fp32: " in each]
    bad += [f"{line['name']}, {line['kib']} KiB: wrong on rank {', '.join(map(str, line['wrong']))}"
            for line in measured if line["wrong"]]  # fmt: skip
    group = (read_json(folder / "result.json") or {}).get("process_group")
    table = [{"collective": line["name"], "KiB": line["kib"], "time": f"{line['seconds'] * 1e3:.3g} ms",
              "link, per second": size(line["bus_bytes_per_second"])} for line in measured]  # fmt: skip
    values = {"table": table, "process_group": group}
    if bad:
        advice = "broken collectives: try another version of the vendor's library, or backend.process_group=gloo"
        return fail("; ".join(bad[:4]), advice, **values)
    best = max(measured, key=lambda line: float(line["bus_bytes_per_second"]))
    finding = f"{len(measured)} right over {group}; up to {size(best['bus_bytes_per_second'])}/s in {best['name']} of "
    finding += f"{best['kib']} KiB" + f"; refused: {'; '.join(refused)}" * bool(refused)
    advice = "gradients travel in fp32 here; what sends others cannot use this library" if refused else ""
    return ok(finding, advice, **values)
