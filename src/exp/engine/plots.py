"""Pictures of a training that has ended: its curves, and what its data know to draw of the best weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from exp.draw.curves import training_curves
from exp.engine.fsdp import is_sharded
from exp.engine.wrapper import unwrapped
from exp.runfolder import write_atomically

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.metrics import Evaluator
    from exp.session import Session

__all__ = ["draw_training"]


def draw_training(session: Session, data: Data, model: Any, evaluator: Evaluator) -> list[str]:
    """Draw what there is to see of a training; by rank 0 alone, with the best weights in place.

    Always ``plots/curves.png``; and what ``data.pictures`` gives.

    Args:
        session: the session.
        data: the data set.
        model: wrapped or not, on the session's device; is left in eval mode.
        evaluator: after the test.

    Returns:
        The files, below the run folder.
    """
    contents: dict[str, bytes] = {}
    if session.folder.metrics.is_file():
        lines = session.folder.metrics.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        metric, greater = evaluator.metric_name, evaluator.greater_is_better
        contents["curves.png"] = training_curves(records, metric, greater, session.config.name)
    if is_sharded(unwrapped(model)):  # a forward pass would wait for the other ranks
        session.say("plots: no pictures of predictions with wrapper=fsdp; task=predict draws them")
    else:
        contents.update(data.pictures(session, model, evaluator))
    for name, content in contents.items():
        write_atomically(session.folder.plots / name, content)
    return [f"plots/{name}" for name in contents]
