"""task=doctor on one rank: its interpreter, its card, and the job that it is part of. The parent judges.

Each check is a function of the rank's bench (:class:`exp.checks.bench.Bench`); :data:`CHECKS` has their order. Torch is
imported by the first check that needs it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Iterator

from exp.checks.bench import ALONE, Bench, Check
from exp.checks.check import Answer, fail, ok, skip
from exp.config.check import check_data
from exp.console import flops, size
from exp.environment import SHM, package_versions, process_limits
from exp.errors import RunError
from exp.hardware import cards
from exp.hardware.backend import PRECISIONS
from exp.hardware.collectives import ddp_arguments, device_part_of
from exp.hardware.numerics import long_product
from exp.launcher.rank import make_store, this_host

if TYPE_CHECKING:
    import torch

    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["CHECKS", "diagnose", "operators"]

_PROBE_BYTES = 2**20
_LITTLE_SPACE = 2**30
_LITTLE_SHM = 2**26  # what a container gets where nobody asks for more
_FEW_FILES = 1024
_IDLE_PERCENT = 5
_MONITOR_PATIENCE_S = 10
_LARGE = 2**20
_SHOWN = 3


def diagnose(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Make all checks of one rank, whatever becomes of each, in the steps that a session takes when it opens.

    Raises:
        RunError: a rank is missing, or the journal could not be written; the launcher then ends those that hang.
    """
    bench = Bench(config, folder, info, backend)
    for name, check in CHECKS.items():
        bench.make(name, check)
    unwritable = bench.finish()
    if bench.absent:
        bench.exchange("end", {})  # the others are to finish their journals, too, before the launcher ends them
        raise RunError(f"not all ranks took part: {bench.describe_absent()}")
    if unwritable is not None:
        raise RunError(f"cannot write {bench.journal.path}: {unwritable.strerror}; make space, or set output_dir")


def _interpreter(_: Bench) -> Answer:
    version = platform.python_version()
    return ok(f"Python {version}, {sys.executable}", python=version, executable=sys.executable,
              platform=platform.platform())  # fmt: skip


def _packages(bench: Bench) -> Answer:
    """Torch imports; versions of it and of the vendor's packages."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return fail(f"torch does not import: {error}", "install the torch that goes with this device")
    own = bench.backend.packages()
    versions: dict[str, Any] = {**package_versions(), "torch": torch.__version__, **own}
    shown = {"torch": versions["torch"], **own}
    return ok(", ".join(f"{name} {version}" for name, version in shown.items() if version), **versions)


def _device(bench: Bench) -> Answer:
    """The device of this rank can be selected and computes."""
    import torch

    device = bench.backend.set_device(bench.info.local_rank)
    described = {**bench.backend.describe(device), "host": this_host(), "device": str(device)}
    described["identity"] = cards.identity(described) if bench.backend.exclusive_devices else None
    answer = float((torch.arange(4, dtype=torch.float32).to(device) * 2).sum().cpu())
    if answer != 12.0:
        return fail(f"{device} gives {answer} for 12", "the card computes wrongly: take it out of service")
    bench.device, bench.described = device, described
    which = (str(device), described["name"], described["identity"])
    return ok(", ".join(part for part in which if part), **described)


def _variables(bench: Bench) -> Answer:
    """No environment variable does harm, or nothing, where the user expects something of it."""
    parts = [caution.partition("; ") for caution in bench.backend.cautions()]
    finding = "; ".join(part[0] for part in parts) or "none that does harm"
    return ok(finding, "; ".join(part[2] or part[0] for part in parts))


def _ranks(bench: Bench) -> Answer:
    """All ranks have started, and reached this point within the timeout."""
    world_size = bench.info.world_size
    if world_size == 1:
        bench.peers = {0: bench.described}
        return ok(ALONE)
    started = time.monotonic()
    bench.store = make_store(bench.info, bench.timeout)
    arrived = bench.exchange("ranks", {"device": bench.described})
    bench.peers = {rank: told["device"] for rank, told in arrived.items() if told["device"]}
    waited = time.monotonic() - started
    if bench.absent:  # not this rank's failure: the parent lays it at the door of the one that is missing
        return skip(f"waited {waited:.0f} s: {bench.describe_absent()}")
    return ok(f"all {world_size} arrived within {waited:.1f} s", waited_s=round(waited, 3))


def _cards(bench: Bench) -> Answer:
    """No two ranks have one physical card."""
    if not bench.backend.exclusive_devices:
        return ok("ranks share this device, as they may")
    own = bench.described["identity"]
    sharing = sorted({rank for pair in cards.shared(bench.peers) if bench.info.rank in pair for rank in pair})
    if not sharing:
        return ok(f"{own} is this rank's alone")
    finding = f"ranks {', '.join(map(str, sharing))} share one card: {own} on {bench.described['host']}"
    advice = "give each rank its own: the visible-devices variable must be the same on all, and name no card twice"
    return fail(finding, advice, sharing=sharing)


def _memory(bench: Bench) -> Answer:
    """Memory of the device, and whether another process holds it."""
    usage = bench.backend.usage()
    free, total = usage.get("free"), usage.get("total")
    if free is None or total is None:
        row = cards.reading_of(bench.described, bench.backend.monitor())
        if row is None or row["memory_total"] is None or row["memory_used"] is None:
            return ok("this device does not tell")
        free, total = row["memory_total"] - row["memory_used"], row["memory_total"]
    finding = f"{size(free)} free of {size(total)}"
    holder = "another process holds the rest; find it with the vendor's monitor, and end it"
    if free < total * 0.05:
        return fail(finding, holder, free=free, total=total)
    held = free < total * 0.5 and bench.backend.exclusive_devices
    return ok(finding, holder if held else "", free=free, total=total)


def _group(bench: Bench) -> Answer:
    """The process group comes up, and is the one that was wanted."""
    from exp.engine.distributed import Distributed, chosen_group

    assert bench.store is not None
    backend, info, started = bench.backend, bench.info, time.monotonic()
    bench.distributed = Distributed.create(backend, bench.store, info.rank, info.world_size, bench.timeout)
    bench.distributed.barrier()
    seconds = time.monotonic() - started
    fallback = bench.distributed.fallback
    name = bench.distributed.process_group
    values: dict[str, Any] = {"process_group": name, "fallback": fallback, "seconds": round(seconds, 3)}
    if fallback is None:
        return ok(f"{name} in {seconds:.1f} s", **values)
    finding = f"fell back: {fallback['used']} instead of {fallback['wanted']}, because {fallback['reason']}"
    group, source = chosen_group(backend)
    if device_part_of(group, backend.device_type) == "gloo":
        return ok(finding, f"slow; leave out {source} to use the card's own", **values)
    return fail(finding, "install the vendor's collectives: copies through the CPU are slow", **values)


def _all_reduce(bench: Bench) -> Answer:
    """Sums over all ranks are right, of tensors on the device and on the CPU."""
    import torch

    assert bench.distributed is not None
    world_size, backend = bench.info.world_size, bench.backend
    right = world_size * (world_size + 1) / 2
    wrong = []
    for place in dict.fromkeys((bench.device, torch.device("cpu"))):
        tensor = torch.full((1024,), bench.info.rank + 1.0, device=place)
        on_host = place.type == "cpu" and backend.device_type != "cpu"
        (bench.distributed.sum if on_host else backend.collectives.all_reduce)(tensor)
        host = tensor.cpu()
        wrong += [f"{float(value):g} on {place}" for value in host[host != right][:1]]
    large = torch.ones(_LARGE, device=bench.device)
    backend.synchronize()
    started = time.monotonic()
    backend.collectives.all_reduce(large)
    backend.synchronize()
    seconds = time.monotonic() - started
    if wrong:  # told only now: the other ranks would have waited for this one
        finding = f"the sum of 1 to {world_size} is {right:g}, but {' and '.join(wrong)}"
        return fail(finding, "the collectives are broken: try another version of the vendor's library")
    return ok(f"right on device and CPU; 4 MiB in {seconds * 1e3:.1f} ms", seconds=round(seconds, 6))


def _ddp(bench: Bench) -> Answer:
    """A wrapped model begins with rank 0's weights, and gets the mean of all gradients: a step, each number of which is
    known.
    """
    import torch

    backend, own = bench.backend, bench.info.rank + 1.0
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.constant_(model.weight, own)
    model = model.to(bench.device)
    wrapped = backend.collectives.ddp_class(model, **ddp_arguments(bench.device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    weights = model.weight.detach().cpu().unique().tolist()
    wrapped(torch.full((1, 8), own, device=bench.device)).sum().backward()
    assert model.weight.grad is not None
    gradients = model.weight.grad.detach().cpu().unique().tolist()
    backend.end_step(optimizer)
    stepped = model.weight.detach().cpu().unique().tolist()
    del wrapped, optimizer
    gc.collect()  # the reducer must not outlive the group
    mean = (bench.info.world_size + 1) / 2
    for what, values, expected in (
        ("weights of rank 0", weights, 1.0),
        ("mean gradient", gradients, mean),
        ("weights after a step", stepped, 1.0 - mean),
    ):
        if values != [expected]:
            return fail(
                f"{what}: {values[:4]} instead of {expected:g}",
                "the wrapper does not keep the ranks equal: compare torch's and the vendor's versions",
            )
    return ok(f"gradients are the mean over {bench.info.world_size} ranks")


def _autocast(bench: Bench) -> Answer:
    """Every precision that the backend claims for this device works, and the configured one is among them."""
    import torch

    backend, wanted, works = bench.backend, bench.config.precision, []
    for precision in filter(backend.supports, PRECISIONS):
        backend.set_precision(precision)
        ones = torch.ones(16, 16, device=bench.device)
        with backend.autocast(precision):
            product = ones @ ones
        if not bool((product.float().cpu() == 16).all()):
            return fail(f"{precision} gives wrong numbers", "use another precision, and report it to the vendor")
        works.append(precision)
    if wanted not in works:
        return fail(f"no {wanted} on this device", f"use precision={' or '.join(works)}")
    backend.set_precision(wanted)  # of all that follows
    return ok(", ".join(works), precisions=works)


def operators(backend: Backend, device: torch.device, precision: str) -> Answer:
    """Train a small block of torch's own layers by one step, and tell which operators ran on the CPU for it.

    Before it, the device gets the portable kernels that a training would give it (:mod:`exp.engine.kernels`).
    """
    from exp.engine.kernels import settle_kernels

    lacking = sorted(backend.capabilities.lacking_operators)
    portable = settle_kernels(backend, device, precision)
    before, refused, left, moved = backend.fallbacks(), None, None, 0
    try:
        with backend.autocast(precision):
            _usual_layers(device)
        backend.synchronize()
    except NotImplementedError as error:
        refused = str(error).splitlines()[0]
    after = backend.fallbacks()
    if before is not None and after is not None:
        calls = {name: count - before.get(name, (0, 0))[0] for name, (count, _) in after.items()}
        left = {name: count for name, count in calls.items() if count}
        moved = sum(count[1] for count in after.values()) - sum(count[1] for count in before.values())
    fused = precision in backend.capabilities.fused_attention
    values: dict[str, Any] = {"lacking": lacking, "portable": sorted(portable), "left_device": left, "refused": refused,
              "fused_attention": fused}  # fmt: skip
    attention = f"{'' if fused else 'no '}fused attention in {precision}"
    if refused is not None:
        return ok(f"{refused}; {attention}", **values)
    if left is None:
        counted = "what leaves the device is not counted here"
    elif left:
        names = sorted(left, key=lambda name: -left[name])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        sizes = f" ({size(moved)})" if moved else ""  # a vendor's statistics may count calls alone
        counted = f"of torch's usual layers {', '.join(names[:_SHOWN])}{more} run on the CPU{sizes}"
    else:
        counted = "of torch's usual layers none leaves the device"
    lacks = len({name.partition(".")[0] for name in lacking})
    known = f"lacks {lacks} operators, {len(portable)} of them have portable kernels; " if lacking else ""
    return ok(f"{known}{attention}; {counted}", **values)


def _usual_layers(device: torch.device) -> None:
    """Forward and backward of an image classifier with one layer of each usual kind."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(16), nn.GELU()
    ).to(device)
    tokens = model(torch.ones(2, 3, 16, 16, device=device))
    mixed = torch.softmax(tokens @ tokens.transpose(1, 2), -1) @ tokens
    target = torch.zeros(2, dtype=torch.long, device=device)
    nn.functional.cross_entropy(mixed.mean(1).float(), target).backward()


def _burst(bench: Bench) -> Answer:
    """A short burst of matrix products with a known answer, on all cards at the same time."""
    import torch

    backend, precision, burst_s = bench.backend, bench.config.precision, bench.config.task.burst_s
    with backend.autocast(precision):
        side, seconds = long_product(backend, bench.device)
        # All entries 1/n, with n a power of two: the product with ones is exactly ones, in every precision.
        matrix = torch.full((side, side), 1.0 / side, device=bench.device)
        result = torch.ones(side, side, device=bench.device)
        at_once = max(1, int(0.05 / seconds))
        bench.exchange("burst", bench.blocking())  # until all are warm
        if bench.absent:
            return skip(f"a burst of all cards needs all ranks; {bench.describe_absent()}")
        count, elapsed, started = 0, 0.0, time.monotonic()
        with _watch_monitor(bench) as answered:
            while elapsed < burst_s or not (answered.is_set() or elapsed > _MONITOR_PATIENCE_S):
                for _ in range(at_once):
                    result = matrix @ result
                backend.synchronize()
                count += at_once
                elapsed = time.monotonic() - started
    error = float((result.float() - 1).abs().max().cpu())
    if error > 1e-3:
        return fail(f"products are wrong by {error:g}", "the card computes wrongly: take it out of service")
    rate = 2.0 * side**3 * count / elapsed
    return ok(f"{flops(rate)}FLOP/s in {precision}, {count} products of side {side}", flops=rate, side=side,
              products=count, seconds=round(elapsed, 3))  # fmt: skip


@contextlib.contextmanager
def _watch_monitor(bench: Bench) -> Iterator[threading.Event]:
    """Ask the monitor again and again meanwhile; the event says that it has answered once."""
    answered, over = threading.Event(), threading.Event()

    def watch() -> None:
        over.wait(bench.config.task.burst_s / 4)  # monitors show a mean over the last moments
        while not over.is_set():
            found = bench.backend.monitor()
            bench.readings += [found] if found else []
            answered.set()
            over.wait(0.2 if found else 3600)

    thread = threading.Thread(target=watch, name="monitor", daemon=True)
    thread.start()
    try:
        yield answered
    finally:
        over.set()
        thread.join(_MONITOR_PATIENCE_S)


def _utilisation(bench: Bench) -> Answer:
    """The vendor's monitor has seen this rank's card at work during the burst."""
    rows = [row for row in (cards.reading_of(bench.described, found) for found in bench.readings) if row]
    shown = [row["utilisation_percent"] for row in rows if row["utilisation_percent"] is not None]
    if not shown:
        why = "the monitor does not show this card's" if bench.readings else "no monitor here"
        return ok(f"{why}; the rate alone is judged")
    values = {key: rows[-1][key] for key in ("temperature_c", "power_w", "state")}
    values.update(utilisation_percent=max(shown), samples=len(shown))
    if max(shown) >= _IDLE_PERCENT:
        return ok(f"{max(shown):.0f} %, {statistics.mean(shown):.0f} % on average", **values)
    state = f" ({values['state']})" if values["state"] else ""
    return fail(
        f"card idle while it should work: {max(shown):.0f} %{state} on the monitor during the burst",
        "the work lands elsewhere: check the visible-devices variable; operators may fall back to the CPU",
        **values,
    )


def _teardown(bench: Bench) -> Answer:
    """The group goes down in order."""
    assert bench.distributed is not None
    started = time.monotonic()
    bench.distributed.barrier()
    bench.backend.collectives.destroy()
    return ok(f"group taken down in {time.monotonic() - started:.1f} s")


def _data(bench: Bench) -> Answer:
    """The configured data can be reached from here."""
    checked = check_data(bench.config.data)
    found = "there, and its beginning fits" if checked else "has no check of its own"
    return ok(f"{bench.config.data.get('name')}: {found}")


def _output(bench: Bench) -> Answer:
    """The run folder can be written from here, and has space left."""
    path = bench.folder.path
    usage = shutil.disk_usage(path)
    values = {"free": usage.free, "total": usage.total}
    advice = "make space, or set output_dir to another disk"
    if usage.free < _PROBE_BYTES:  # do not take the last of it from the other ranks' journals
        return fail(f"no space: less than {size(_PROBE_BYTES)} free for {path}", advice, **values)
    probe = path / "doctor" / f".probe{bench.info.rank}"
    content = os.urandom(_PROBE_BYTES)  # random: nothing on the way can compress it
    try:
        with probe.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        same = probe.read_bytes() == content
    except OSError as error:
        return fail(f"cannot write to {path}: {error.strerror}", advice, **values)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    if not same:
        return fail(f"{path} gives back other bytes than were written", "set output_dir elsewhere")
    little = "checkpoints may not fit: make space, or set output_dir" if usage.free < _LITTLE_SPACE else ""
    return ok(f"{size(usage.free)} free for {path}", little, **values)


def _limits(_: Bench) -> Answer:
    """Shared memory and open files, which data-loader workers use up."""
    values = process_limits()
    shm, files = values["shm_total"], values["open_files"]
    finding = f"{SHM} {size(shm) if shm else 'missing'}, {'no limit of' if files is None else files} open files"
    advice = []
    if shm is None or shm <= _LITTLE_SHM or (values["shm_free"] or 0) <= _LITTLE_SHM // 4:
        advice.append(
            f"loader workers, and some cards' collectives, need more {SHM}: docker run --shm-size=8g; in "
            f"Kubernetes an emptyDir of medium Memory at {SHM}"
        )
    if files is not None and files < _FEW_FILES:
        advice.append("ulimit -n 65536")
    return ok(finding, "; ".join(advice), **values)


CHECKS: dict[str, Check] = {
    "interpreter": Check(_interpreter),
    "packages": Check(_packages),
    "device": Check(_device, needs=("packages",)),
    "variables": Check(_variables, needs=("device",)),
    "ranks": Check(_ranks, needs=("packages",)),
    "cards": Check(_cards, needs=("device",)),
    "memory": Check(_memory, needs=("device",)),
    "group": Check(_group, needs=("device", "ranks"), joint=True),
    "all_reduce": Check(_all_reduce, needs=("device", "ranks"), joint=True),
    "ddp": Check(_ddp, needs=("device", "ranks"), joint=True),
    "autocast": Check(_autocast, needs=("device",)),
    "operators": Check(lambda bench: operators(bench.backend, bench.device, bench.config.precision), ("autocast",)),
    "burst": Check(_burst, needs=("device",), meets=True),
    "utilisation": Check(_utilisation, needs=("burst",)),
    "teardown": Check(_teardown, needs=("ranks",), joint=True),
    "data": Check(_data),
    "output": Check(_output),
    "limits": Check(_limits),
}
"""All checks, in their order (docs/checks.md)."""
