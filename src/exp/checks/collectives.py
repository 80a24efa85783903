"""task=collectives: are the sums of all ranks right, and how fast do they travel?"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import torch
import torch.distributed as dist

from exp.checks.check import Journal
from exp.checks.verdict import LIMITS_S
from exp.engine.building import make_result, record_environment

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["addends", "measure_collectives"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS = 5


def measure_collectives(session: Session) -> dict[str, Any]:
    """Every collective that data-parallel training uses, in every precision and size; rank 0 writes them down.

    What has ended the process before is left out.
    """
    record_environment(session)
    session.begin()
    task, backend = session.config.task, session.backend
    place = session.folder.path / "collectives.jsonl" if session.distributed.is_main else Path(os.devnull)
    journal = Journal(place, LIMITS_S["collectives"])
    crashed = {name for names in session.distributed.gather(journal.crashed) for name in names}
    # A vendor's own collectives, and staged ones, only add up.
    for operation in ["all_reduce"] if backend.collectives.only_sums else ["all_reduce", "broadcast"]:
        for precision in filter(backend.supports, _DTYPES):
            name = f"{operation} {precision}"
            for kib in [] if name in crashed else task.sizes_kib:
                journal.begin(name, kib=kib)
                found = _measure(session, operation, _DTYPES[precision], kib)
                journal.end(name, kib=kib, **found)
                if "error" in found:
                    break
    return make_result(session, {}, None)


def addends(rank: int, world_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has, 0 and 1 in turns, and what all add up to, both float32 (count,): every precision has them."""
    turns = torch.arange(count, dtype=torch.int64) % 2
    return ((turns + rank) % 2).float(), (world_size // 2 + turns * (world_size % 2)).float()


def _measure(session: Session, operation: str, dtype: torch.dtype, kib: int) -> dict[str, Any]:
    """Wrong values on any rank, and the slowest rank's time.

    Returns:
        ``error``, where it is refused; else ``wrong`` (ranks), ``seconds`` (median of some repeats) and
        ``bus_bytes_per_second``: what each card's link carries, 2 (n - 1) / n of the tensor in an all-reduce.
    """
    rank, world_size = session.info.rank, session.info.world_size
    count = kib * 1024 // (2 if dtype is not torch.float32 else 4)
    summing = operation == "all_reduce"
    own, right = addends(rank, world_size, count)
    # What rank 0 sends is the sum; the others have something else before.
    tensor = (own if summing else right + (rank > 0)).to(dtype).to(session.device)
    run: Callable[[], Any] = (
        (lambda: session.backend.collectives.all_reduce(tensor)) if summing else (lambda: dist.broadcast(tensor, src=0))
    )
    refused = None
    try:
        run()
        session.backend.synchronize()
    except RuntimeError as error:  # of a type that a library does not know, on every rank alike
        refused = str(error).split("\n")[0]
    refusals = [each for each in session.distributed.gather(refused) if each]
    if refusals:
        return {"error": refusals[0]}
    wrong = bool((tensor.cpu().float() != right).any())
    taken = []
    for _ in range(_REPEATS):
        tensor.zero_()
        session.backend.synchronize()
        session.distributed.barrier()
        started = time.perf_counter()
        run()
        session.backend.synchronize()
        taken.append(time.perf_counter() - started)
    found = session.distributed.gather((wrong, sorted(taken)[_REPEATS // 2]))
    seconds = max(each[1] for each in found)
    share = 2 * (world_size - 1) / world_size if summing else 1.0
    return {
        "wrong": [number for number, each in enumerate(found) if each[0]],
        "seconds": seconds,
        "bus_bytes_per_second": share * kib * 1024 / seconds,
    }
