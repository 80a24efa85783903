"""What the ranks find out together: who is there, whether cards are shared, and whether the group adds up right."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from exp import cards
from exp.compat import device_part_of
from exp.doctor.record import CheckError, Findings, Record, SkipError
from exp.launcher.rank import make_store

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.doctor.examination import Rendezvous
    from exp.doctor.local_checks import LocalChecks
    from exp.engine.distributed import Distributed
    from exp.launcher.rank import RankInfo

__all__ = ["JointChecks"]

_ALONE = "one process: nothing to exchange"
_LARGE = 2**20
_BLOCKING = ("device", "ranks", "cards", "group", "all_reduce", "ddp")


class JointChecks:
    """The checks that need the other ranks. Each is made by all of them, or by none.

    Args:
        alone: this rank's own findings.
        meeting: where the ranks tell one another how far they are.
        record: to know what has failed here.
        timeout_s: of the group and of each of its collectives.
    """

    def __init__(self, alone: LocalChecks, meeting: Rendezvous, record: Record, timeout_s: float) -> None:
        self.backend: Backend = alone.backend
        self.info: RankInfo = alone.info
        self.alone = alone
        self.meeting = meeting
        self.record = record
        self.timeout = timedelta(seconds=timeout_s)
        self.peers: dict[int, dict[str, Any]] = {}
        self.distributed: Distributed | None = None

    def told(self) -> dict[str, Any]:
        """What this rank tells the others before a common check: what of its own would leave them waiting in vain."""
        failures = [name for name in _BLOCKING if self.record.failed(name)]
        if self.meeting.absent:
            failures = ["ranks"]
        if self.distributed is not None:
            failures = [name for name in failures if name != "group"]  # a fallback is a failure, and yet a group
        return {"failed": failures[0] if failures else None}

    def _all_ready(self, point: str) -> None:
        """Wait for all ranks.

        Raises:
            SkipError: one is missing, or has failed at something that this check needs.
        """
        failures = {
            rank: told["failed"] for rank, told in self.meeting.exchange(point, self.told()).items() if told["failed"]
        }
        if self.meeting.absent:
            raise SkipError(self.meeting.describe_absent())
        if failures:
            raise SkipError(_grouped(failures))

    def ranks(self) -> Findings:
        """All ranks have started, and reached this point within the timeout."""
        world_size = self.info.world_size
        if world_size == 1:
            self.peers = {0: self.alone.described}
            return Findings(_ALONE)
        started = time.monotonic()
        self.meeting.store = make_store(self.info, self.timeout)
        arrived = self.meeting.exchange("ranks", {"device": self.alone.described})
        self.peers = {rank: told["device"] for rank, told in arrived.items() if told["device"]}
        waited = time.monotonic() - started
        if self.meeting.absent:
            # Not this rank's failure: the parent lays it at the door of the one that is missing.
            raise SkipError(f"waited {waited:.0f} s: {self.meeting.describe_absent()}")
        return Findings(f"all {world_size} arrived within {waited:.1f} s", {"waited_s": round(waited, 3)})

    def cards(self) -> Findings:
        """No two ranks have one physical card."""
        if not self.backend.exclusive_devices:
            return Findings("ranks share this device, as they may")
        own = self.info.rank
        pairs = [pair for pair in cards.shared(self.peers) if own in pair]
        if pairs:
            sharing = sorted({rank for pair in pairs for rank in pair})
            raise CheckError(
                f"ranks {', '.join(map(str, sharing))} share one card: "
                f"{self.alone.described['identity']} on {self.alone.described['host']}",
                "give each rank its own: the visible-devices variable must be the same on all, and name no card twice",
                sharing=sharing,
            )
        return Findings(f"{self.alone.described['identity']} is this rank's alone")

    def group(self) -> Findings:
        """The process group comes up, and is the one that was wanted."""
        if self.info.world_size == 1:
            return Findings(_ALONE)
        from exp.engine.distributed import Distributed

        self._all_ready("group")
        assert self.meeting.store is not None
        started = time.monotonic()
        self.distributed = Distributed.create(
            self.backend, self.meeting.store, self.info.rank, self.info.world_size, self.timeout
        )
        self.distributed.barrier()
        seconds = time.monotonic() - started
        fallback = self.distributed.fallback
        name = fallback["used"] if fallback else self.backend.process_group
        values = {"process_group": name, "fallback": fallback, "seconds": round(seconds, 3)}
        finding = f"{name} in {seconds:.1f} s"
        if fallback is None:
            return Findings(finding, values)
        finding = f"fell back: {fallback['used']} instead of {fallback['wanted']}, because {fallback['reason']}"
        if device_part_of(self.backend.process_group, self.backend.device_type) == "gloo":
            return Findings(
                finding, values, f"slow; leave out {self.backend.process_group_source} to use the card's own"
            )
        raise CheckError(finding, "install the vendor's collectives: copies through the CPU are slow", **values)

    def all_reduce(self) -> Findings:
        """Sums over all ranks are right, of tensors on the device and on the CPU."""
        import torch

        if self.info.world_size == 1:
            return Findings(_ALONE)
        self._all_ready("all_reduce")
        assert self.distributed is not None
        world_size, rank = self.info.world_size, self.info.rank
        right = world_size * (world_size + 1) / 2
        wrong = []
        for place in dict.fromkeys((self.alone.device, torch.device("cpu"))):
            tensor = torch.full((1024,), float(rank + 1), device=place)
            if place.type == "cpu" and self.backend.device_type != "cpu":
                self.distributed.sum(tensor)
            else:
                self.backend.all_reduce(tensor)
            host = tensor.cpu()
            wrong += [f"{float(value):g} on {place}" for value in host[host != right][:1]]
        large = torch.ones(_LARGE, device=self.alone.device)
        self.backend.synchronize()
        started = time.monotonic()
        self.backend.all_reduce(large)
        self.backend.synchronize()
        seconds = time.monotonic() - started
        if wrong:  # told only now: the other ranks would have waited for this one
            raise CheckError(
                f"the sum of 1 to {world_size} is {right:g}, but {' and '.join(wrong)}",
                "the collectives are broken: try another version of the vendor's library",
            )
        return Findings(f"right on device and CPU; 4 MiB in {seconds * 1e3:.1f} ms", {"seconds": round(seconds, 6)})

    def ddp(self) -> Findings:
        """A wrapped model begins with rank 0's weights, and gets the mean of all gradients."""
        if self.info.world_size == 1:
            return Findings(_ALONE)
        self._all_ready("ddp")
        weights, gradients, stepped = self._train_once()
        gc.collect()  # the reducer must not outlive the group
        right = (self.info.world_size + 1) / 2
        for what, values, expected in (
            ("weights of rank 0", weights, 1.0),
            ("mean gradient", gradients, right),
            ("weights after a step", stepped, 1.0 - right),
        ):
            if values != [expected]:
                raise CheckError(
                    f"{what}: {values[:4]} instead of {expected:g}",
                    "the wrapper does not keep the ranks equal: compare torch's and the vendor's versions",
                )
        return Findings(f"gradients are the mean over {self.info.world_size} ranks")

    def _train_once(self) -> tuple[list[float], list[float], list[float]]:
        """One step of a tiny model, whose every number is known; the distinct values of each kind."""
        import torch

        rank = self.info.rank
        model = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.constant_(model.weight, rank + 1.0)
        model = model.to(self.alone.device)
        wrapped = self.backend.ddp_class(model, **self.backend.ddp_kwargs(self.alone.device))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        weights = model.weight.detach().cpu().unique().tolist()
        wrapped(torch.full((1, 8), rank + 1.0, device=self.alone.device)).sum().backward()
        assert model.weight.grad is not None
        gradients = model.weight.grad.detach().cpu().unique().tolist()
        self.backend.end_step(optimizer)
        return weights, gradients, model.weight.detach().cpu().unique().tolist()

    def ready_for_burst(self) -> None:
        """Wait until all ranks are warm, so that all cards work at the same time."""
        self.meeting.exchange("burst", self.told())
        if self.meeting.absent:
            raise SkipError(f"a burst of all cards needs all ranks; {self.meeting.describe_absent()}")

    def teardown(self) -> Findings:
        """The group goes down in order."""
        if self.info.world_size == 1:
            return Findings(_ALONE)
        self._all_ready("teardown")
        assert self.distributed is not None
        started = time.monotonic()
        self.distributed.barrier()
        self.backend.destroy_process_group()
        return Findings(f"group taken down in {time.monotonic() - started:.1f} s")


def _grouped(failures: dict[int, str]) -> str:
    """``rank 3 failed 'device'``, for all that did, ranks with the same failure together."""
    checks: dict[str, list[str]] = {}
    for rank, check in failures.items():
        checks.setdefault(check, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} failed '{check}'" for check, ranks in checks.items()
    )
