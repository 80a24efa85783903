"""What a rank can find out by itself: interpreter, packages, device, memory, arithmetic, folders and limits."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Iterator

from exp.backend import PRECISIONS
from exp.cards import identity, reading_of
from exp.config.check import check_data
from exp.doctor import facts
from exp.doctor.facts import flops, size
from exp.doctor.record import CheckError, Findings
from exp.environment import package_versions
from exp.launcher.rank import this_host
from exp.matrix_rate import long_product

if TYPE_CHECKING:
    import torch

    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["LocalChecks"]

_PROBE_BYTES = 2**20
_LITTLE_SPACE = 2**30
_LITTLE_SHM = 2**26  # what a container gets where nobody asks for more
_FEW_FILES = 1024
_IDLE_PERCENT = 5
_MONITOR_PATIENCE_S = 10


class LocalChecks:
    """The checks that need no other rank; what they learn is kept for the later ones.

    Attributes:
        device: once the check of that name has passed.
        described: what is known of it, with the host.
    """

    def __init__(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        self.config = config
        self.folder = folder
        self.info = info
        self.backend = backend
        self.device: torch.device
        self.described: dict[str, Any] = {}
        self._readings: list[list[dict[str, Any]]] = []

    def interpreter(self) -> Findings:
        """Which Python this is, and where."""
        version = platform.python_version()
        values = {"python": version, "executable": sys.executable, "platform": platform.platform()}
        return Findings(f"Python {version}, {sys.executable}", values)

    def packages(self) -> Findings:
        """Torch imports; versions of it and of the vendor's packages."""
        try:
            import torch
        except (ImportError, OSError) as error:
            raise CheckError(
                f"torch does not import: {error}", "install the torch that goes with this device"
            ) from error
        versions = {**package_versions(), "torch": torch.__version__, **self.backend.packages()}
        shown = {"torch": versions["torch"], **self.backend.packages()}
        return Findings(", ".join(f"{name} {version}" for name, version in shown.items() if version), versions)

    def select_device(self) -> Findings:
        """The device of this rank can be selected and computes."""
        import torch

        device = self.backend.set_device(self.info.local_rank)
        described = {**self.backend.describe(device), "host": this_host(), "device": str(device)}
        described["identity"] = identity(described) if self.backend.exclusive_devices else None
        answer = float((torch.arange(4, dtype=torch.float32).to(device) * 2).sum().cpu())
        if answer != 12.0:
            raise CheckError(f"{device} gives {answer} for 12", "the card computes wrongly: take it out of service")
        self.device, self.described = device, described
        which = (str(device), described["name"], described["identity"])
        return Findings(", ".join(part for part in which if part), described)

    def variables(self) -> Findings:
        """No environment variable does harm, or nothing, where the user expects something of it."""
        cautions = self.backend.cautions()
        if not cautions:
            return Findings("none that does harm")
        finding = "; ".join(caution.partition("; ")[0] for caution in cautions)
        return Findings(finding, advice="; ".join(caution.partition("; ")[2] or caution for caution in cautions))

    def memory(self) -> Findings:
        """Memory of the device, and whether another process holds it."""
        sizes = self.backend.free_memory() or self._memory_by_monitor()
        if sizes is None:
            return Findings("this device does not tell")
        free, total = sizes
        values = {"free": free, "total": total}
        finding = f"{size(free)} free of {size(total)}"
        holder = "another process holds the rest; find it with the vendor's monitor, and end it"
        if free < total * 0.05:
            raise CheckError(finding, holder, **values)
        return Findings(finding, values, holder if free < total * 0.5 and self.backend.exclusive_devices else None)

    def _memory_by_monitor(self) -> tuple[int, int] | None:
        row = reading_of(self.described, self.backend.monitor())
        if row is None or row["memory_total"] is None or row["memory_used"] is None:
            return None
        return row["memory_total"] - row["memory_used"], row["memory_total"]

    def autocast(self) -> Findings:
        """Every precision that the backend claims for this device works, and the configured one is among them."""
        import torch

        works = []
        for precision in PRECISIONS:
            if not self.backend.supports(precision):
                continue
            self.backend.set_precision(precision)
            left, right = torch.ones(16, 16, device=self.device), torch.ones(16, 16, device=self.device)
            with self.backend.autocast(precision):
                product = left @ right
            if not bool((product.float().cpu() == 16).all()):
                raise CheckError(
                    f"{precision} gives wrong numbers", "use another precision, and report it to the vendor"
                )
            works.append(precision)
        if self.config.precision in works:
            self.backend.set_precision(self.config.precision)  # of all that follows
        else:
            raise CheckError(f"no {self.config.precision} on this device", f"use precision={' or '.join(works)}")
        return Findings(", ".join(works), {"precisions": works})

    def burst(self, ready: Any) -> Findings:
        """A short burst of matrix products with a known answer.

        Args:
            ready: called when this rank is warm; comes back when all are, so that all cards work at once.
        """
        import torch

        with self.backend.autocast(self.config.precision):
            side, seconds = long_product(self.backend, self.device)
            # All entries 1/n, with n a power of two: the product with ones is exactly ones, in every precision.
            matrix = torch.full((side, side), 1.0 / side, device=self.device)
            result = torch.ones(side, side, device=self.device)
            at_once = max(1, int(0.05 / seconds))
            ready()
            count, started = 0, time.monotonic()
            with self._watch_monitor() as answered:
                while True:
                    for _ in range(at_once):
                        result = matrix @ result
                    self.backend.synchronize()
                    count += at_once
                    elapsed = time.monotonic() - started
                    long_enough = elapsed >= self.config.task.burst_s
                    if long_enough and (answered.is_set() or elapsed > _MONITOR_PATIENCE_S):
                        break
        error = float((result.float() - 1).abs().max().cpu())
        if error > 1e-3:
            raise CheckError(f"products are wrong by {error:g}", "the card computes wrongly: take it out of service")
        rate = 2.0 * side**3 * count / elapsed
        values = {"flops": rate, "side": side, "products": count, "seconds": round(elapsed, 3)}
        return Findings(f"{flops(rate)}FLOP/s in {self.config.precision}, {count} products of side {side}", values)

    @contextlib.contextmanager
    def _watch_monitor(self) -> Iterator[threading.Event]:
        """Ask the monitor again and again meanwhile; the event says that it has answered once."""
        answered, over = threading.Event(), threading.Event()

        def watch() -> None:
            over.wait(self.config.task.burst_s / 4)  # monitors show a mean over the last moments
            while not over.is_set():
                readings = self.backend.monitor()
                if readings:
                    self._readings.append(readings)
                answered.set()
                over.wait(0.2 if readings else 3600)

        thread = threading.Thread(target=watch, name="monitor", daemon=True)
        thread.start()
        try:
            yield answered
        finally:
            over.set()
            thread.join(_MONITOR_PATIENCE_S)

    def utilisation(self) -> Findings:
        """The vendor's monitor has seen this rank's card at work during the burst."""
        rows = [row for row in (reading_of(self.described, readings) for readings in self._readings) if row]
        shown = [row["utilisation_percent"] for row in rows if row["utilisation_percent"] is not None]
        if not shown:
            why = "the monitor does not show this card's" if self._readings else "no monitor here"
            return Findings(f"{why}; the rate alone is judged")
        last = rows[-1]
        values = {"utilisation_percent": max(shown), "samples": len(shown)}
        values.update({key: last[key] for key in ("temperature_c", "power_w", "state")})
        if max(shown) < _IDLE_PERCENT:
            state = f" ({last['state']})" if last["state"] else ""
            raise CheckError(
                f"card idle while it should work: {max(shown):.0f} %{state} on the monitor during the burst",
                "the work lands elsewhere: check the visible-devices variable; operators may fall back to the CPU",
                **values,
            )
        return Findings(f"{max(shown):.0f} %, {statistics.mean(shown):.0f} % on average", values)

    def data(self) -> Findings:
        """The configured data can be reached from here."""
        checked = check_data(self.config.data)
        name = self.config.data.get("name")
        return Findings(f"{name}: {'there, and its beginning fits' if checked else 'has no check of its own'}")

    def output(self) -> Findings:
        """The run folder can be written from here, and has space left."""
        usage = _usage(self.folder)
        advice = "make space, or set output_dir to another disk"
        if usage["free"] < _PROBE_BYTES:  # do not take the last of it from the other ranks' records
            raise CheckError(f"no space: less than {size(_PROBE_BYTES)} free for {self.folder.path}", advice, **usage)
        probe = self.folder.path / "doctor" / f".probe{self.info.rank}"
        content = os.urandom(_PROBE_BYTES)  # random: nothing on the way can compress it
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            with probe.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            same = probe.read_bytes() == content
        except OSError as error:
            finding = f"cannot write to {self.folder.path}: {error.strerror}"
            raise CheckError(finding, advice, **usage) from error
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        if not same:
            raise CheckError(f"{self.folder.path} gives back other bytes than were written", "set output_dir elsewhere")
        little = "checkpoints may not fit: make space, or set output_dir" if usage["free"] < _LITTLE_SPACE else None
        return Findings(f"{size(usage['free'])} free for {self.folder.path}", usage, little)

    def limits(self) -> Findings:
        """Shared memory and open files, which data-loader workers use up."""
        values = facts.limits()
        shm, files = values["shm_total"], values["open_files"]
        open_files = "no limit of" if files is None else files
        finding = f"{facts.SHM} {size(shm) if shm else 'missing'}, {open_files} open files"
        advice = []
        if shm is None or shm <= _LITTLE_SHM or (values["shm_free"] or 0) <= _LITTLE_SHM // 4:
            advice.append(
                f"loader workers, and some cards' collectives, need more {facts.SHM}: docker run --shm-size=8g; in "
                f"Kubernetes an emptyDir of medium Memory at {facts.SHM}"
            )
        if files is not None and files < _FEW_FILES:
            advice.append("ulimit -n 65536")
        return Findings(finding, dict(values), "; ".join(advice) or None)


def _usage(folder: RunFolder) -> dict[str, Any]:
    usage = shutil.disk_usage(folder.path)
    return {"free": usage.free, "total": usage.total}
