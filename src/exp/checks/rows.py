"""The rows of task=qualify: which there are, in the order of their worth, how each is made, and what it has shown.

A row is one or several commands ``python -m exp``, each in a process of its own; what they leave is read and judged.
"""

from __future__ import annotations

import re
import shutil
import statistics
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

from hydra.errors import HydraException

from exp.checks.check import FAILED, OK, WARNING, Answer, fail, ok, read_journal, skip
from exp.checks.child import Ended, Signals, run_exp
from exp.checks.operator_table import judge_operators
from exp.checks.parity import read_losses
from exp.checks.report import value_of
from exp.config.check import validate
from exp.config.explain import explain
from exp.console import size
from exp.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_UNAVAILABLE, ConfigError
from exp.freezing import compose, prepare
from exp.launcher.processes import signal_name
from exp.plugins import installed
from exp.preemption import PREEMPT_SIGNAL
from exp.runfolder import RunFolder, read_json, read_records

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from exp.checks.machine import Monitor
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.tasks.checks import Qualify

__all__ = ["Maker", "Row", "plan"]

_SHORT = ("plots=false", "logger=none", "debug.val_batches=1", "debug.test_batches=1", "max_epochs=null")
_OWN = re.compile(
    r"[+~]*(?:task|experiment|nproc|precision|output_dir|overwrite|resume|steps|reference|max_steps|max_epochs|logger)"
    r"(?:[.=].*)?"
)
_NEVER = "val_every=10000000"
_SIMULATED_KIB = "[4,64,1024]"
_SOAK = ("max_steps=10000000", _NEVER, "log_every=10", "checkpoint.every_epochs=0", "checkpoint.every_steps=0")
_TRIES = 4
"""So often a row is begun anew without what has ended its process."""
_HANGS_AFTER_S = {"operators": 120.0, "collectives": 45.0}
"""A card may compile an operator when it first meets it; a collective has nothing to wait for but the other ranks."""
_KILL_AT = 5
_MONITOR_EVERY_S = 15.0
_LOG = "look at output.log and logs/ in the row's folder"
_SLOW_CARD = 0.7
"""A card with less than this share of the median card's speed: twin cards differ by far less."""
_EFFICIENT = 0.8
_STEADY = 0.9
_SAME_LOSS = 1e-5
_OTHER_LOSS = 1e-2
_STAGED_FROM_KIB = 1024
_SPEED = ("step_seconds", "samples_per_second", "batch_size", "memory_by_rank", "slowest_step_seconds", "left_device",
          "train_samples")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: what it is called, and its folder.
        kind: how it is made and judged: a method of :class:`Maker`.
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
        ConfigError: an experiment cannot be trained as the user has it, or ``task.rows`` names no row.
    """
    rows = list(_Plan(config, overrides, task, backend).rows())
    for pattern in task.rows or ():
        if not any(fnmatch(row.name, pattern) for row in rows):
            raise ConfigError(f"task.rows: no row is called {pattern}; there are {', '.join(row.name for row in rows)}")
    return rows


class _Plan:
    def __init__(self, config: ExpConfig, overrides: Sequence[str], task: Qualify, backend: Backend) -> None:
        kept = [override for override in overrides if not _OWN.fullmatch(override)]
        if not any(override.startswith("backend=") for override in kept):
            kept.append(f"backend={config.backend.name}")
        self.kept = [f"backend={config.backend.name}" if each == "backend=auto" else each for each in kept]
        self.nproc, self.task, self.backend = config.nproc, task, backend
        self.made_up = backend.simulate or not backend.exclusive_devices
        examples = {family.example: family.small for plugin in installed().values()
                    for family in plugin.families.values()}  # fmt: skip
        wanted = list(examples) if task.experiments is None else task.experiments
        self.small = {name: list(examples.get(name, ())) for name in wanted}
        small = self.made_up if task.small is None else task.small
        self.usual = self.small if small else {name: [] for name in wanted}
        self.by_card = any(override.lstrip("+").startswith("batch_size=") for override in self.kept)
        self.batches = {name: self._composed(name) for name in wanted}

    def _composed(self, experiment: str) -> tuple[int, int]:
        """Samples of an optimizer step on one card, and micro-batches, of an experiment as the user has it.

        One that cannot be trained so is found here, before the first row.
        """
        overrides = [*self.kept, f"experiment={experiment}", *_SHORT, "task=speed", "max_steps=100", "nproc=1"]
        try:
            config = prepare(compose(overrides), overrides)
            validate(config, overrides, self.backend)
        except (HydraException, ConfigError) as error:
            found = str(error) if isinstance(error, ConfigError) else explain(error, [])
            raise ConfigError(f"the rows of {experiment} cannot be made: {found}") from error
        assert config.global_batch_size is not None  # derived where it was not given
        return config.global_batch_size, config.accumulate

    def _batch(self, experiment: str, settings: Sequence[str], nproc: int, by_card: bool = False) -> list[str]:
        """``settings``, with a global batch that ``nproc`` cards can share.

        Args:
            experiment: whose it is.
            settings: may have the batch of the small form.
            nproc: number of cards.
            by_card: each card has the whole batch; else all share it, and it is rounded up.
        """
        others = [each for each in settings if not each.startswith("global_batch_size=")]
        if self.by_card:  # the user's word, for any number of cards
            return others
        own = [int(each.partition("=")[2]) for each in settings if each not in others]
        samples, accumulate = self.batches[experiment]
        parts = accumulate * (1 if by_card else nproc)
        shared = -(-(own or [samples])[-1] // parts) * parts
        return [*others, f"global_batch_size={shared * (nproc if by_card else 1)}"]

    def rows(self) -> Iterator[Row]:
        """In order."""
        any_experiment = [f"experiment={name}" for name in self.small][:1]  # keys of the user's may be of his alone
        yield self._row("doctor", "doctor", "task=doctor", *any_experiment, nproc=self.nproc)
        yield from self._operators(self.backend.capabilities.precisions[:1])
        sums = ["task=collectives", "launcher.timeout_s=60", *any_experiment]
        sums += [f"task.sizes_kib={_SIMULATED_KIB}"] * self.made_up
        if self.nproc > 1:
            yield self._row("collectives", "collectives", *sums, nproc=self.nproc)
            if self.backend.exclusive_devices and not self.backend.collectives.gloo:
                sums.append("backend.process_group=gloo")  # the same through the CPU
                yield self._row("collectives-staged", "collectives", *sums, nproc=self.nproc)
        for nproc in dict.fromkeys((1, self.nproc)):
            for name, small in self.small.items():
                settings = ["task=parity", "steps=5", "max_steps=5", *self._batch(name, small, nproc)]
                yield self._trained("parity", name, settings, nproc=nproc)
        yield from self._operators(self.backend.capabilities.precisions[1:])
        counts = [*(2**power for power in range(20) if 2**power < self.nproc), self.nproc]
        for name, usual in self.usual.items():
            for nproc in counts:
                batch = self._batch(name, usual, nproc, by_card=True)
                settings = ["task=speed", f"max_steps={self.task.steps}", _NEVER, *batch]
                yield self._trained("speed", name, settings, nproc=nproc)
        for name, small in list(self.small.items())[:1]:
            settings = ["task=train", "max_steps=8", "log_every=1", "checkpoint.every_steps=3"]
            settings += ["launcher.max_restarts=0", *self._batch(name, small, self.nproc)]
            yield self._trained("resume", name, settings, nproc=self.nproc)
            if self.task.soak_minutes > 0:
                batch = self._batch(name, self.usual[name], self.nproc)
                yield self._trained("soak", name, ["task=train", *_SOAK, *batch], nproc=self.nproc)

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


class Maker:
    """Makes rows.

    Args:
        place: the kit's folder; each row has its own in ``rows/``.
        search: arguments before the overrides, such as ``--config-dir``.
        monitor: is read in the soak.
        backend: of the rows. Where cards are simulated, or share the processor, no speed is judged.
        soak_s: of the soak, in seconds.
        signals: of this process.
        rows: what the rows before have found, by name.

    Attributes:
        late: whether the row ran out of its time.
    """

    def __init__(
        self,
        place: Path,
        search: list[str],
        monitor: Monitor,
        backend: Backend,
        soak_s: float,
        signals: Signals,
        rows: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.place, self.search, self.monitor, self.soak_s = place, search, monitor, soak_s
        self.signals, self.rows = signals, rows
        self.late = False
        self._real = backend.exclusive_devices and not backend.simulate
        self._deadline = 0.0

    def make(self, row: Row, limit_s: float) -> Answer:
        """Make a row and judge it.

        Args:
            row: of the plan.
            limit_s: longest that it may take, in seconds.

        Raises:
            Interrupted: this process was told to end.
        """
        folder = self.place / "rows" / row.name
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        self._deadline = time.monotonic() + limit_s
        kind: Callable[[Row, Path], Answer] = getattr(self, row.kind)
        return kind(row, folder)

    def command(self, row: Row, *more: str) -> list[str]:
        """The arguments of ``python -m exp`` for a row; with them anybody can make it again."""
        return [*self.search, *row.overrides, *more]

    def _run(self, row: Row, folder: Path, *more: str, look: Any = None) -> Ended:
        arguments = self.command(row, *more, f"output_dir={folder}")
        limit_s = self._deadline - time.monotonic()
        ended = run_exp(arguments, folder / "output.log", limit_s, self.signals, look)
        self.late = ended.late
        return ended

    def doctor(self, row: Row, folder: Path) -> Answer:
        """See :mod:`exp.checks.doctor`; cards that are slower than the others."""
        ended = self._run(row, folder)
        report = read_json(folder / "doctor.json")
        if report is None:
            return _broken_off("the doctor", ended)
        ranks, found = report["ranks"], report["findings"]
        rates = [value_of(rank, "burst", "flops") for rank in ranks]
        values = {
            "operators": next((each["finding"] for each in ranks[0]["checks"] if each["name"] == "operators"), None),
            "flops": rates,
            "free": [value_of(rank, "memory", "free") for rank in ranks],
            "cards": [value_of(rank, "device", "name") for rank in ranks],
            "process_group": report["process_group"],
        }
        told = []
        for each in found[:3]:
            which = ", ".join(map(str, each["ranks"]))
            told.append(f"{each['check']}{f', rank {which}' if which else ''}: {each['finding']}")
        finding = "; ".join(told) or f"{report['world_size']} ranks work together"
        answer = Answer(report["verdict"], finding, found[0]["advice"] if found else "", values)
        known = [rate for rate in rates if rate]
        median = statistics.median(known) if known and self._real and answer.status == OK else 0
        slow = [f"rank {rank} at {rate / median:.0%}" for rank, rate in enumerate(rates)
                if rate and rate < _SLOW_CARD * median]  # fmt: skip
        if slow:
            answer.finding = f"slow cards: {', '.join(slow)} of the median card's speed"
            answer.warn("see whether another process uses the card, or it is throttled by heat")
        return answer

    def operators(self, row: Row, folder: Path) -> Answer:
        """See :mod:`exp.checks.operators`."""
        lines, ended = self._without_culprits(row, folder)
        if not lines:
            return _broken_off("the training", ended)
        answer = judge_operators(lines, row.about["precision"])
        return answer if ended.code == EXIT_OK or answer.status == FAILED else _broken_off("the training", ended)

    def collectives(self, row: Row, folder: Path) -> Answer:
        """See :mod:`exp.checks.collectives`; the card's own beside copies through the CPU."""
        lines, ended = self._without_culprits(row, folder)
        crashed = [f"{line['name']}, {line['detail']}: {line['crash']}" for line in lines if "crash" in line]
        measured = [line for line in lines if "seconds" in line]
        wrong = [f"{line['name']}, {line['kib']} KiB: wrong on rank {', '.join(map(str, line['wrong']))}"
                 for line in measured if line["wrong"]]  # fmt: skip
        refused = [f"{line['name']}: {line['error']}" for line in lines if "error" in line]
        crashed += [each for each in refused if " fp32: " in each]
        result = read_json(folder / "result.json") or {}
        values: dict[str, Any] = {
            "lines": measured,
            "process_group": result.get("process_group"),
            "fallback": result.get("fallback"),
        }
        if crashed or wrong:
            advice = "broken collectives: try another version of the vendor's library, or backend.process_group=gloo"
            return fail("; ".join([*crashed, *wrong][:4]), advice, **values)
        if ended.code != EXIT_OK or not measured:
            return _broken_off("the collectives", ended)
        best = max(measured, key=lambda line: float(line["bus_bytes_per_second"]))
        speed = f"{size(best['bus_bytes_per_second'])}/s in {best['name']} of {best['kib']} KiB"
        answer = ok(f"{len(measured)} right over {values['process_group']}; up to {speed}", **values)
        if refused:
            answer.finding += f"; refused: {'; '.join(refused)}"
            answer.warn("gradients travel in fp32 here; what sends others cannot use this library")
        if row.name == "collectives-staged":
            own = {
                (line["name"], line["kib"]): line["seconds"] for line in self._values("collectives").get("lines", ())
            }
            for line in measured:
                if (line["name"], line["kib"]) in own:
                    line["device_is_faster"] = line["seconds"] / own[line["name"], line["kib"]]
            slower = [f"{line['name']} {line['kib']} KiB" for line in measured
                      if line.get("device_is_faster", 1) < 1 and line["kib"] >= _STAGED_FROM_KIB]  # fmt: skip
            if slower and self._real:
                answer.finding += f"; the card's own are slower than this: {', '.join(slower[:3])}"
                answer.warn("see how the cards are connected, and the variables of the vendor's library")
        return answer

    def parity(self, row: Row, folder: Path) -> Answer:
        """See :mod:`exp.checks.parity`."""
        ended = self._run(row, folder)
        report = read_json(folder / "parity.json")
        if report is None:
            return _broken_off("the comparison", ended)
        largest = {kind: each["relative"] for kind, each in report["largest"].items()}
        if not report["agrees"]:
            advice = "what departs first is named: compare its operators in the rows above"
            return fail(ended.said, advice, largest=largest)
        finding = f"losses within {largest['loss']:.1e} of the CPU's, gradients {largest['gradient']:.1e}"
        return ok(finding, largest=largest)

    def speed(self, row: Row, folder: Path) -> Answer:
        """See :func:`exp.checks.training.measure_speed`; the efficiency of several cards."""
        ended = self._run(row, folder)
        result = read_json(folder / "result.json")
        if ended.code != EXIT_OK or not result:
            return _broken_off("the training", ended)
        values = {key: result[key] for key in _SPEED}
        memory = max((each for each in values["memory_by_rank"] if each), default=None)
        finding = f"{values['step_seconds'] * 1e3:.4g} ms a step, {values['samples_per_second']:.4g} samples/s"
        answer = ok(finding + (f", {size(memory)} of memory" if memory else ""), **values)
        left = values["left_device"]
        if left and left["calls_per_step"]:
            moved = "" if left["bytes_per_step"] is None else f" and {size(left['bytes_per_step'])}"
            answer.finding += f"; {left['calls_per_step']:.3g} calls{moved} a step leave the card, most of "
            answer.finding += ", ".join(list(left["operators"])[:3])
            answer.warn("these operators run on the CPU: docs/hardware.md")
        nproc = row.about["nproc"]
        alone = self._values(f"speed-{row.about['experiment']}-1").get("samples_per_second")
        if nproc > 1 and alone:
            efficiency = answer.values["efficiency"] = values["samples_per_second"] / alone / nproc
            answer.finding += f", {efficiency:.0%} of {nproc} times one card"
            if efficiency < _EFFICIENT and self._real:
                answer.warn("compare the collectives' bandwidth, and that of the loaders (data.num_workers)")
        return answer

    def resume(self, row: Row, folder: Path) -> Answer:
        """A training to its end; the same with one rank killed on the way, and continued: equal losses?"""
        hook = f"hooks=[{{type: exp.checks.training.KillOnce, step: {_KILL_AT}, mark: '{folder / 'killed'}'}}]"
        straight, broken = folder / "straight", folder / "broken"
        for what, place, more, expected in (
            ("the training", straight, [], EXIT_OK),
            ("the training that is killed", broken, [hook], EXIT_FAILED),
            ("its continuation", broken, [hook, "resume=auto"], EXIT_OK),
        ):
            ended = self._run(row, place, *more)
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

    def soak(self, row: Row, folder: Path) -> Answer:
        """A training for some minutes, which then is told to save and end: does it stay as fast, how hot are cards?"""
        metrics = folder / "metrics.jsonl"
        begun, read_at, told = 0.0, 0.0, False
        hottest: float | None = None

        def look(process: subprocess.Popen[bytes]) -> bool:
            nonlocal begun, read_at, told, hottest
            now = time.monotonic()
            if not begun and metrics.is_file():
                begun = now
            if begun and now - read_at > _MONITOR_EVERY_S:
                read_at = now
                degrees = [hottest, *(card.get("temperature_c") for card in self.monitor.read())]
                hottest = max((each for each in degrees if each is not None), default=None)
            if begun and not told and now - begun > self.soak_s:
                told = True
                process.send_signal(PREEMPT_SIGNAL)
            return False

        ended = self._run(row, folder, look=look)
        if ended.code != EXIT_PREEMPTED:
            return _broken_off("the training", ended)
        records = read_records(metrics.read_bytes().splitlines() if metrics.is_file() else ())
        rates = [record["samples_per_second"] for record in records if record["split"] == "train"][1:]
        minutes = self.soak_s / 60
        if len(rates) < 4:
            finding = f"{len(rates)} readings of the speed in {minutes:.3g} min: too few to tell"
            return ok(finding, "raise task.soak_minutes")
        quarter = len(rates) // 4
        first, last = statistics.median(rates[:quarter]), statistics.median(rates[-quarter:])
        finding = f"{minutes:.3g} min, then saved and ended as told; {first:.4g} samples/s, {last:.4g} at the end"
        finding += f", at most {hottest:.0f} C" if hottest is not None else ""
        answer = ok(finding, first_quarter=first, last_quarter=last, hottest_c=hottest, minutes=minutes)
        if last < _STEADY * first and self._real:
            answer.warn("the cards become slower: look at their temperature and power, and at other processes")
        return answer

    def _values(self, row: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.rows.get(row, {}).get("values", {})
        return found

    def _without_culprits(self, row: Row, folder: Path) -> tuple[list[dict[str, Any]], Ended]:
        """Where something ends or hangs the process, it is noted, and the row begun anew without it.

        Returns:
            What the journals say (what ended the process has ``crash``), and how the last command ended.
        """
        journal, patience_s = folder / f"{row.kind}.jsonl", _HANGS_AFTER_S[row.kind]
        found: dict[str, dict[str, Any]] = {}
        culprits: dict[str, dict[str, Any]] = {}
        for attempt in range(_TRIES):
            if journal.exists():
                journal.replace(folder / f"{row.kind}.{attempt}.jsonl")
            names = ",".join(f'"{name}"' for name in culprits)
            more = [f"task.skip=[{names}]", *["overwrite=true"] * bool(attempt)]
            ended = self._run(row, folder, *more, look=_stillness(journal, patience_s))
            lines, begun = read_journal(journal)
            found.update({f"{line['name']} {line.get('detail', line.get('kib'))}": line for line in lines})
            if begun is None or ended.code == EXIT_OK or ended.late:
                break
            how = f"hung for {patience_s:.0f} s" if ended.hung else ended.said or f"exit code {ended.code}"
            culprits[begun["name"]] = {**begun, "crash": how}
        return [*found.values(), *culprits.values()], ended


def _stillness(journal: Path, seconds: float) -> Callable[[object], bool]:
    """Tells whether something was begun so long ago, and has not ended; not by a disk's clock, which may be another."""
    last, since = -1, 0.0

    def look(_: object) -> bool:
        nonlocal last, since
        length = journal.stat().st_size if journal.exists() else 0
        if length != last:
            last, since = length, time.monotonic()
        return length > 0 and time.monotonic() - since > seconds and read_journal(journal)[1] is not None

    return look


def _broken_off(what: str, ended: Ended) -> Answer:
    """A command that did not do what it should."""
    if ended.late:
        advice = f"{_LOG}; where it is only slow, raise task.row_minutes"
        return fail(f"{what}: no end within {ended.seconds:.0f} s", advice)
    how = ended.said or (f"killed by {signal_name(-ended.code)}" if ended.code < 0 else f"exit code {ended.code}")
    if ended.code == EXIT_CONFIG and "is not supported by" in how:
        return skip(how)
    return fail(f"{what}: {how}", "install what is missing" if ended.code == EXIT_UNAVAILABLE else _LOG)
