"""task=corruptions: metrics of weights on corrupted inputs. Imports no torch before it runs."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List

from exp.errors import ConfigError
from exp.plugins import Plugin
from exp.task import Task

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Corruptions", "plugin"]

AMOUNTS = {
    "noise": (0.1, 0.2, 0.4, 0.7, 1.0),  # standard deviations of the sample
    "missing": (0.05, 0.1, 0.2, 0.35, 0.5),  # shares of its values
    "blackout": (0.05, 0.1, 0.2, 0.35, 0.5),  # shares of its longest axis, in one piece
}
"""Kinds of corruption, with the amounts of severities 1 to 5."""


@dataclass
class Corruptions(Task):
    """Tests the weights of ``init_from`` on clean inputs, and on each corruption in each severity."""

    _target_: str = "corrupted.task.Corruptions"
    name: str = "corruptions"
    key: str = "x"
    """Name of the tensor of the batch to corrupt: ``x`` for series, ``image`` for images."""
    kinds: List[str] = field(default_factory=lambda: list(AMOUNTS))
    severities: List[int] = field(default_factory=lambda: [1, 3, 5])
    """From 1 to 5."""

    needs_weights: ClassVar[bool] = True

    def check(self, config: Any) -> None:
        """In the parent: refuse unknown kinds and severities."""
        unknown = [kind for kind in self.kinds if kind not in AMOUNTS]
        if unknown or not self.kinds:
            raise ConfigError(f"task.kinds={self.kinds} must be some of {', '.join(AMOUNTS)}")
        if not self.severities or not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise ConfigError(f"task.severities={self.severities} must be some of 1, 2, 3, 4, 5")

    def run(self, session: Session) -> dict[str, Any]:
        """Called on every rank; rank 0 writes ``corruptions.csv``."""
        import torch

        from corrupted.inputs import corrupt
        from exp.engine.build import build_data, build_evaluator, build_model
        from exp.engine.evaluate import measure
        from exp.engine.result import make_result

        data = build_data(session)
        model = build_model(session, data).to(session.device).eval()
        evaluator = build_evaluator(session, data)
        session.start_run()
        clean = measure(session, data, model, evaluator)
        rows: list[list[Any]] = [["none", 0, *clean.values()]]
        found = dict(clean)
        for kind in self.kinds:
            for severity in self.severities:

                def changed(batch: dict[str, Any], numbers: torch.Tensor) -> dict[str, Any]:
                    if not isinstance(batch.get(self.key), torch.Tensor):
                        tensors = [name for name, value in batch.items() if isinstance(value, torch.Tensor)]
                        raise ConfigError(f"task.key={self.key} is no tensor of the batch: {', '.join(tensors)}")
                    amount = AMOUNTS[kind][severity - 1]  # noqa: B023 - called before they change
                    inputs = corrupt(batch[self.key], kind, amount, session.config.seed, numbers)  # noqa: B023
                    return {**batch, self.key: inputs}

                values = measure(session, data, model, evaluator, changed)
                rows.append([kind, severity, *values.values()])
                found.update({f"{name}_{kind}_{severity}": value for name, value in values.items()})
                session.print(
                    f"{kind} {severity}: {', '.join(f'{name} {value:.4g}' for name, value in values.items())}"
                )
        if session.distributed.is_main:
            with (session.folder.path / "corruptions.csv").open("w", newline="") as file:
                csv.writer(file).writerows([["corruption", "severity", *clean], *rows])
        return make_result(session, found, evaluator, measured_on=data.test_split_name, files=["corruptions.csv"])


plugin = Plugin(structures={"task/corruptions": Corruptions}, config="corrupted.conf")
