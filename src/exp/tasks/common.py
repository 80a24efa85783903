"""What the tasks share: building data and model, loading weights, and the record of a run."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from exp.config.create import create
from exp.engine import checkpoint
from exp.environment import describe_environment
from exp.errors import CheckpointError, ConfigError, RunError
from exp.result import blank_result
from exp.runfolder import write_json

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session

__all__ = ["build_data", "build_model", "load_weights", "make_result", "record_environment"]

logger = logging.getLogger(__name__)


def build_data(session: Session) -> Any:
    """The data set of the configuration."""
    return create(session.config.data)


def build_model(session: Session, data: Any) -> nn.Module:
    """The model of the configuration, on the CPU, with the weights of ``init_from`` where it is set.

    Args:
        session: the session.
        data: what the files alone can tell, such as the number of classes, comes from its ``model_arguments()``.
    """
    model: nn.Module = create(session.config.model, **getattr(data, "model_arguments", dict)())
    if session.config.init_from:
        load_weights(session, model, Path(session.config.init_from))
    return model


def load_weights(session: Session, model: nn.Module, path: Path) -> None:
    """Load our checkpoints or the authors', and say which keys did not match.

    Args:
        session: for the console.
        model: takes the weights; has ``adapt_state_dict`` where it knows foreign names.
        path: a ``.pth``, a ``.safetensors``, or a run folder (its best checkpoint).

    Raises:
        CheckpointError: the file is not readable, or not one tensor fits.
    """
    path = find_weights(path)
    state = checkpoint.weights_of(checkpoint.read(path))
    if all(key.startswith("module.") for key in state):  # saved from inside a DDP or DataParallel wrapper
        state = OrderedDict((key[len("module.") :], value) for key, value in state.items())
    adapt = getattr(model, "adapt_state_dict", None)
    if adapt is not None:
        state = adapt(state, path)
    own = model.state_dict()
    misfits = [f"{key}: {tuple(state[key].shape)} here, {tuple(own[key].shape)} in the model" for key in state
               if key in own and state[key].shape != own[key].shape]  # fmt: skip
    fitting = {key: value for key, value in state.items() if key in own and value.shape == own[key].shape}
    missing = [key for key in own if key not in state]
    unknown = [key for key in state if key not in own]
    if not fitting:
        raise CheckpointError(
            f"init_from: nothing in {path} fits the model: its keys are like {', '.join(list(state)[:3])}; "
            f"the model's like {', '.join(list(own)[:3])}"
        )
    model.load_state_dict(fitting, strict=False)
    report = f"init_from: {len(fitting)} of {len(own)} tensors from {path}"
    for title, keys in (("missing in the file", missing), ("unknown to the model", unknown), ("other shape", misfits)):
        if keys:
            report += f"\n  {title}: {', '.join(keys[:10])}" + (f" and {len(keys) - 10} more" if len(keys) > 10 else "")
    logger.info(report)
    if session.console is not None:
        session.console.print(report, highlight=False, soft_wrap=True)


def find_weights(path: Path) -> Path:
    """The file that ``path`` stands for: itself, a run folder's best (else newest) checkpoint, or a model folder's.

    Raises:
        ConfigError: there is none.
    """
    if not path.is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    candidates = [folder / "best.pth", *checkpoint.list_checkpoints(folder), folder / "model.safetensors"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"init_from={path} holds no checkpoint; looked for best.pth, step_*.pth and model.safetensors in {folder}"
    )


def record_environment(session: Session) -> None:
    """Rank 0 writes ``env.json``."""
    if session.distributed.is_main:
        write_json(session.folder.env, describe_environment(session.backend, session.devices))


def make_result(session: Session, metrics: dict[str, float], metric_name: str, **extra: Any) -> dict[str, Any]:
    """The content of ``result.json`` for a completed task.

    Args:
        session: the session.
        metrics: all metrics by name.
        metric_name: the one that a sweeper optimises.
        **extra: further keys, such as steps and epochs.

    Raises:
        RunError: the metric that a sweeper optimises is not finite. Others may be, and are null in the file: a class
            that does not occur has no precision.
    """
    config = session.config
    result = blank_result(config)
    _check_finite(metrics, metric_name, extra.get("measured_on", result["measured_on"]))
    result.update(
        status="completed",
        metrics=metrics,
        metric_name=metric_name,
        metric=metrics.get(metric_name),
        published=_published(config),
        device_type=session.device.type,
        devices=[{key: device.get(key) for key in ("name", "index", "host")} for device in session.devices],
        process_group=session.process_group,
        fallback=session.fallback,
        wrapper=config.wrapper.kind if session.info.world_size > 1 else "none",
        wall_s=time.time() - session.started,
        restarts=session.info.restart_count + session.info.requeues,
    )
    result.update(extra)
    return result


def _check_finite(metrics: dict[str, float], name: str, measured_on: str) -> None:
    value = metrics.get(name)
    if value is not None and not math.isfinite(value):
        raise RunError(
            f"{measured_on} {name} is {value}: the model's outputs or the data are not finite, or nothing could be "
            "scored; check the data, and the weights for a training that diverged (lower optim.lr)"
        )


def _published(config: Any) -> dict[str, Any] | None:
    """The published figures for these data and this horizon, where the experiment states them."""
    horizon = config.data.get("horizon")
    if horizon not in config.published or config.published_for != config.data.get("name"):
        return None
    return {**OmegaConf.to_container(config.published[horizon]), "source": config.published_source}  # type: ignore[dict-item]
