"""The record of a run: how it was composed, and what came out. Imports no torch.

``env.json`` has the first (:class:`Record`) beside versions and devices, ``result.json`` the second
(:func:`empty_result`); for a run that failed, the parent process writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional

from omegaconf import OmegaConf

from exp.runs.files import read_json

_NULL_KEYS = (
    "metric_name", "metric", "selected_by", "reported", "reference", "trained_in", "device_type", "process_group",
    "fallback", "samples_per_second", "time_to_first_step_s", "memory_peak", "flops_per_second", "flops_share",
    "cpu_fallbacks", "wall_s", "resumed_from", "error",
)  # fmt: skip


# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.
@dataclass
class Record:
    """How the configuration of a run was composed. exp fills it in; users do not set it."""

    chosen: Dict[str, str] = field(default_factory=dict)
    """The choice in each config group."""
    follows: Dict[str, str] = field(default_factory=dict)
    """Keys of model and data that are interpolations, with the key that they refer to. They follow this key again when
    a later task uses the run."""
    trained_in: Optional[str] = None
    """For eval, predict and features: the run folder from which the configuration starts."""
    differs: List[str] = field(default_factory=list)
    """Differences from the configuration of that run."""
    reference: Dict[str, Any] = field(default_factory=dict)
    """Reference metrics for the data, and differences from the experiment that has them; empty: there are none."""
    weights: Dict[str, Any] = field(default_factory=dict)
    """For weights from a hub: repository, commit, digests of the files, license (:mod:`exp.hub`)."""


def read_record(env: Path) -> dict[str, Any]:
    """The keys of :class:`Record` in an ``env.json``; empty: there is no such file, or it has none.

    Raises:
        ConfigError: the file is not JSON.
    """
    content = read_json(env)
    record = content.get("record") if isinstance(content, dict) else None
    return record if isinstance(record, dict) else {}


def empty_result(config: Any) -> dict[str, Any]:
    """Every key of ``result.json``: values that follow from the configuration, and null for the rest.

    Args:
        config: the frozen configuration (:class:`exp.config.schema.ExpConfig`).
    """
    weights: Any = OmegaConf.to_container(OmegaConf.create(config.record.weights))
    return {
        "status": "failed",
        "task": config.task.name,
        "experiment": config.name,
        "metrics": {},
        "metric_units": {},
        "baselines": {},
        "metrics_alike": [],
        "greater_is_better": False,
        "measured_on": "test",
        "differs": [],
        "warnings": [],
        "weights": weights or None,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "devices": [],
        "wrapper": config.wrapper.kind,
        "precision": config.precision,
        # The nodes of a mixed job do not know each other's processes; nodes that come and go have no fixed number.
        "world_size": None
        if config.launcher.mixed or config.launcher.min_nnodes
        else config.nproc * config.launcher.nnodes,
        "batch_size": config.batch_size,
        "accumulate": config.accumulate,
        "global_batch_size": config.global_batch_size,
        "steps": 0,
        "epochs": 0,
        "restarts": 0,
        "changed_on_resume": {},
        **dict.fromkeys(_NULL_KEYS),
    }
