"""task=doctor on a rank: checks of its Python environment, its card and its job.

A rank runs :data:`CHECKS` in their order, and writes the results to its journal, which the parent reads
(:mod:`exp.checks.diagnosis`). The first check that needs torch imports it, because the parent, which takes the list of
checks from here, must not.
"""

from __future__ import annotations

import gc
import json
import logging
import platform
import shutil
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

from exp.checks.check import (
    OK,
    WARNING,
    CheckResult,
    Journal,
    fail,
    ok,
    skip,
)
from exp.config.check import check_data
from exp.console import format_bytes, format_flops
from exp.errors import ExpError, RunError, typed_message
from exp.hardware import cards
from exp.hardware.backend import PRECISIONS, device_backend
from exp.hardware.environment import SHM, package_versions, process_limits
from exp.hardware.matmul import multiply
from exp.runs.files import to_json
from exp.worker.session import check_nodes, make_store

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch.distributed import Store

    from exp.config.schema import ExpConfig
    from exp.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo

logger = logging.getLogger(__name__)

START, END = "start", "end"
"""Names of the first and the last line of a rank's journal."""
_GRACE_S = 5  # a hanging rank is ended this much after the others stop waiting, so they can record who is missing
_POLL_S = 0.1
_TRACEBACK = "see the traceback in the rank's log; check the vendor's monitor and, between nodes, ports and interfaces"
_OUT_OF_SERVICE = "the card computes wrongly: take it out of service"
_MIN_DISK = 2**30
_MIN_SHM = 2**26  # Docker's default
_MIN_OPEN_FILES = 1024
_MIN_UTILIZATION = 5
_READINGS = ("utilization_percent", "temperature_c", "power_w", "state")
_MIN_RATE = {True: 0.7, False: 0.25}  # least share of the median rate: on real cards; where ranks share a processor


class Check(NamedTuple):
    """One check of a rank.

    Attributes:
        body: runs the check; may raise any exception of the device's libraries.
        needs: names of checks that must pass first.
        joint: all ranks run the check together, or none does; before it they wait for each other.
        column: title of its column in the table, which shows ``shown`` of the result's values; empty: no column.
    """

    body: Callable[[CheckContext], CheckResult]
    needs: Sequence[str] = ()
    joint: bool = False
    column: str = ""


class CheckContext:
    """State that the checks of one rank share.

    The ranks exchange values through a store, because the process group itself is under test.

    Attributes:
        device: device of this rank; set by the check ``device``.
        described: description of the device and its host; set by the same check.
        peers: descriptions of all devices, by rank.
        missing_ranks: ranks that did not arrive within the timeout.
        passed: names of the checks that passed; ``group`` also if it fell back to another process group.
    """

    device: torch.device
    distributed: Distributed

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        self.config, self.folder, self.info, self.backend = config, folder, info, backend
        self.timeout_s: float = config.task.timeout_s
        self.described: dict[str, Any] = {}
        self.peers: dict[int, dict[str, Any]] = {}
        self.store: Store | None = None
        self.missing_ranks: list[int] = []
        self.passed: set[str] = set()
        self.journal = Journal(journal_of(folder, info.rank), self.timeout_s + _GRACE_S)
        self.journal.end(START, host=socket.gethostname())

    def run(self, name: str, check: Check) -> None:
        """Run one check and record its result; an exception makes the check fail, and the next check runs."""
        started = time.monotonic()
        self.journal.begin(name)
        try:
            result = self._blocked_by(name, check) or check.body(self)
        except Exception as error:  # noqa: BLE001 - a check that raises has failed; the next ones must still run
            if isinstance(error, ExpError):
                result = fail(error.finding, error.advice or _TRACEBACK)
            else:
                logger.error("check '%s' failed\n%s", name, traceback.format_exc())
                result = fail(typed_message(error).splitlines()[0], _TRACEBACK)
        logger.info("check '%s': %s: %s", name, result.status, result.finding)
        self.passed.update([name] if result.status in (OK, WARNING) else [])
        result.seconds = round(time.monotonic() - started, 3)
        self.journal.end(name, check=asdict(result))

    def _blocked_by(self, name: str, check: Check) -> CheckResult | None:
        """The result of a check that cannot run, here or on another rank; None: it can run."""
        missing_need = next((need for need in check.needs if need not in self.passed), None)
        needs_by_rank = self.exchange(name, missing_need) if check.joint else {}
        if missing_need is not None:
            return skip(f"needs the check '{missing_need}'")
        if not check.joint:
            return None
        if self.info.world_size == 1:
            return ok("one process: nothing to exchange")
        reasons = [f"rank {rank} failed '{need}'" for rank, need in needs_by_rank.items() if need is not None]
        reason = self.missing_text or "; ".join(reasons)
        return skip(reason) if reason else None

    def exchange(self, point: str, value: Any) -> dict[int, Any]:
        """Send ``value`` to the other ranks, and wait for their values.

        Args:
            point: name of the meeting point, the same on all ranks.
            value: what JSON can store.

        Returns:
            Values by rank, of the ranks that arrived within the timeout. The others are added to :attr:`missing_ranks`,
            and no later call waits for them.
        """
        if self.store is None:
            return {self.info.rank: value}
        self.store.set(f"doctor/{point}/{self.info.rank}", to_json(value))
        self.store.add(f"doctor/{point}/here/{self.info.rank}", 1)
        values, deadline = {}, time.monotonic() + self.timeout_s
        for rank in range(self.info.world_size):
            # ``add`` reads a counter without blocking, in all stores and versions of torch; ``get`` would block.
            while rank not in self.missing_ranks and not self.store.add(f"doctor/{point}/here/{rank}", 0):
                if time.monotonic() > deadline:
                    self.missing_ranks.append(rank)
                time.sleep(_POLL_S)
            if rank not in self.missing_ranks:
                values[rank] = json.loads(self.store.get(f"doctor/{point}/{rank}"))
        return values

    @property
    def missing_text(self) -> str:
        """Which ranks are missing, as text; empty: none."""
        return f"rank {', '.join(map(str, self.missing_ranks))} did not arrive" if self.missing_ranks else ""


def journal_of(folder: RunFolder, rank: int) -> Path:
    """Path of a rank's journal."""
    return folder.path / "doctor" / f"rank{rank}.jsonl"


def _packages(context: CheckContext) -> CheckResult:
    """Import torch; report the versions of Python, torch and the vendor's packages."""
    import torch

    versions = {"Python": platform.python_version(), "torch": torch.__version__, **context.backend.packages()}
    finding = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return CheckResult(OK, finding, values={**package_versions(), **versions})


def _device(context: CheckContext) -> CheckResult:
    """The device of this rank can be selected and computes; warn of environment variables that harm it."""
    import torch

    device = context.backend.set_device(context.info.local_rank)
    described = {**context.backend.device_info(device), "host": socket.gethostname(), "device": str(device)}
    described["identity"] = cards.identity(described) if not context.backend.capabilities.shared_device else None
    computed = float((torch.arange(4, dtype=torch.float32).to(device) * 2).sum().cpu())
    if computed != 12.0:
        return fail(f"{device} computes {computed} instead of 12", _OUT_OF_SERVICE)
    context.device, context.described = device, described
    number, name = described.get("card"), described["name"]
    finding = ", ".join(filter(None, (str(device), name, described["identity"])))
    card = name if number is None else f"#{number} {name}"
    return ok(finding, "; ".join(context.backend.warnings()), shown=card, **described)


def _ranks(context: CheckContext) -> CheckResult:
    """All ranks have started and reach this point within the timeout."""
    started = time.monotonic()
    context.store = make_store(context.info, timedelta(seconds=context.timeout_s))
    context.peers = {rank: device for rank, device in context.exchange("ranks", context.described).items() if device}
    waited = time.monotonic() - started
    if context.missing_ranks:  # skipped, not failed: the parent reports the failure for the missing rank
        return skip(f"waited {waited:.0f} s: {context.missing_text}")
    return ok(f"all {context.info.world_size} arrived within {waited:.1f} s", waited_s=round(waited, 3))


def _cards(context: CheckContext) -> CheckResult:
    """No two ranks use the same physical card."""
    if context.backend.capabilities.shared_device:
        return ok("ranks may share this device")
    identity = context.described["identity"]
    sharing = sorted({rank for pair in cards.shared_cards(context.peers) if context.info.rank in pair for rank in pair})
    if not sharing:
        return ok(f"only this rank uses {identity}")
    finding = f"ranks {', '.join(map(str, sharing))} share one card: {identity} on {context.described['host']}"
    advice = "give each rank its own card: the visible-devices variable must be the same on all ranks, without repeats"
    return fail(finding, advice, sharing=sharing)


def _memory(context: CheckContext) -> CheckResult:
    """Check the free memory of the device: below half a warning, below 5 % a failure.

    On a device that ranks share, such as the CPU, below 5 % a warning.
    """
    usage, row = context.backend.usage(), cards.monitor_row(context.described, context.backend.monitor()) or {}
    free, total = usage.get("free"), usage.get("total") or row.get("memory_total")
    if free is None and total is not None and row.get("memory_used") is not None:
        free = total - row["memory_used"]
    if free is None or total is None:
        return ok("this device does not report its memory")
    finding = f"{format_bytes(free)} free of {format_bytes(total)}"
    values = {"shown": format_bytes(free), "free": free, "total": total}
    full, exclusive = free < total * 0.05, not context.backend.capabilities.shared_device
    advice = "other processes hold the rest: the vendor's monitor or top shows them; wait until they have ended"
    if full and exclusive:
        return fail(finding, advice, **values)
    return ok(finding, advice * (free < total * 0.5 if exclusive else full), **values)


def _group(context: CheckContext) -> CheckResult:
    """The process group can be created, and is the requested one."""
    from exp.distributed import Distributed, process_group_source

    assert context.store is not None
    backend, info, started = context.backend, context.info, time.monotonic()
    timeout = timedelta(seconds=context.timeout_s)
    mixed = context.config.launcher.mixed
    if mixed:
        check_nodes(context.config, backend, info, context.store)
    context.distributed = Distributed.create(backend, context.store, info.rank, info.world_size, timeout, mixed)
    context.distributed.barrier()
    seconds, fallback = time.monotonic() - started, context.distributed.fallback
    name = context.distributed.process_group
    values: dict[str, Any] = {"process_group": name, "fallback": fallback, "shown": f"{seconds:.1f} s"}
    if fallback is None or mixed:
        return ok(f"{name} in {seconds:.1f} s", **values)
    context.passed.add("group")  # the fallback is reported as a failure, but the checks below can use the group
    finding = f"fell back: {fallback['used']} instead of {fallback['wanted']}, because {fallback['reason']}"
    if device_backend(backend.process_group(), backend.device_type) == "gloo":
        source = process_group_source(backend)
        return ok(finding, f"slow; leave out {source} to use the card's own collectives", **values)
    return fail(finding, "install the vendor's collectives: copies through the CPU are slow", **values)


def _all_reduce(context: CheckContext) -> CheckResult:
    """Sums over all ranks are correct, for tensors on the device and on the CPU."""
    import torch

    world_size, backend = context.info.world_size, context.backend
    expected, wrong = world_size * (world_size + 1) / 2, []
    sums: list[tuple[torch.device, Any]] = [(context.device, backend.collectives.all_reduce)]
    if backend.device_type != "cpu" or context.config.launcher.mixed:
        sums.append((torch.device("cpu"), context.distributed.sum))
    for device, all_reduce in sums:
        tensor = torch.full((1024,), context.info.rank + 1.0, device=device)
        all_reduce(tensor)
        backend.synchronize()  # a collective that hangs must hang in this check, not in a later one
        host = tensor.cpu()
        wrong += [f"{float(value):g} on {device}" for value in host[host != expected][:1]]
    if wrong:  # only after both sums: returning earlier would leave the other ranks waiting
        finding = f"the sum of 1 to {world_size} is {expected:g}, but {' and '.join(wrong)}"
        return fail(finding, "the collectives are broken: try another version of the vendor's library")
    return ok("right on device and CPU", shown="ok")


def _ddp(context: CheckContext) -> CheckResult:
    """A DDP-wrapped model starts with rank 0's weights, which are 1, and steps by the mean gradient of all ranks."""
    import torch

    from exp.engine.wrapper import wrap

    backend, rank_value, mean = context.backend, context.info.rank + 1.0, (context.info.world_size + 1) / 2
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.constant_(model.weight, rank_value)
    model = model.to(context.device)
    wrapped = wrap(model, "ddp", {}, backend, context.device, context.distributed.cpu_group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    wrapped(torch.full((1, 8), rank_value, device=context.device)).sum().backward()
    getattr(wrapped, "exchange_gradients", lambda: None)()
    backend.end_step(optimizer)
    stepped = model.weight.detach().cpu().unique().tolist()
    del wrapped, optimizer
    gc.collect()  # DDP's reducer must be freed before the process group is destroyed
    if stepped != [1.0 - mean]:
        finding = f"weights after a step: {stepped[:4]} instead of {1.0 - mean:g}"
        return fail(finding, "DDP does not keep the ranks equal: torch and the vendor's package may not match")
    return ok(f"gradients are the mean over {context.info.world_size} ranks", shown="ok")


def _autocast(context: CheckContext) -> CheckResult:
    """Matrix products are correct in every precision that the device supports, and the configured one is supported."""
    import torch

    backend, configured, correct = context.backend, context.config.precision, []
    for precision in filter(backend.supports, PRECISIONS):
        backend.set_precision(precision)
        ones = torch.ones(16, 16, device=context.device)
        with backend.autocast(precision):
            product = ones @ ones
        if not bool((product.float().cpu() == 16).all()):
            return fail(f"products in {precision} are wrong", "use another precision, and report it to the vendor")
        correct.append(precision)
    if configured not in correct:
        return fail(f"no {configured} on this device", f"use precision={' or '.join(correct)}")
    backend.set_precision(configured)  # for the checks that follow
    return ok(", ".join(correct), precisions=correct)


def _burst(context: CheckContext) -> CheckResult:
    """Multiply matrices with a known result for a short time, on all cards at once; the vendor's monitor must show a
    busy card.
    """
    backend, precision, burst_s = context.backend, context.config.precision, context.config.task.burst_s

    def read_monitor() -> list[dict[str, Any]]:
        time.sleep(burst_s / 2)
        return backend.monitor()

    with backend.autocast(precision), ThreadPoolExecutor(1) as pool:
        results = [multiply(backend, context.device, 0.01)]  # compile the kernels before the monitor is read
        reading = pool.submit(read_monitor)
        # Monitors report a mean over a short time and may answer slowly: keep the card busy until they have answered.
        while len(results) < 2 or not reading.done():
            results.append(multiply(backend, context.device, burst_s))
        row = cards.monitor_row(context.described, reading.result()) or {}
    rate, errors = results[1][0], [error for _, error in results if not error <= 1e-3]  # also NaN
    if errors:
        return fail(f"products are wrong by {errors[0]:g}", _OUT_OF_SERVICE)
    busy_percent = row.get("utilization_percent")
    utilization = None if busy_percent is None else f"{busy_percent:.0f} %"
    least = _MIN_RATE[bool(backend.visible_variables) and not backend.simulate]
    values: dict[str, Any] = {"flops": rate, "least": least, **{key: row.get(key) for key in _READINGS}}
    values["shown"] = ", ".join(filter(None, [format_flops(rate), utilization]))
    if busy_percent is not None and busy_percent < _MIN_UTILIZATION:
        finding = f"card idle while it should work: {utilization} on the monitor during the burst ({row['state']})"
        advice = "the work runs elsewhere: check the visible-devices variable; operators may fall back to the CPU"
        return fail(finding, advice, **values)
    return ok(f"{format_flops(rate)}FLOP/s in {precision}, the monitor shows {utilization or 'nothing'}", **values)


def _teardown(context: CheckContext) -> CheckResult:
    """The process group can be destroyed."""
    started = time.monotonic()
    context.distributed.barrier()
    context.backend.collectives.destroy()
    return ok(f"group destroyed in {time.monotonic() - started:.1f} s")


def _data(context: CheckContext) -> CheckResult:
    """The configured data can be read by this rank."""
    checked = check_data(context.config.data)
    text = "files are there, and look right" if checked else "this data set has no check of its files"
    return ok(f"{context.config.data.get('name')}: {text}")


def _limits(context: CheckContext) -> CheckResult:
    """Disk space for the run folder; shared memory and open files for data-loader workers."""
    free, path = shutil.disk_usage(context.folder.path).free, context.folder.path
    limits = process_limits()
    shm, files = limits["shm_total"], limits["open_files"]
    advice = []
    if free < _MIN_DISK:
        advice.append("checkpoints may not fit: make space, or set output_dir to another disk")
    if shm is None or shm <= _MIN_SHM or (limits["shm_free"] or 0) <= _MIN_SHM // 4:
        advice.append(f"loader workers, and some cards' collectives, need more {SHM}: docker run --shm-size=8g; in "
                      "Kubernetes an emptyDir of medium Memory")  # fmt: skip
    if files is not None and files < _MIN_OPEN_FILES:
        advice.append("ulimit -n 65536")
    finding = f"{format_bytes(free)} free for {path}, {SHM} {format_bytes(shm) if shm else 'missing'}, "
    finding += f"{'no limit of' if files is None else files} open files"
    return ok(finding, "; ".join(advice), free=free, **limits)


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


def diagnose(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Run all checks of one rank, also after failures, in the order in which a session sets up a run.

    Raises:
        RunError: a rank is missing. The launcher then ends the ranks that hang.
    """
    context = CheckContext(config, folder, info, backend)
    for name, check in CHECKS.items():
        context.run(name, check)
    context.journal.end(END, absent=context.missing_ranks)
    if context.missing_ranks:
        context.exchange("end", None)  # let the other ranks finish their journals before the launcher ends them
        raise RunError(f"not all ranks took part: {context.missing_text}")
