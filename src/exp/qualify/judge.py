"""What a row has shown, from the files that it has left, with the reason and what to do."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.checks.parity import read_losses
from exp.console import size
from exp.errors import EXIT_CONFIG, EXIT_OK, EXIT_UNAVAILABLE
from exp.launcher.processes import signal_name
from exp.qualify.operator_table import judge_operators
from exp.qualify.verdict import FAIL, NOT_RUN, PASS, WARN, Verdict
from exp.runfolder import RunFolder, read_json, read_records

if TYPE_CHECKING:
    from pathlib import Path

    from exp.backend import Backend
    from exp.qualify.child import Ended
    from exp.qualify.plan import Row

__all__ = ["JUDGES", "Made", "against", "broken_off", "resumed", "soaked"]

_LOG = "look at output.log and logs/ in the row's folder"
_SLOW_CARD = 0.7
"""A card with less than this share of the median card's speed: twin cards differ by far less."""
_EFFICIENT = 0.8
_STEADY = 0.9
_SAME_LOSS = 1e-5
_OTHER_LOSS = 1e-2
_STAGED_FROM_KIB = 1024


@dataclass(frozen=True)
class Made:
    """A row that was made.

    Attributes:
        row: of the plan.
        folder: what it has left.
        ended: how its last command ended.
        lines: what its trail says, where it has one.
    """

    row: Row
    folder: Path
    ended: Ended
    lines: Sequence[Mapping[str, Any]] = ()


def broken_off(what: str, ended: Ended) -> Verdict:
    """A command that did not do what it should."""
    if ended.late:
        return Verdict(FAIL, f"{what}: no end within {ended.seconds:.0f} s", f"{_LOG}; where it is only slow, raise "
                       "task.row_minutes")  # fmt: skip
    how = ended.said or (f"killed by {signal_name(-ended.code)}" if ended.code < 0 else f"exit code {ended.code}")
    if ended.code == EXIT_CONFIG and "is not supported by" in how:
        return Verdict(NOT_RUN, how)
    advice = "install what is missing" if ended.code == EXIT_UNAVAILABLE else _LOG
    return Verdict(FAIL, f"{what}: {how}", advice)


def against(row: Row, verdict: Verdict, earlier: Mapping[str, Mapping[str, Any]], backend: Backend) -> Verdict:
    """The verdict in the light of other rows: scaling, and the card's collectives beside copies through the CPU.

    Args:
        row: that was made.
        verdict: of it alone.
        earlier: what rows have found, by name.
        backend: where cards are simulated, or share the processor, no speed is judged.
    """
    real = backend.exclusive_devices and not backend.simulate
    if verdict.verdict in (FAIL, NOT_RUN):
        return verdict
    if row.kind == "speed" and row.about["nproc"] > 1:
        alone = earlier.get(f"speed-{row.about['experiment']}-1", {}).get("values", {})
        if alone.get("samples_per_second"):
            nproc = row.about["nproc"]
            efficiency = verdict.values["samples_per_second"] / alone["samples_per_second"] / nproc
            verdict.values["efficiency"] = efficiency
            verdict.finding += f", {efficiency:.0%} of {nproc} times one card"
            if efficiency < _EFFICIENT and real:
                verdict.warn("compare the collectives' bandwidth, and that of the loaders (data.num_workers)")
    if row.name == "collectives-staged":
        own = {(line["name"], line["kib"]): line for line in earlier.get("collectives", {})
               .get("values", {}).get("lines", ())}  # fmt: skip
        slower = []
        for line in verdict.values["lines"]:
            mine = own.get((line["name"], line["kib"]))
            if mine is not None and "seconds" in mine:
                line["device_is_faster"] = line["seconds"] / mine["seconds"]
                if line["device_is_faster"] < 1 and line["kib"] >= _STAGED_FROM_KIB:
                    slower.append(f"{line['name']} {line['kib']} KiB")
        if slower and real:
            verdict.finding += f"; the card's own are slower than this: {', '.join(slower[:3])}"
            verdict.warn("see how the cards are connected, and the variables of the vendor's library")
    if row.kind == "doctor" and real:
        rates = verdict.values["flops"]
        known = [rate for rate in rates if rate]
        median = statistics.median(known) if known else 0
        slow = [f"rank {rank} at {rate / median:.0%}" for rank, rate in enumerate(rates)
                if rate and rate < _SLOW_CARD * median]  # fmt: skip
        if slow and verdict.verdict == PASS:
            verdict.finding = f"slow cards: {', '.join(slow)} of the median card's speed"
            verdict.warn("see whether another process uses the card, or it is throttled by heat")
    return verdict


def _doctor(made: Made) -> Verdict:
    report = read_json(made.folder / "doctor.json")
    if report is None:
        return broken_off("the doctor", made.ended)
    found = report["findings"]
    operators = (_of_check(rank, "operators") for rank in report["ranks"])
    values = {
        "operators": next(filter(None, operators), None),
        "flops": [_of_rank(rank, "burst", "flops") for rank in report["ranks"]],
        "free": [_of_rank(rank, "memory", "free") for rank in report["ranks"]],
        "cards": [_of_rank(rank, "device", "name") for rank in report["ranks"]],
        "process_group": report["process_group"],
    }
    verdict = {"ok": PASS, "warning": WARN}.get(report["verdict"], FAIL)
    told = [_finding(each) for each in found[:3]] or [f"{report['world_size']} ranks work together"]
    return Verdict(verdict, "; ".join(told), "; ".join(each["advice"] for each in found[:1]), values)


def _finding(found: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, found["ranks"]))
    return f"{found['check']}{f', rank {ranks}' if ranks else ''}: {found['finding']}"


def _of_check(rank: Mapping[str, Any], check: str) -> Mapping[str, Any]:
    return next((each["values"] for each in rank["checks"] if each["name"] == check), {})


def _of_rank(rank: Mapping[str, Any], check: str, key: str) -> Any:
    return _of_check(rank, check).get(key)


def _operators(made: Made) -> Verdict:
    if not made.lines:
        return broken_off("the training", made.ended)
    verdict = judge_operators(made.lines, made.row.about["precision"])
    if made.ended.code != EXIT_OK and verdict.verdict != FAIL:
        return broken_off("the training", made.ended)
    return verdict


def _collectives(made: Made) -> Verdict:
    lines = made.lines
    crashed = [f"{line['name']}, {line['detail']}: {line['crash']}" for line in lines if "crash" in line]
    measured = [dict(line) for line in lines if "seconds" in line]
    wrong = [f"{line['name']}, {line['kib']} KiB: wrong on rank {', '.join(map(str, line['wrong']))}"
             for line in measured if line["wrong"]]  # fmt: skip
    refused = [f"{line['name']}: {line['error']}" for line in lines if "error" in line]
    crashed += [each for each in refused if " fp32: " in each]
    result = read_json(made.folder / "result.json") or {}
    values = {"lines": measured, "process_group": result.get("process_group"), "fallback": result.get("fallback")}
    if crashed or wrong:
        advice = "broken collectives: try another version of the vendor's library, or backend.process_group=gloo"
        return Verdict(FAIL, "; ".join([*crashed, *wrong][:4]), advice, values)
    if made.ended.code != EXIT_OK or not measured:
        return broken_off("the collectives", made.ended)
    best = max(measured, key=lambda line: float(line["bus_bytes_per_second"]))
    speed = f"{size(best['bus_bytes_per_second'])}/s in {best['name']} of {best['kib']} KiB"
    verdict = Verdict(PASS, f"{len(measured)} right over {values['process_group']}; up to {speed}", "", values)
    if refused:
        verdict.finding += f"; refused: {'; '.join(refused)}"
        verdict.warn("gradients travel in fp32 here; what sends others cannot use this library")
    return verdict


def _parity(made: Made) -> Verdict:
    report = read_json(made.folder / "parity.json")
    if report is None:
        return broken_off("the comparison", made.ended)
    values = {"largest": {kind: each["relative"] for kind, each in report["largest"].items()}}
    if not report["agrees"]:
        advice = "what departs first is named: compare its operators in the rows above"
        return Verdict(FAIL, made.ended.said, advice, values)
    loss, gradient = (report["largest"][kind]["relative"] for kind in ("loss", "gradient"))
    return Verdict(PASS, f"losses within {loss:.1e} of the CPU's, gradients {gradient:.1e}", "", values)


_SPEED = ("step_seconds", "samples_per_second", "batch_size", "memory_by_rank", "slowest_step_seconds", "left_device",
          "train_samples")  # fmt: skip


def _speed(made: Made) -> Verdict:
    result = read_json(made.folder / "result.json")
    if made.ended.code != EXIT_OK or not result:
        return broken_off("the training", made.ended)
    values = {key: result[key] for key in _SPEED}
    memory = max((each for each in values["memory_by_rank"] if each), default=None)
    finding = f"{values['step_seconds'] * 1e3:.4g} ms a step, {values['samples_per_second']:.4g} samples/s"
    finding += f", {size(memory)} of memory" if memory else ""
    verdict = Verdict(PASS, finding, "", values)
    left = values["left_device"]
    if left and left["calls_per_step"]:
        moved = "" if left["bytes_per_step"] is None else f" and {size(left['bytes_per_step'])}"
        verdict.finding += f"; {left['calls_per_step']:.3g} calls{moved} a step leave the card, most of "
        verdict.finding += ", ".join(list(left["operators"])[:3])
        verdict.warn("these operators run on the CPU: docs/hardware.md")
    return verdict


def resumed(straight: Path, broken: Path) -> Verdict:
    """Whether a training that was killed and continued is the one that was not."""
    first, second = (read_losses(RunFolder(each)) for each in (straight, broken))
    if set(first) != set(second):
        lacking = sorted(set(first) ^ set(second))
        return Verdict(FAIL, f"steps {lacking} are not in both trainings", _LOG)
    apart = max(abs(second[step] - loss) / max(abs(loss), 1e-12) for step, loss in first.items())
    finding = f"one rank killed, its steps repeated: losses {'equal' if apart == 0 else f'within {apart:.1e}'}"
    verdict = PASS if apart <= _SAME_LOSS else WARN if apart <= _OTHER_LOSS else FAIL
    advice = "" if verdict == PASS else "the card's sums depend on their order, or its random state is not restored"
    return Verdict(verdict, finding, advice, {"relative": apart, "steps": len(first)})


def soaked(folder: Path, seconds: float, readings: Sequence[Sequence[Mapping[str, Any]]], backend: Backend) -> Verdict:
    """Whether the speed has stayed what it was, and how hot the cards have become.

    Args:
        folder: of the training.
        seconds: that it was to last.
        readings: of the vendor's monitor, over time.
        backend: see :func:`against`.
    """
    rates = [line["samples_per_second"] for line in read_lines(folder / "metrics.jsonl")][1:]
    if len(rates) < 4:
        return Verdict(WARN, f"{len(rates)} readings of the speed in {seconds / 60:.3g} min: too few to tell",
                       "raise task.soak_minutes")  # fmt: skip
    quarter = len(rates) // 4
    begun, ended = statistics.median(rates[:quarter]), statistics.median(rates[-quarter:])
    hottest = max((each["temperature_c"] for reading in readings for each in reading
                   if each.get("temperature_c") is not None), default=None)  # fmt: skip
    values = {"first_quarter": begun, "last_quarter": ended, "hottest_c": hottest, "minutes": seconds / 60}
    finding = f"{seconds / 60:.3g} min, then saved and ended as told; {begun:.4g} samples/s, {ended:.4g} at the end"
    finding += f", at most {hottest:.0f} C" if hottest is not None else ""
    verdict = Verdict(PASS, finding, "", values)
    if ended < _STEADY * begun and backend.exclusive_devices and not backend.simulate:
        verdict.warn("the cards become slower: look at their temperature and power, and at other processes")
    return verdict


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of training in a ``metrics.jsonl``; one that was cut off is left out."""
    records = read_records(path.read_bytes().splitlines() if path.is_file() else ())
    return [record for record in records if record["split"] == "train"]


JUDGES: Mapping[str, Any] = {
    "doctor": _doctor,
    "operators": _operators,
    "collectives": _collectives,
    "parity": _parity,
    "speed": _speed,
}
"""By the kind of a row; each is given what was made."""
