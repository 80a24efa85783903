"""task=predict: what a model says about data it has not been trained on, as files and pictures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from exp.engine.placement import check_placement
from exp.tasks.common import build_data, build_model, make_result, record_environment

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["run"]


def run(session: Session) -> dict[str, Any]:
    """Predict with the weights of ``init_from``; which files that gives is told by the module that the data name.

    ``data.predictor`` is its path; its ``predict(session, data, model)`` is called on every rank, and gives metrics by
    name (over what, its ``MEASURED_ON`` says) and the files that it wrote, those of all ranks on rank 0.

    Raises:
        ExpError: as that module raises it.
    """
    record_environment(session)
    data = build_data(session)
    model = build_model(session, data).to(session.device)
    check_placement(model, session.device, session.info.rank)
    model.eval()
    session.begin()
    predictor = importlib.import_module(data.predictor)
    metrics, files = predictor.predict(session, data, model)
    session.distributed.barrier()
    return make_result(
        session,
        metrics,
        data.metric_name,
        greater_is_better=data.greater_is_better,
        files=files,
        measured_on=predictor.MEASURED_ON,
        metric_units=getattr(data, "metric_units", {}),
        published=None,  # of the whole test part; not to be compared with a few samples
    )
