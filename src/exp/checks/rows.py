"""The rows of task=qualify: which there are, in the order of their worth, how each is made, and what it has shown.

A row is one or several commands ``python -m exp``, each in a process of its own; what they leave is read and judged.
"""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

from hydra.errors import HydraException

from exp import console
from exp.checks.check import FAILED, OK, STYLES, WARNING, Answer, fail, ok, read_journal, skip
from exp.checks.operator_table import judge_operators
from exp.checks.page import table_of
from exp.checks.parity import read_losses
from exp.checks.verdict import value_of
from exp.config.check import validate
from exp.config.explain import explain
from exp.console import flops, size
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE, ConfigError, RunError
from exp.freezing import compose, prepare
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

__all__ = ["MAKERS", "Making", "Row", "end_alone", "plan"]

_SHORT = ("plots=false", "logger=none", "debug.val_batches=1", "debug.test_batches=1", "max_epochs=null")
_OWN = re.compile(
    r"[+~]*(?:task|experiment|nproc|precision|output_dir|overwrite|resume|steps|reference|max_steps|max_epochs|logger)"
    r"(?:[.=].*)?"
)
_TRIES = 4
"""So often a row is begun anew without what has ended its process."""
_HANGS_AFTER_S = {"operators": 120.0, "collectives": 45.0}
"""A card may compile an operator when it first meets it; a collective has nothing to wait for but the other ranks."""
_KILL_AT = 5
_LOG = "look at output.log and logs/ in the row's folder"
_SLOW_CARD = 0.7
"""A card with less than this share of the median card's speed: twin cards differ by far less."""
_EFFICIENT = 0.8
_SAME_LOSS = 1e-5
_OTHER_LOSS = 1e-2
_SPEED = ("step_seconds", "samples_per_second", "batch_size", "memory_by_rank", "slowest_step_seconds", "left_device",
          "train_samples")  # fmt: skip


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
        self._alone: dict[tuple[str, ...], int] = {}
        self.by_card = any(override.lstrip("+").startswith("batch_size=") for override in kept)

    def _batch(self, experiment: str, settings: Sequence[str], cards: int) -> list[str]:
        """``settings``, with the batch of each of so many cards that share the one that a single card has alone."""
        others = [each for each in settings if not each.startswith("global_batch_size=")]
        if self.by_card:  # the user's word, for any number of cards
            settings = others
        key = (experiment, *settings)
        if key not in self._alone:
            self._alone[key] = self._composed(experiment, settings)
        return (
            others
            if self.by_card
            else [*others, "global_batch_size=null", f"batch_size={-(-self._alone[key] // cards)}"]
        )

    def _composed(self, experiment: str, settings: Sequence[str]) -> int:
        """The batch of an experiment on a single card; one that cannot be trained is found before the first row."""
        short = [f"experiment={experiment}", *_SHORT, "task=speed", "max_steps=100", "nproc=1"]
        overrides = [*self.kept, *short, *settings]
        try:
            config = prepare(compose(overrides), overrides)
            validate(config, overrides, self.backend)
        except (HydraException, ConfigError) as error:
            found = str(error) if isinstance(error, ConfigError) else explain(error, [])
            raise ConfigError(f"the rows of {experiment} cannot be made: {found}") from error
        assert config.batch_size is not None  # derived where it was not given
        return config.batch_size

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
                settings = ["task=parity", "steps=5", "max_steps=5", *self._batch(name, small, nproc)]
                yield self._trained("parity", name, settings, nproc=nproc)
        yield from self._operators(self.backend.capabilities.precisions[1:])
        for name, usual in self.usual.items():
            for nproc in [*(2**power for power in range(20) if 2**power < self.nproc), self.nproc]:
                settings = ["task=speed", f"max_steps={self.task.steps}", "val_every=10000000"]
                yield self._trained("speed", name, [*settings, *self._batch(name, usual, 1)], nproc=nproc)
        for name, small in list(self.small.items())[:1]:
            settings = ["task=train", "max_steps=8", "log_every=1", "checkpoint.every_steps=3"]
            settings += ["launcher.max_restarts=0", *self._batch(name, small, self.nproc)]
            yield self._trained("resume", name, settings, nproc=self.nproc)

    def _operators(self, precisions: Sequence[str]) -> Iterator[Row]:
        for precision in precisions:
            for name, small in self.small.items():
                settings = ["task=operators", "max_steps=1", *self._batch(name, small, 1)]
                yield self._trained("operators", name, settings, precision=precision)

    def _trained(self, kind: str, experiment: str, settings: Sequence[str], **about: Any) -> Row:
        name = "-".join([kind, experiment, *map(str, about.values())])
        return self._row(name, kind, f"experiment={experiment}", *_SHORT, *settings, experiment=experiment, **about)

    def _row(self, name: str, kind: str, *settings: str, **about: Any) -> Row:
        about = {**about, "precision": about.get("precision", "fp32"), "nproc": about.get("nproc", 1)}
        own = [f"precision={about['precision']}", f"nproc={about['nproc']}"]
        return Row(name, kind, [*self.kept, *settings, *own], about)


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

    def alone(self, *more: str, stop: Callable[[], bool] = lambda: False) -> Ended:
        """Run its command in its folder."""
        return self.run(*more, f"output_dir={self.folder}", stop=stop)


def _doctor(making: Making) -> Answer:
    """See :mod:`exp.checks.doctor`; cards that are slower than the others."""
    ended = making.alone()
    report = read_json(making.folder / "doctor.json")
    if report is None:
        return _broken_off("the doctor", ended)
    ranks, found = report["ranks"], report["findings"]
    rates = [value_of(rank, "burst", "flops") for rank in ranks]
    table = [{"rank": rank["rank"], "card": value_of(rank, "device", "name"), "FLOP/s": flops(rate) if rate else "",
              "free memory": size(value_of(rank, "memory", "free"))} for rank, rate in zip(ranks, rates)]  # fmt: skip
    shown = []
    for each in found[:3]:
        which = ", ".join(map(str, each["ranks"]))
        shown.append(f"{each['check']}{f', rank {which}' if which else ''}: {each['finding']}")
    finding = "; ".join(shown) or f"{report['world_size']} ranks work together"
    advice = found[0]["advice"] if found else ""
    known = [rate for rate in rates if rate]
    median = statistics.median(known) if known and making.real and report["verdict"] == OK else 0
    slow = [f"rank {rank} at {rate / median:.0%}" for rank, rate in enumerate(rates)
            if rate and rate < _SLOW_CARD * median]  # fmt: skip
    if slow:
        finding = f"slow cards: {', '.join(slow)} of the median card's speed"
        return ok(finding, "see whether another process uses the card, or it is throttled by heat", table=table)
    return Answer(report["verdict"], finding, advice, {"table": table})


def _operators(making: Making) -> Answer:
    """See :mod:`exp.checks.operators`."""
    lines, ended = _without_culprits(making)
    if not lines:
        return _broken_off("the training", ended)
    answer = judge_operators(lines, making.row.about["precision"])
    return answer if ended.code == EXIT_OK or answer.status == FAILED else _broken_off("the training", ended)


def _collectives(making: Making) -> Answer:
    """See :mod:`exp.checks.collectives`."""
    lines, ended = _without_culprits(making)
    if not lines:
        return _broken_off("the collectives", ended)
    answer = _judge_collectives(lines, making.folder)
    return answer if ended.code == EXIT_OK or answer.status == FAILED else _broken_off("the collectives", ended)


def _judge_collectives(lines: Sequence[Mapping[str, Any]], folder: Path) -> Answer:
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


def end_alone(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
    """Judge and show what task=operators or task=collectives has found; returns the exit code, None where it failed."""
    if outcome.exit_code != EXIT_OK:
        return None
    lines, _ = read_journal(folder.path / f"{config.task.name}.jsonl")
    operators = config.task.name == "operators"
    answer = judge_operators(lines, config.precision) if operators else _judge_collectives(lines, folder.path)
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
    left, nproc = values["left_device"], making.row.about["nproc"]
    if left and left["calls_per_step"]:
        moved = "" if left["bytes_per_step"] is None else f" and {size(left['bytes_per_step'])}"
        finding += f"; {left['calls_per_step']:.3g} calls{moved} a step leave the card, most of "
        finding += ", ".join(list(left["operators"])[:3])
        advice = "these operators run on the CPU: docs/hardware/hardware.md"
    alone = making.earlier.get(f"speed-{making.row.about['experiment']}-1", {}).get("values", {})
    if nproc > 1 and alone.get("samples_per_second"):
        efficiency = values["efficiency"] = values["samples_per_second"] / alone["samples_per_second"] / nproc
        finding += f", {efficiency:.0%} of {nproc} times one card"
        if efficiency < _EFFICIENT and making.real:
            advice = advice or "compare the collectives' bandwidth, and that of the loaders (data.num_workers)"
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
        ended = making.run(*more, f"output_dir={place}", stop=lambda: False)
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
    "operators": _operators,
    "collectives": _collectives,
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
    kind, folder = making.row.kind, making.folder
    journal, patience_s = folder / f"{kind}.jsonl", _HANGS_AFTER_S[kind]
    found: dict[str, dict[str, Any]] = {}
    culprits: dict[str, dict[str, Any]] = {}
    for attempt in range(_TRIES):
        if journal.exists():
            journal.replace(folder / f"{kind}.{attempt}.jsonl")
        names = ",".join(f'"{name}"' for name in culprits)
        more = [f"task.skip=[{names}]", *["overwrite=true"] * bool(attempt)]
        ended = making.alone(*more, stop=_stillness(journal, patience_s))
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
        advice = f"{_LOG}; where it is only slow, raise task.row_minutes"
        return fail(f"{what}: no end within {ended.seconds:.0f} s", advice)
    how = ended.error or (f"killed by {signal_name(-ended.code)}" if ended.code < 0 else f"exit code {ended.code}")
    if ended.code == EXIT_CONFIG and "is not supported by" in how:
        return skip(how)
    return fail(f"{what}: {how}", "install what is missing" if ended.code == EXIT_UNAVAILABLE else _LOG)
