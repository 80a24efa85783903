"""Pictures of a training that has ended: its curves, and what its data know to draw of the best weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from exp.draw.curves import training_curves
from exp.runfolder import write_atomically

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["draw_training"]


def draw_training(session: Session, data: Any, model: Any, metrics: Any = None) -> list[str]:
    """Draw what there is to see of a training; by rank 0 alone, with the best weights in place.

    Always ``plots/curves.png``; and what ``data.pictures(session, model, metrics)`` gives, where the data have it.

    Args:
        session: the session.
        data: the data set.
        model: wrapped or not, on the session's device; is left in eval mode.
        metrics: an accumulator of ``data.metrics()`` after its ``compute``; None: there is none.

    Returns:
        The files, below the run folder.
    """
    contents: dict[str, bytes] = {}
    if session.folder.metrics.is_file():
        lines = session.folder.metrics.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        contents["curves.png"] = training_curves(records, data.metric_name, data.greater_is_better, session.config.name)
    if hasattr(data, "pictures"):
        contents.update(data.pictures(session, model, metrics))
    for name, content in contents.items():
        write_atomically(session.folder.plots / name, content)
    return [f"plots/{name}" for name in contents]
