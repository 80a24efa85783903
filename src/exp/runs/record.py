"""The keys of ``result.json``. Imports no torch: the parent writes it too, for a run that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["blank_result", "in_role", "number_text", "selecting_value"]


def in_role(metric: str | None, measured_on: str, value: float | None) -> dict[str, Any] | None:
    """A figure of a run in one of its two roles, ``selected_by`` or ``reported``; None: there is none."""
    return None if value is None else {"metric": metric, "measured_on": measured_on, "value": value}


def selecting_value(result: Mapping[str, Any] | None) -> float | None:
    """The figure by which a run is chosen among others: never one of the test part. None: it has none.

    Args:
        result: content of ``result.json``; of older versions, too.
    """
    result = result or {}
    key: Any = "value" if "selected_by" in result else result.get("metric_name")
    chosen = result.get("selected_by", result.get("validation"))
    return chosen.get(key) if isinstance(chosen, dict) else None


def number_text(value: float) -> str:
    """A metric for a person: four decimals, or four digits where it is tiny or huge."""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


def blank_result(config: ExpConfig) -> dict[str, Any]:
    """Every key of ``result.json``, with what the configuration alone tells and null for the rest.

    Args:
        config: the frozen configuration.
    """
    weights: Any = OmegaConf.to_container(OmegaConf.create(config.record.weights))
    return {
        "status": "failed",
        "task": config.task.name,
        "experiment": config.name,
        "metrics": {},
        "metric_name": None,
        "metric": None,
        "selected_by": None,
        "reported": None,
        "metric_units": {},
        "greater_is_better": False,
        "measured_on": "test",
        "published": None,
        "trained_in": None,
        "differs": [],
        "weights": weights or None,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "device_type": None,
        "devices": [],
        "process_group": None,
        "fallback": None,
        "wrapper": config.wrapper.kind,
        "precision": config.precision,
        "world_size": config.nproc * config.launcher.nnodes,
        "batch_size": config.batch_size,
        "accumulate": config.accumulate,
        "global_batch_size": config.global_batch_size,
        "steps": 0,
        "epochs": 0,
        "samples_per_second": None,
        "time_to_first_step_s": None,
        "memory_peak": None,
        "flops_per_second": None,
        "flops_share": None,
        "left_device": None,
        "wall_s": None,
        "restarts": 0,
        "resumed_from": None,
        "changed_on_resume": {},
        "error": None,
    }
