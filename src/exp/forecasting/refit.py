"""The settings of a run train once more: on all rows (``task.refit`` of task=predict), or on those before an origin."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.model import BaseModel
from omegaconf import OmegaConf

from exp.config.compose import load
from exp.config.resolve import create
from exp.distributed import seed_everything
from exp.engine.checkpoint.reader import read_checkpoint
from exp.engine.train import build_trainer
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError
from exp.models.base import Model

if TYPE_CHECKING:
    from exp.session import Session

_TRAINING_KEYS = ("optim", "schedule", "hooks", "accumulate", "global_batch_size", "dropout_by_sample")


def training_config(session: Session, run: Any, weights: Path, source: str) -> Any:
    """The configuration of this session with the settings of a run, for as many steps as its weights have.

    Args:
        session: the session.
        run: configuration of the run; None: the weights are not of a run.
        weights: the file of its weights.
        source: where they come from, for messages.

    Raises:
        ConfigError: the weights are not those of a run that began with new weights, or its batch cannot be divided
            over the processes.
    """
    if run is None or run.init_from is not None:
        finding = "needs the weights of a run" if run is None else f"cannot repeat a training from {run.init_from}"
        raise ConfigError(f"task.refit {finding}, and the weights are of {source}", key="task.refit")
    steps = read_checkpoint(weights, mapped=True, with_shards=False, check=False)["meta"]["step"]
    config: Any = copy.deepcopy(session.config)
    OmegaConf.set_readonly(config, False)
    config.model = run.model
    config.update({key: getattr(run, key) for key in _TRAINING_KEYS}, max_steps=steps, max_epochs=None, val_every=None)
    config.batch_size, rest = divmod(run.global_batch_size or 1, session.info.world_size * run.accumulate)
    if rest:
        raise ConfigError(
            f"task.refit: global_batch_size={run.global_batch_size} of {source} does not divide over "
            f"{session.info.world_size} processes x accumulate={run.accumulate}; take another nproc",
            key="task.refit",
        )
    return config


def train_again(session: Session, data: Any, config: Any, windows: Any) -> Any:
    """Train a new model on some windows. A collective; the weights are written to ``checkpoints/`` of this run.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`, which keeps its standardization.
        config: of :func:`training_config`.
        windows: to train on.

    Returns:
        The trained model, in eval mode.
    """
    every, own_config = copy.copy(data), session.config
    every.train = every.val = every.test = windows
    session.config = config
    try:
        seed_everything(config.seed, session.backend)
        model = create(config.model, (Model, BaseModel), "model", **data.model_arguments())
        trainer = build_trainer(session, every, model)
        trainer.val_loop = trainer.test_loop = None
        try:
            trainer.train()
        finally:
            trainer.metrics_hook.progress.stop()
            trainer.close()
    finally:
        session.config = own_config
    return unwrapped(trainer.model).eval()


def refit(session: Session, data: Any) -> Any:
    """Train a new model with the settings of the run in ``init_from`` on all rows, for the steps of its weights.

    Args:
        session: the session; every rank takes part.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.

    Returns:
        The trained model, in eval mode.

    Raises:
        ConfigError: see :func:`training_config`.
    """
    weights, folder = session.weights, session.config.record.trained_in
    assert weights is not None
    run = None if folder is None else load(Path(folder) / "config.yaml")
    config, windows = training_config(session, run, weights.path, str(session.config.init_from)), data.all_windows()
    model = train_again(session, data, config, windows)
    num_rows = int((data.observed_stops - data.starts[:-1]).sum())
    note = (
        f"refit: trained once more on all {num_rows} rows ({len(windows)} windows) for {config.max_steps} "
        f"steps; forecasts/future.csv is of these weights ({session.folder.checkpoints.name}/), windows with truth are "
        f"of {weights.path.name} of the run"
    )
    session.print(note)
    data.notes = [*data.notes, note]
    return model
