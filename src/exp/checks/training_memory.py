"""The doctor's advice: whether the configured training fits in the memory that the cards have free.

Given when the ranks have ended and are judged, since it needs no card, and only of all ranks' findings it knows the
fullest one. Code of the user's may hang or crash: it runs in a process of its own, and for a time.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, Sequence

from exp.checks.child import ask
from exp.config.check import derive_batch_sizes
from exp.console import size
from exp.errors import RunError
from exp.hardware.registry import create_backend
from exp.raised import message_of
from exp.runfolder import RunFolder, to_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["training_memory"]


def training_memory(config: ExpConfig, folder: RunFolder, known: Sequence[int | None]) -> dict[str, Any] | None:
    """What the training takes: ``{"memory_peak", "free", "rank", "fits", "text", "advice"}``.

    None for devices that ranks share, whose free memory says little, and where it is not known.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        known: free bytes of each rank's device.
    """
    sizes = [free for free in known if free is not None]
    if len(sizes) < len(known) or not create_backend(config.backend).exclusive_devices:
        return None
    free = min(sizes)
    rank = sizes.index(free)
    training: dict[str, Any] = {"memory_peak": None, "free": free, "rank": rank, "fits": None, "advice": None}
    reason = None
    try:
        patience_s = config.task.timeout_s
        training.update(ask("exp.checks.training_memory", str(folder.path), str(free), patience_s=patience_s))
        reason = training.pop("reason", None)
    except (RunError, TimeoutError) as error:
        reason = str(error)
    if reason is None:
        takes = f"takes about {size(training['memory_peak'])} of a card (estimated)"
        training["text"] = f"{config.name} {takes}; rank {rank} has {size(free)} free"
    else:
        training["text"] = f"{config.name} is not estimated: {reason}"
    return training


def _estimated(config: ExpConfig, free: int) -> dict[str, Any]:
    """Bytes of a rank at the worst moment, whether they fit, and what to do where they do not."""
    from exp.engine.registries import import_plugins
    from exp.estimate.trace import HEADROOM, Tracer, fitting_batch

    config = copy.deepcopy(config)
    parts = config.nproc * config.launcher.nnodes
    config.batch_size, config.global_batch_size = derive_batch_sizes(
        config.batch_size, config.global_batch_size, config.accumulate, parts
    )
    import_plugins(config.plugins)
    tracer = Tracer(config, create_backend(config.backend))
    validation = tracer.validate()
    peak = max(each["total"] for each in (tracer.peak, validation) if each is not None)
    budget = int(free * (1 - HEADROOM))
    if peak <= budget:
        return {"memory_peak": peak, "fits": True}
    advice = "smaller batches, more cards, precision=bf16 or wrapper=fsdp"
    batch = fitting_batch(tracer, budget)
    if batch is not None:
        advice = f"batch_size={batch['batch_size']} accumulate={batch['accumulate']} keeps the global batch"
    return {"memory_peak": peak, "fits": False, "advice": advice}


def _main() -> None:
    """``python -m exp.checks.training_memory FOLDER FREE``: prints the estimate, or the reason for having none."""
    from exp.frozen import FrozenRun

    try:
        found = _estimated(FrozenRun.load(RunFolder(sys.argv[1])).config, int(sys.argv[2]))
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        found = {"reason": message_of(error).splitlines()[0]}
    print(f"\n{to_json(found)}")  # noqa: T201 - to the process that has started this one


if __name__ == "__main__":
    _main()
