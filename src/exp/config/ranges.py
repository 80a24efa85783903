"""From where on numbers of the configuration mean something. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

from omegaconf import OmegaConf

from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["check_ranges"]

# A key that a launcher of the user's own does not have is not looked at.
_LEAST: Mapping[str, int] = {
    "nproc": 1,
    "accumulate": 1,
    "log_every": 1,
    "min_delta": 0,
    "optim.backbone_lr_scale": 0,
    "optim.layer_decay": 0,
    "schedule.warmup_steps": 0,
    "checkpoint.every_epochs": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_last": 1,
    "launcher.nnodes": 1,
    "launcher.max_restarts": 0,
    "wrapper.bucket_cap_mb": 1,
    "logger.patience_s": 0,
}
_LEAST_OR_NULL: Mapping[str, int] = {
    "max_epochs": 1,
    "max_steps": 1,
    "val_every": 1,
    "patience": 1,
    "debug.train_batches": 1,
    "debug.val_batches": 1,
    "debug.test_batches": 1,
    "debug.restart_after": 1,
    "launcher.step_timeout_s": 0,
    "sweep.parallel_jobs": 1,
}


def check_ranges(config: ExpConfig) -> None:
    """Refuse numbers that would do something else than they say, or nothing.

    Raises:
        ConfigError: names the first key, its value, and what is the least.
    """
    for limits, or_null in ((_LEAST, ""), (_LEAST_OR_NULL, ", or null")):
        for key, least in limits.items():
            value = OmegaConf.select(config, key)  # type: ignore[arg-type]
            if value is not None and not value >= least:  # nan is not, either
                raise ConfigError(f"{key}={value} must be at least {least}{or_null}")
    clip = config.optim.clip_grad_norm
    if clip is not None and not clip > 0:
        raise ConfigError(f"optim.clip_grad_norm={clip} must be above 0, or null for no clipping")
