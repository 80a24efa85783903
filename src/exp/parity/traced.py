"""task=parity, one of its two runs: train a few steps and leave a trace. The parent compares (:mod:`exp.parity`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp.engine.building import build_data, build_model, make_result, record_environment
from exp.engine.hooks import truncate_metrics
from exp.engine.training import Training
from exp.parity.trace import TraceHook, without_dropout

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["train_traced"]


def train_traced(session: Session) -> dict[str, Any]:
    """Train ``steps`` steps; ``trace.npz`` has what they computed, ``metrics.jsonl`` their losses."""
    record_environment(session)
    # Of an earlier comparison in this folder.
    session.when_started(lambda: truncate_metrics(session.folder.metrics, 0))
    data = build_data(session)
    model = build_model(session, data)
    without_dropout(model)
    training = Training(session, data, model)
    runner = training.runner
    runner.hooks.remove(training.checkpoint_hook)
    trace = TraceHook(session.folder.path / "trace.npz", session.config.steps)
    runner.register_hook(trace)
    runner.train()
    steps = runner.iter
    runner.close()
    return make_result(session, {}, None, steps=steps, random_modules=trace.random_modules)
