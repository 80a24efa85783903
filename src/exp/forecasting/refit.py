"""``task.refit``: the settings of a run train once more, on all rows."""

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


def refit(session: Session, data: Any) -> Any:
    """Train a new model with the settings of the run in ``init_from``, for the steps of its weights. A collective.

    The weights are written to ``checkpoints/`` of this run. Series keep the standardization of the run.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.

    Returns:
        The trained model, in eval mode.

    Raises:
        ConfigError: the weights are not those of a run that began with new weights, or its batch cannot be divided
            over the processes.
    """
    config, weights = session.config, session.weights
    assert weights is not None
    run = None if config.record.trained_in is None else load(Path(config.record.trained_in) / "config.yaml")
    if run is None or run.init_from is not None:
        finding = "needs the weights of a run" if run is None else f"cannot repeat a training from {run.init_from}"
        raise ConfigError(f"task.refit=true {finding}, and init_from={config.init_from}", key="task.refit")
    steps = read_checkpoint(weights.path, mapped=True, with_shards=False, check=False)["meta"]["step"]
    changed: Any = copy.deepcopy(config)
    OmegaConf.set_readonly(changed, False)
    changed.update({key: getattr(run, key) for key in _TRAINING_KEYS}, max_steps=steps, max_epochs=None, val_every=None)
    changed.batch_size, rest = divmod(run.global_batch_size or 1, session.info.world_size * run.accumulate)
    if rest:
        raise ConfigError(
            f"task.refit=true: global_batch_size={run.global_batch_size} of {config.record.trained_in} does not divide "
            f"over {session.info.world_size} processes x accumulate={run.accumulate}; take another nproc",
            key="task.refit",
        )
    every = copy.copy(data)
    every.train = every.val = every.test = data.all_windows()
    session.config = changed
    try:
        seed_everything(changed.seed, session.backend)
        model = create(changed.model, (Model, BaseModel), "model", **data.model_arguments())
        trainer = build_trainer(session, every, model)
        trainer.val_loop = trainer.test_loop = None
        try:
            trainer.train()
        finally:
            trainer.metrics_hook.progress.stop()
            trainer.close()
    finally:
        session.config = config
    num_rows = int((data.observed_stops - data.starts[:-1]).sum())
    note = (
        f"refit: trained once more on all {num_rows} rows ({len(every.train)} windows) for {steps} "
        f"steps; forecasts/future.csv is of these weights ({session.folder.checkpoints.name}/), windows with truth are "
        f"of {weights.path.name} of the run"
    )
    session.print(note)
    data.notes = [*data.notes, note]
    return unwrapped(trainer.model).eval()
