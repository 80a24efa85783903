"""task=eval and predict: weights of a checkpoint as they are, on data that they were not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from exp.config.check import preflight_of
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["Eval", "Predict"]


@dataclass
class Eval(Task):
    """Tests weights as they are, also in detail: per series and horizon step, or per class."""

    _target_: str = "exp.tasks.eval.Eval"
    name: str = "eval"
    worst: int = 4
    """How many of the worst samples are drawn, truth beside prediction, where the data can; with ``plots=true``."""
    best: int = 2
    """How many of the best."""

    needs_weights: ClassVar[bool] = True
    work: ClassVar[str] = "exp.engine.evaluation.evaluate"


@dataclass
class Predict(Task):
    """Predicts with the weights of ``init_from``, as files and pictures; data bring further keys."""

    _target_: str = "exp.tasks.eval.Predict"
    name: str = "predict"
    input: Optional[str] = None
    """What to predict for, as the data say: images, a CSV file of new rows; null: the test split."""

    needs_weights: ClassVar[bool] = True

    def check(self, config: ExpConfig) -> None:
        """``task.input`` stands for the data where their family says so: a file of new rows."""
        take = getattr(preflight_of(config.data), "take_input", None)
        if self.input is not None and take is not None:
            take(config.data, self.input)

    def run(self, session: Session) -> dict[str, Any]:
        """Predict as the data do it (:meth:`exp.data.base.Data.predict`).

        Raises:
            ExpError: as they raise it.
        """
        from exp.engine.building import (
            about_data,
            build_data,
            build_evaluator,
            build_model,
            make_result,
            record_environment,
        )
        from exp.engine.outputs import predict_split
        from exp.engine.wrapper import check_placement

        record_environment(session)
        data = build_data(session)
        model = build_model(session, data).to(session.device)
        check_placement(model, session.device, session.info.rank)
        model.eval()
        session.begin()
        predicted = data.predict(session, model) or predict_split(session, data, model)
        session.distributed.barrier()
        return make_result(
            session,
            predicted.metrics,
            build_evaluator(session, data),
            files=predicted.files,
            measured_on=predicted.measured_on,
            data=about_data(session, data),
            published=None,  # of the whole test split; not to be compared with a few samples
        )
