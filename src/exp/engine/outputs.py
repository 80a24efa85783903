"""A model's predictions, outside of an evaluation loop."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import torch

from exp.data.base import Prediction
from exp.data.loader import share_loader
from exp.data.transfer import move
from exp.engine.debug import split_in_use
from exp.engine.wrapper import predictions, unwrapped
from exp.errors import ConfigError
from exp.runs.files import write_atomically
from exp.user_code import EXPERIMENT_PAGE, shown

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.metrics import Evaluator
    from exp.session import Session

__all__ = ["batch_outputs", "measure", "predict_split"]


def batch_outputs(session: Session, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """What the model predicts for a batch of the data, as its metrics take it, on the CPU.

    Args:
        session: the session.
        model: on the session's device, wrapped or not; is left in eval mode.
        batch: of the data, or made by hand of some samples.

    Raises:
        ConfigError: it is not one tensor.
    """
    model = unwrapped(model).eval()
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        outputs = predictions(model, move(batch, session.device))
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(
            f"model: {shown(model)} predicts a {type(outputs).__name__}, not a tensor with a row for each sample; then "
            f"the data need a predict of their own, see {EXPERIMENT_PAGE}"
        )
    return outputs.detach().cpu()


def predict_split(session: Session, data: Data, model: Any) -> Prediction:
    """What the model predicts for every sample of the test split; each rank writes its share.

    ``predictions/rank<n>.npz`` has ``outputs`` (N, ...) and ``index`` (N,), the numbers of the samples.

    Args:
        session: the session.
        data: the data set.
        model: on the session's device, in eval mode.

    Raises:
        ConfigError: the model does not predict one tensor for a batch.
    """
    test = split_in_use(session, data, "test")
    loader = share_loader(test, data, session)
    numbers, outputs = [], []
    for indices, batch in zip(loader.sampler, loader):
        predicted = batch_outputs(session, model, batch)
        if not predicted.dim() or len(predicted) != len(indices):
            raise ConfigError(
                f"model: {shown(model)} predicts a tensor of shape {tuple(predicted.shape)} for {len(indices)} "
                f"samples, not a row for each; see {EXPERIMENT_PAGE}"
            )
        numbers.append(indices)
        outputs.append(predicted)
    files = []
    if outputs:
        content = io.BytesIO()
        np.savez_compressed(content, outputs=torch.cat(outputs).numpy(), index=torch.cat(numbers).numpy())
        path = session.folder.path / "predictions" / f"rank{session.info.rank}.npz"
        write_atomically(path, content.getvalue())
        files.append(path.relative_to(session.folder.path).as_posix())
    gathered = session.distributed.gather(files)
    return Prediction({"samples": len(test)}, [file for part in gathered for file in part], data.tested_on)


def measure(
    session: Session,
    data: Data,
    model: Any,
    evaluator: Evaluator,
    change: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] | None = None,
) -> dict[str, float]:
    """The metrics of the test split, for tasks of one's own; every rank takes its share.

    Args:
        session: the session.
        data: the data set.
        model: on the session's device, in eval mode.
        evaluator: of :func:`exp.engine.building.build_evaluator`.
        change: what becomes of each batch, on the device, before the model sees it; it also gets the numbers of the
            samples in the split, int64 (B,) on the CPU. What it draws at random should depend on these alone: which
            samples a batch has depends on the number of ranks.

    Returns:
        Over all ranks, by name.
    """
    loader = share_loader(split_in_use(session, data, "test"), data, session)
    evaluator.reset()
    with torch.no_grad():
        for numbers, batch in zip(loader.sampler, loader):
            moved = move(batch, session.device)
            with session.backend.autocast(session.config.precision):
                outputs = predictions(model, moved if change is None else change(moved, numbers))
            evaluator.update(outputs, moved)
            session.backend.end_batch(outputs)
    return evaluator.compute(session.distributed)
