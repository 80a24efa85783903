"""task=doctor: each rank checks its Python environment, its card and its job; the parent evaluates the results.

Also task=env, which describes this machine and this installation as plain text, to paste into a bug report.

:data:`CHECKS` has all checks in their order. The first check that needs torch imports it. The parent reads only the
journals of the ranks.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import platform
import shutil
import socket
import statistics
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Sequence

import yaml

from exp import console
from exp.checks.check import FAILED, OK, SKIPPED, WARNING, Answer, Journal, fail, finish, ok, skip, why_ended
from exp.config.check import check_data
from exp.console import format_bytes, format_flops
from exp.errors import ExpError, RunError
from exp.hardware import cards
from exp.hardware.backend import PRECISIONS, device_backend
from exp.hardware.environment import SHM, describe_environment, package_versions, process_limits, reported_variables
from exp.hardware.matmul import multiply
from exp.hardware.registry import create_backend, installed
from exp.runs.files import to_json, write_json
from exp.runs.folder import empty_result
from exp.worker.session import make_store

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.distributed import Store

    from exp.config.schema import ExpConfig
    from exp.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo

__all__ = ["CHECKS", "END", "START", "begin", "describe", "diagnose", "end", "journal_of"]

logger = logging.getLogger(__name__)

START, END = "start", "end"
"""Names of the first and the last line of a rank's journal."""
_OTHER_NODES_S = 5.0
_LOG = "look at logs/rank<n>.log"
_GRACE_S = 5  # a hanging rank is ended this much after the others stop waiting, so they can record who is missing
_POLL_S = 0.1
_TRACEBACK = "see the traceback in the rank's log; check the vendor's monitor and, between nodes, ports and interfaces"
_OUT_OF_SERVICE = "the card computes wrongly: take it out of service"
_LITTLE_SPACE = 2**30
_LITTLE_SHM = 2**26  # Docker's default
_FEW_FILES = 1024
_IDLE_PERCENT = 5
_READINGS = ("utilization_percent", "temperature_c", "power_w", "state")
_SLOW = {True: 0.7, False: 0.25}  # least share of the median rate: on real cards; where ranks share a processor


class Check(NamedTuple):
    """One check of a rank.

    Attributes:
        body: runs the check; may raise any exception of the device's libraries.
        needs: names of checks that must pass first.
        joint: all ranks run the check together, or none does; before it they wait for each other.
        column: title of its column in the table, which shows ``shown`` of the answer's values; empty: no column.
    """

    body: Callable[[Bench], Answer]
    needs: Sequence[str] = ()
    joint: bool = False
    column: str = ""


class Bench:
    """State that the checks of one rank share.

    The ranks exchange values through a store, because the process group itself is under test.

    Attributes:
        device: device of this rank; set by the check ``device``.
        described: description of the device and its host; set by the same check.
        peers: descriptions of all devices, by rank.
        absent: ranks that did not arrive within the timeout.
        usable: names of the checks that passed; ``group`` also if it fell back to another process group.
    """

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        self.config, self.folder, self.info, self.backend = config, folder, info, backend
        self.timeout_s: float = config.task.timeout_s
        self.device: torch.device
        self.described: dict[str, Any] = {}
        self.peers: dict[int, dict[str, Any]] = {}
        self.distributed: Distributed | None = None
        self.store: Store | None = None
        self.absent: list[int] = []
        self.usable: set[str] = set()
        self.journal = Journal(journal_of(folder, info.rank), self.timeout_s + _GRACE_S)
        self.journal.end(START, host=socket.gethostname())

    def make(self, name: str, check: Check) -> None:
        """Run one check and record its answer; an exception makes the check fail, and the next check runs."""
        started = time.monotonic()
        self.journal.begin(name)
        try:
            answer = self._obstacle(name, check) or check.body(self)
        except ExpError as error:
            finding, _, advice = str(error).partition("; ")
            answer = fail(finding, advice or _TRACEBACK)
        except Exception as error:  # noqa: BLE001 - a check that raises has failed; the next ones must still run
            logger.error("check '%s' failed\n%s", name, traceback.format_exc())
            answer = fail(f"{type(error).__name__}: {error}".splitlines()[0], _TRACEBACK)
        logger.info("check '%s': %s: %s", name, answer.status, answer.finding)
        if answer.status in (OK, WARNING):
            self.usable.add(name)
        answer.seconds = round(time.monotonic() - started, 3)
        self.journal.end(name, answer=answer.__dict__)

    def _obstacle(self, name: str, check: Check) -> Answer | None:
        """The answer of a check that cannot run, here or on another rank; None: it can run."""
        lacking = next((need for need in check.needs if need not in self.usable), None)
        found = self.meet(name, lacking) if check.joint else {}
        if lacking is not None:
            return skip(f"needs the check '{lacking}'")
        if check.joint and self.info.world_size == 1:
            return ok("one process: nothing to exchange")
        reasons = [f"rank {rank} failed '{need}'" for rank, need in found.items() if need is not None]
        reasons = [self.missing] if check.joint and self.absent else reasons
        return skip("; ".join(reasons)) if reasons else None

    def meet(self, point: str, value: Any) -> dict[int, Any]:
        """Send ``value`` to the other ranks, and wait for their values.

        Args:
            point: name of the meeting point, the same on all ranks.
            value: what JSON can store.

        Returns:
            Values by rank, of the ranks that arrived within the timeout. The others are added to :attr:`absent`, and
            no later call waits for them.
        """
        if self.store is None:
            return {self.info.rank: value}
        self.store.set(f"doctor/{point}/{self.info.rank}", to_json(value))
        self.store.add(f"doctor/{point}/here/{self.info.rank}", 1)
        found, deadline = {}, time.monotonic() + self.timeout_s
        for rank in range(self.info.world_size):
            # ``add`` reads a counter without blocking, in all stores and versions of torch; ``get`` would block.
            while rank not in self.absent and not self.store.add(f"doctor/{point}/here/{rank}", 0):
                if time.monotonic() > deadline:
                    self.absent.append(rank)
                time.sleep(_POLL_S)
            if rank not in self.absent:
                found[rank] = json.loads(self.store.get(f"doctor/{point}/{rank}"))
        return found

    @property
    def missing(self) -> str:
        """Which ranks are missing, as text; empty: none."""
        return f"rank {', '.join(map(str, self.absent))} did not arrive" if self.absent else ""


def journal_of(folder: RunFolder, rank: int) -> Path:
    """Path of a rank's journal."""
    return folder.path / "doctor" / f"rank{rank}.jsonl"


def diagnose(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Run all checks of one rank, also after failures, in the order in which a session sets up a run.

    Raises:
        RunError: a rank is missing. The launcher then ends the ranks that hang.
    """
    bench = Bench(config, folder, info, backend)
    for name, check in CHECKS.items():
        bench.make(name, check)
    bench.journal.end(END, absent=bench.absent)
    if bench.absent:
        bench.meet("end", None)  # let the other ranks finish their journals before the launcher ends them
        raise RunError(f"not all ranks took part: {bench.missing}")


def _packages(bench: Bench) -> Answer:
    """Import torch; report the versions of Python, torch and the vendor's packages."""
    import torch

    shown = {"Python": platform.python_version(), "torch": torch.__version__, **bench.backend.packages()}
    finding = ", ".join(f"{name} {version}" for name, version in shown.items() if version)
    values: Any = {**package_versions(), **shown}
    return ok(finding, **values)


def _device(bench: Bench) -> Answer:
    """The device of this rank can be selected and computes; warn of environment variables that harm it."""
    import torch

    device = bench.backend.set_device(bench.info.local_rank)
    described = {**bench.backend.device_info(device), "host": socket.gethostname(), "device": str(device)}
    described["identity"] = cards.identity(described) if not bench.backend.capabilities.shared_device else None
    answer = float((torch.arange(4, dtype=torch.float32).to(device) * 2).sum().cpu())
    if answer != 12.0:
        return fail(f"{device} computes {answer} instead of 12", _OUT_OF_SERVICE)
    bench.device, bench.described = device, described
    number, name = described.get("card"), described["name"]
    finding = ", ".join(part for part in (str(device), name, described["identity"]) if part)
    shown = name if number is None else f"#{number} {name}"
    return ok(finding, "; ".join(bench.backend.warnings()), shown=shown, **described)


def _ranks(bench: Bench) -> Answer:
    """All ranks have started and reach this point within the timeout."""
    started = time.monotonic()
    bench.store = make_store(bench.info, timedelta(seconds=bench.timeout_s))
    bench.peers = {rank: device for rank, device in bench.meet("ranks", bench.described).items() if device}
    waited = time.monotonic() - started
    if bench.absent:  # skipped, not failed: the parent reports the failure for the missing rank
        return skip(f"waited {waited:.0f} s: {bench.missing}")
    return ok(f"all {bench.info.world_size} arrived within {waited:.1f} s", waited_s=round(waited, 3))


def _cards(bench: Bench) -> Answer:
    """No two ranks use the same physical card."""
    if bench.backend.capabilities.shared_device:
        return ok("ranks may share this device")
    own = bench.described["identity"]
    sharing = sorted({rank for pair in cards.shared_cards(bench.peers) if bench.info.rank in pair for rank in pair})
    if not sharing:
        return ok(f"only this rank uses {own}")
    finding = f"ranks {', '.join(map(str, sharing))} share one card: {own} on {bench.described['host']}"
    advice = "give each rank its own card: the visible-devices variable must be the same on all ranks, without repeats"
    return fail(finding, advice, sharing=sharing)


def _memory(bench: Bench) -> Answer:
    """Check the free memory of the device: below half a warning, below 5 % a failure.

    On a device that ranks share, such as the CPU, below 5 % a warning.
    """
    usage, row = bench.backend.usage(), cards.monitor_row(bench.described, bench.backend.monitor()) or {}
    free, total = usage.get("free"), usage.get("total") or row.get("memory_total")
    if free is None and total is not None and row.get("memory_used") is not None:
        free = total - row["memory_used"]
    if free is None or total is None:
        return ok("this device does not report its memory")
    finding, values = (
        f"{format_bytes(free)} free of {format_bytes(total)}",
        {"shown": format_bytes(free), "free": free, "total": total},
    )
    full, exclusive = free < total * 0.05, not bench.backend.capabilities.shared_device
    advice = "other processes hold the rest: the vendor's monitor or top shows them; wait until they have ended"
    if full and exclusive:
        return fail(finding, advice, **values)
    return ok(finding, advice * (free < total * 0.5 if exclusive else full), **values)


def _group(bench: Bench) -> Answer:
    """The process group can be created, and is the requested one."""
    from exp.distributed import Distributed, process_group_source

    assert bench.store is not None
    backend, info, started = bench.backend, bench.info, time.monotonic()
    timeout = timedelta(seconds=bench.timeout_s)
    bench.distributed = Distributed.create(backend, bench.store, info.rank, info.world_size, timeout)
    bench.distributed.barrier()
    seconds = time.monotonic() - started
    fallback = bench.distributed.fallback
    name = bench.distributed.process_group
    values: dict[str, Any] = {"process_group": name, "fallback": fallback, "shown": f"{seconds:.1f} s"}
    if fallback is None:
        return ok(f"{name} in {seconds:.1f} s", **values)
    bench.usable.add("group")  # the fallback is reported as a failure, but the checks below can use the group
    finding = f"fell back: {fallback['used']} instead of {fallback['wanted']}, because {fallback['reason']}"
    group, source = backend.process_group(), process_group_source(backend)
    if device_backend(group, backend.device_type) == "gloo":
        return ok(finding, f"slow; leave out {source} to use the card's own collectives", **values)
    return fail(finding, "install the vendor's collectives: copies through the CPU are slow", **values)


def _all_reduce(bench: Bench) -> Answer:
    """Sums over all ranks are correct, for tensors on the device and on the CPU."""
    import torch

    assert bench.distributed is not None
    world_size, backend = bench.info.world_size, bench.backend
    right = world_size * (world_size + 1) / 2
    wrong = []
    for place in dict.fromkeys((bench.device, torch.device("cpu"))):
        tensor = torch.full((1024,), bench.info.rank + 1.0, device=place)
        on_host = place.type == "cpu" and backend.device_type != "cpu"
        (bench.distributed.sum if on_host else backend.collectives.all_reduce)(tensor)
        backend.synchronize()  # a collective that hangs must hang in this check, not in a later one
        host = tensor.cpu()
        wrong += [f"{float(value):g} on {place}" for value in host[host != right][:1]]
    if wrong:  # only after both sums: returning earlier would leave the other ranks waiting
        finding = f"the sum of 1 to {world_size} is {right:g}, but {' and '.join(wrong)}"
        return fail(finding, "the collectives are broken: try another version of the vendor's library")
    return ok("right on device and CPU", shown="ok")


def _ddp(bench: Bench) -> Answer:
    """A DDP-wrapped model starts with rank 0's weights, which are 1, and steps by the mean gradient of all ranks."""
    import torch

    backend, own, mean = bench.backend, bench.info.rank + 1.0, (bench.info.world_size + 1) / 2
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.constant_(model.weight, own)
    model = model.to(bench.device)
    wrapped = backend.collectives.ddp_class(model, **bench.backend.ddp_kwargs(bench.device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    wrapped(torch.full((1, 8), own, device=bench.device)).sum().backward()
    getattr(wrapped, "exchange_gradients", lambda: None)()
    backend.end_step(optimizer)
    stepped = model.weight.detach().cpu().unique().tolist()
    del wrapped, optimizer
    gc.collect()  # DDP's reducer must be freed before the process group is destroyed
    if stepped != [1.0 - mean]:
        finding = f"weights after a step: {stepped[:4]} instead of {1.0 - mean:g}"
        return fail(finding, "DDP does not keep the ranks equal: torch and the vendor's package may not match")
    return ok(f"gradients are the mean over {bench.info.world_size} ranks", shown="ok")


def _autocast(bench: Bench) -> Answer:
    """Matrix products are correct in every precision that the device supports, and the configured one is supported."""
    import torch

    backend, wanted, works = bench.backend, bench.config.precision, []
    for precision in filter(backend.supports, PRECISIONS):
        backend.set_precision(precision)
        ones = torch.ones(16, 16, device=bench.device)
        with backend.autocast(precision):
            product = ones @ ones
        if not bool((product.float().cpu() == 16).all()):
            return fail(f"products in {precision} are wrong", "use another precision, and report it to the vendor")
        works.append(precision)
    if wanted not in works:
        return fail(f"no {wanted} on this device", f"use precision={' or '.join(works)}")
    backend.set_precision(wanted)  # for the checks that follow
    return ok(", ".join(works), precisions=works)


def _burst(bench: Bench) -> Answer:
    """Multiply matrices with a known result for a short time, on all cards at once; the vendor's monitor must show a
    busy card.
    """
    backend, precision, burst_s = bench.backend, bench.config.precision, bench.config.task.burst_s

    def look() -> list[dict[str, Any]]:
        time.sleep(burst_s / 2)
        return backend.monitor()

    with backend.autocast(precision), ThreadPoolExecutor(1) as pool:
        results = [multiply(backend, bench.device, 0.01)]  # compile the kernels before the monitor is read
        seen = pool.submit(look)
        # Monitors report a mean over a short time and may answer slowly: keep the card busy until they have answered.
        while len(results) < 2 or not seen.done():
            results.append(multiply(backend, bench.device, burst_s))
        row = cards.monitor_row(bench.described, seen.result()) or {}
    rate = results[1][0]
    for _, error in results:
        if not error <= 1e-3:  # also true for NaN
            return fail(f"products are wrong by {error:g}", _OUT_OF_SERVICE)
    used, least = row.get("utilization_percent"), _SLOW[bool(backend.visible_variables) and not backend.simulate]
    watched = "" if used is None else f"{used:.0f} %"
    values: dict[str, Any] = {"flops": rate, "least": least, **{key: row.get(key) for key in _READINGS}}
    values["shown"] = f"{format_flops(rate)}{f', {watched}' * bool(watched)}"
    if used is not None and used < _IDLE_PERCENT:
        finding = f"card idle while it should work: {watched} on the monitor during the burst ({row['state']})"
        advice = "the work runs elsewhere: check the visible-devices variable; operators may fall back to the CPU"
        return fail(finding, advice, **values)
    return ok(f"{format_flops(rate)}FLOP/s in {precision}, the monitor shows {watched or 'nothing'}", **values)


def _teardown(bench: Bench) -> Answer:
    """The process group can be destroyed."""
    assert bench.distributed is not None
    started = time.monotonic()
    bench.distributed.barrier()
    bench.backend.collectives.destroy()
    return ok(f"group destroyed in {time.monotonic() - started:.1f} s")


def _data(bench: Bench) -> Answer:
    """The configured data can be read by this rank."""
    checked = check_data(bench.config.data)
    found = "files are there, and look right" if checked else "this data set has no check of its files"
    return ok(f"{bench.config.data.get('name')}: {found}")


def _limits(bench: Bench) -> Answer:
    """Disk space for the run folder; shared memory and open files for data-loader workers."""
    path = bench.folder.path
    values: dict[str, Any] = {**process_limits(), "free": shutil.disk_usage(path).free}
    free, shm, files = values["free"], values["shm_total"], values["open_files"]
    advice = []
    if free < _LITTLE_SPACE:
        advice.append("checkpoints may not fit: make space, or set output_dir to another disk")
    if shm is None or shm <= _LITTLE_SHM or (values["shm_free"] or 0) <= _LITTLE_SHM // 4:
        advice.append(f"loader workers, and some cards' collectives, need more {SHM}: docker run --shm-size=8g; in "
                      "Kubernetes an emptyDir of medium Memory")  # fmt: skip
    if files is not None and files < _FEW_FILES:
        advice.append("ulimit -n 65536")
    finding = f"{format_bytes(free)} free for {path}, {SHM} {format_bytes(shm) if shm else 'missing'}, "
    return ok(f"{finding}{'no limit of' if files is None else files} open files", "; ".join(advice), **values)


CHECKS: dict[str, Check] = {
    "packages": Check(_packages),
    "device": Check(_device, needs=("packages",), column="card"),
    "ranks": Check(_ranks, needs=("packages",), joint=True),
    "cards": Check(_cards, needs=("device",)),
    "memory": Check(_memory, needs=("device",), column="free"),
    "group": Check(_group, needs=("device", "cards", "ranks"), joint=True, column="group"),
    "all_reduce": Check(_all_reduce, needs=("group",), joint=True, column="reduce"),
    "ddp": Check(_ddp, needs=("all_reduce",), joint=True, column="ddp"),
    "autocast": Check(_autocast, needs=("device",)),
    "burst": Check(_burst, needs=("device",), column="FLOP/s"),
    "teardown": Check(_teardown, needs=("ddp",), joint=True),
    "data": Check(_data),
    "limits": Check(_limits),
}
"""All checks, in the order in which they run (docs/hardware/checks.md)."""


@dataclass
class _Rank:
    """One rank, as its journal describes it.

    Attributes:
        rank: number of the rank.
        host: its host; None: it has no journal.
        checks: answers by name of the check, in their order; :func:`judge` adds the checks that the rank did not reach.
        running: journal line of the check that started but did not finish; None: there is none.
        absent: ranks for which it waited until the timeout; None: it did not finish its checks.
    """

    rank: int
    host: str | None = None
    checks: dict[str, Answer] = field(default_factory=dict)
    running: Mapping[str, Any] | None = None
    absent: list[int] | None = None

    @property
    def verdict(self) -> tuple[str, str]:
        """The worst status, and the first check with that status; ``skipped`` counts as worse than ``ok``."""
        found = {answer.status: name for name, answer in reversed(list(self.checks.items()))}
        return next(((status, found[status]) for status in (FAILED, WARNING, SKIPPED) if status in found), (OK, ""))


def begin(config: ExpConfig, folder: RunFolder) -> None:
    """Delete the results of an earlier doctor run in this folder, and print what will be checked."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    (folder.path / "doctor.json").unlink(missing_ok=True)
    console.make_console().print(
        f"doctor: {config.nproc * config.launcher.nnodes} x {config.backend.name}, {config.precision}; up to "
        f"{config.task.timeout_s} s for each check\nrun folder: {console.display_path(folder.path)}", soft_wrap=True
    )  # fmt: skip


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int:
    """Evaluate the checks, print the result and write ``doctor.json``; returns the exit code.

    ``findings`` in ``doctor.json`` are the failures, then the warnings, each in the order of the checks. ``ranks`` of a
    finding are all that have the same text.
    """
    started = folder.config.stat().st_mtime
    ranks = _examined(config, folder, outcome, started)
    found: dict[tuple[str, ...], list[int]] = {}
    for status, name, rank in itertools.product((FAILED, WARNING), CHECKS, ranks):
        each = rank.checks[name]
        if each.status == status:
            found.setdefault((name, status, each.finding, each.advice), []).append(rank.rank)
    findings = [dict(zip(("check", "status", "finding", "advice", "ranks"), (*key, who))) for key, who in found.items()]
    said = [Answer(status, f"{name}, rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {text}", advice)
            for (name, status, text, advice), who in found.items()]  # fmt: skip
    wall_s = round(time.time() - started, 1)
    work = f"{len(ranks)} ranks work together" if len(ranks) > 1 else "1 process works"
    first = said[0] if said else ok(work)
    text = "; ".join(each.finding for each in said[:3]) or work
    answer = Answer(first.status, text, first.advice, {"table": list(map(_line_of, ranks))})
    if answer.status != FAILED:
        said.append(ok(f"{work} on {config.backend.name}, {wall_s:.0f} s"))
    code = finish(config, folder, answer, said, wall_s=wall_s)
    as_json = [{**asdict(rank), "verdict": rank.verdict[0], "checks": [{"name": name, **asdict(rank.checks[name])}
                for name in CHECKS]} for rank in ranks]  # fmt: skip
    write_json(folder.path / "doctor.json", {"verdict": answer.status, "findings": findings, "ranks": as_json})
    return (outcome.exit_code or code) if answer.status == FAILED else code


def _examined(config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float) -> list[_Rank]:
    """All ranks, with an answer to each check; each failure is reported for the rank that caused it.

    If a rank hangs or dies in a joint check, the failures of the other ranks in that check become skips. A rank for
    which others waited until the timeout fails, even if it arrived later.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        started: when it began, in seconds since the epoch.
    """
    ended, limit_s = time.time(), config.task.timeout_s
    culprits: dict[str, list[int]] = {}  # ranks that hung or died, by the check in which they did
    ranks = _read(folder, config.nproc * config.launcher.nnodes, wait=config.launcher.nnodes > 1)
    for rank in ranks:
        if rank.absent is None:
            name, answer = _how_it_ended(rank, outcome, limit_s, started, ended)
            rank.checks[name] = answer
            if answer.status == FAILED:
                culprits.setdefault(name, []).append(rank.rank)
        rank.checks = {name: rank.checks.get(name) or skip("the rank ended before") for name in CHECKS}
    for (name, blamed), rank in itertools.product(culprits.items(), ranks):
        if CHECKS[name].joint and rank.rank not in blamed and rank.checks[name].status == FAILED:
            rank.checks[name] = skip(f"failed because of rank {blamed[0]}: {rank.checks[name].finding}")
    for number in {absent for rank in ranks for absent in rank.absent or ()}:
        if ranks[number].verdict[0] != FAILED:
            finding = f"arrived too late: other ranks waited {limit_s} s for it"
            advice = f"{_LOG}, and at its node; if it is only slow, raise task.timeout_s"
            ranks[number].checks["ranks"] = fail(finding, advice)
    _compare(ranks)
    return ranks


def _read(folder: RunFolder, world_size: int, wait: bool) -> list[_Rank]:
    """Read the journals; with ``wait``, give ranks of other nodes some seconds to finish theirs."""
    deadline = time.monotonic() + (_OTHER_NODES_S if wait else 0)
    while True:
        ranks = []
        for number in range(world_size):
            ended, running = Journal.read(journal_of(folder, number))
            found = {line.pop("name"): line for line in ended}
            host, absent = found.pop(START, {}).get("host"), found.pop(END, {}).get("absent")
            checks = {name: Answer(**line["answer"]) for name, line in found.items()}
            ranks.append(_Rank(number, host, checks, running, absent))
        if all(rank.absent is not None for rank in ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.2)


def _how_it_ended(rank: _Rank, outcome: Outcome, limit_s: float, started: float, ended: float) -> tuple[str, Answer]:
    """The check in which an unfinished rank ended, and an answer with the reason."""
    failure = next((each for each in outcome.failures if each.rank == rank.rank), None)
    why, advice = None, f"{_LOG}, logs/agent*.log and the node of the rank"
    name = next((each for each in CHECKS if each not in rank.checks), END) if rank.host is not None else "ranks"
    if rank.running is not None:
        name, advice = rank.running["name"], f"{_LOG} for the stack; if it is only slow, raise task.timeout_s"
        killed = failure.message if failure is not None and failure.exit_code < 0 else None
        why = why_ended(rank.running, killed, limit_s, ended)
    elif rank.host is None and failure is not None:
        why = f"ended before its first check: {failure.message.splitlines()[0]}"
    elif rank.host is None and (not outcome.failures or ended - started >= limit_s):  # else it was ended at its start
        why = f"never arrived: {(outcome.detail or f'it left no record within {limit_s} s').splitlines()[0]}"
    return name, fail(why, advice) if why else skip("ended with the job, because another rank stopped")


def _compare(ranks: Sequence[_Rank]) -> None:
    """Warn of ranks whose package versions differ from rank 0's, and of cards far slower than the median."""
    reference = ranks[0].checks["packages"].values
    rates = [rank.checks["burst"].values.get("flops") for rank in ranks]
    median = statistics.median(list(filter(None, rates)) or [0])
    for rank, rate in zip(ranks, rates):
        versions, burst = rank.checks["packages"], rank.checks["burst"]
        own = versions.values
        differ = [name for name in sorted({*own, *reference}) if own.get(name) != reference.get(name)]
        if own and reference and differ and versions.status == OK:
            finding = ", ".join(f"{each} {own.get(each)} (rank 0: {reference.get(each)})" for each in differ)
            rank.checks["packages"] = ok(finding, "install the same versions on all nodes", **own)
        if rate and rate < burst.values["least"] * median:
            finding = f"{format_flops(rate)}FLOP/s, {rate / median:.0%} of the median card's"
            advice = "check whether another process uses the card, or heat throttles it"
            rank.checks["burst"] = ok(finding, advice, **burst.values)


def _line_of(rank: _Rank) -> dict[str, Any]:
    """A row of the doctor's table."""
    shown = {check.column: rank.checks[name].values.get("shown", "") for name, check in CHECKS.items() if check.column}
    status, name = rank.verdict
    verdict = f"{status}: {name}" if status in (FAILED, WARNING) else "not all checked" if name else OK
    return {"rank": rank.rank, "host": (rank.host or "-").split(".")[0], **shown, "verdict": verdict}


# -- task=env ----------------------------------------------------------------------------------------------------------


def describe(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Print the facts and write them to ``env.json``; a fact that cannot be determined is replaced by the reason."""
    del info
    environment = {
        **describe_environment(backend, []),
        "backends": _backends(config, backend),
        "backend_packages": backend.packages(),
        "monitor": backend.monitor(),
        "variables": [f"{name}={value}" for name, value in reported_variables(backend).items()],
        "limits": process_limits(),
    }
    write_json(folder.env, environment)
    text = yaml.safe_dump(json.loads(to_json(environment)), sort_keys=False, allow_unicode=True, width=1000)
    console.make_console().print(text, highlight=False, markup=False, soft_wrap=True, end="")
    folder.write_result({**empty_result(config), "status": "completed"})


def _backends(config: ExpConfig, chosen: Backend) -> dict[str, str]:
    """By name of each installed backend its number of devices, or the reason why it cannot be used, as text."""
    found = {}
    for name in sorted({*installed(), config.backend.name}):
        try:
            backend = chosen if name == config.backend.name else create_backend({"_target_": name, "name": name})
            reason = backend.unavailable_reason()
            found[name] = f"not available: {reason}" if reason else f"available, {backend.device_count()} devices"
        except (ExpError, TypeError) as error:  # backends of other packages may be broken
            found[name] = f"does not load: {error}"
    return found
