"""The doctor's last look: whether the configured training fits in the memory that the cards have free.

Made by the parent when the ranks have ended, since it needs no card, and only of all ranks' findings it knows the
fullest one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from exp.backends_registry import create_backend
from exp.config.batch import derive_batch_sizes
from exp.doctor.facts import size
from exp.doctor.record import FAILED, WARNING
from exp.doctor.verdict import finding_of, value_of
from exp.raised import message_of

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["add_training_memory"]


def add_training_memory(report: dict[str, Any], config: ExpConfig) -> None:
    """Put ``training`` into the report: ``{"memory_peak", "free", "text"}``; a warning where it does not fit.

    Nothing for devices that ranks share, whose free memory says little, and where something has failed.

    Args:
        report: from :func:`exp.doctor.verdict.assemble`.
        config: the frozen configuration.
    """
    report["training"] = None
    backend = create_backend(config.backend)
    known = [(value_of(rank, "memory", "free"), rank["rank"]) for rank in report["ranks"]]
    if report["verdict"] == FAILED or not backend.exclusive_devices or any(free is None for free, _ in known):
        return
    free, rank = min(known)
    name = config.name
    try:
        estimated, fits, advice = _estimated(config, backend, free)
    except Exception as error:  # noqa: BLE001 - a model may raise anything, and cards are examined here
        reason = message_of(error).splitlines()[0]
        report["training"] = {"memory_peak": None, "free": free, "text": f"{name} is not estimated: {reason}"}
        return
    text = f"{name} takes about {size(estimated)} of a card (estimated); rank {rank} has {size(free)} free"
    report["training"] = {"memory_peak": estimated, "free": free, "text": text}
    if not fits:
        do = "smaller batches, more cards, precision=bf16 or wrapper=fsdp"
        if advice is not None:
            do = f"batch_size={advice['batch_size']} accumulate={advice['accumulate']} keeps the global batch"
        report["findings"].append(finding_of([rank], "training", WARNING, text, do))
        report["verdict"] = WARNING


def _estimated(config: ExpConfig, backend: Any, free: int) -> tuple[int, bool, dict[str, int] | None]:
    """Bytes of a rank at the worst moment, whether they fit, and the batch that does."""
    from exp.compat import supports_estimates
    from exp.engine.registries import import_plugins
    from exp.errors import UnavailableError

    if not supports_estimates():
        raise UnavailableError("it needs torch 2.1 or newer")
    from exp.estimate.advice import HEADROOM
    from exp.estimate.figures import fitting_batch
    from exp.estimate.trace import Tracer

    config = copy.deepcopy(config)
    parts = config.nproc * config.launcher.nnodes
    config.batch_size, config.global_batch_size = derive_batch_sizes(
        config.batch_size, config.global_batch_size, config.accumulate, parts
    )
    import_plugins(config.plugins)
    tracer = Tracer(config, backend)
    validation = tracer.validate()
    peak = max(each.total for each in (tracer.peak, validation) if each is not None)
    budget = int(free * (1 - HEADROOM))
    return peak, peak <= budget, fitting_batch(tracer, budget)
