"""Learning curves: what ``metrics.jsonl`` of a run tells of it over its optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from exp.report.run import is_number

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["Curve", "History", "history_of", "thinned"]

_PLACES = ("split", "step", "epoch", "units")  # of a record: say what the other values are of


class Curve(NamedTuple):
    """One quantity of a run over its optimizer steps.

    Attributes:
        steps: ascending.
        values: finite, as many.
    """

    steps: list[float]
    values: list[float]


class History(NamedTuple):
    """All curves of a run.

    Attributes:
        curves: by split and name, as in ``("val", "mse")``, ``("train", "grad_norm")``; ``("train", "loss")`` is the
            sum of the losses.
        epochs: epochs completed; None where the records cannot tell, as in a first epoch that did not end.
        seconds: time spent training, without validations; None where the throughput was not recorded.
    """

    curves: dict[tuple[str, str], Curve]
    epochs: Curve | None
    seconds: Curve | None


def history_of(run: Run) -> History:
    """Read the run's ``metrics.jsonl``; what is no finite number is left out."""
    curves: dict[tuple[str, str], Curve] = {}
    ends: dict[int, float] = {}  # the last step of each epoch that has one
    seconds = Curve([0.0], [0.0])
    batch: Any = run.config.get("global_batch_size")
    validated: set[tuple[Any, float]] = set()
    for record in run.records():
        split, step = str(record["split"]), record["step"]
        values = {name: value for name, value in record.items() if name not in _PLACES and is_number(value)}
        if split == "train":
            parts = [value for name, value in values.items() if name.startswith("loss_")]
            if parts and record.get("loss") is None:  # no reading of the sum: it is that of its parts
                values["loss"] = sum(parts)
            if isinstance(record.get("epoch"), int):
                ends[record["epoch"]] = step
            rate = values.get("samples_per_second", 0)
            if rate > 0 and is_number(batch):
                spent = (step - seconds.steps[-1]) * batch / rate
                seconds.steps.append(step)
                seconds.values.append(seconds.values[-1] + max(spent, 0.0))
        elif split == "val":
            validated.add((record.get("epoch"), step))
        else:
            continue
        for name, value in values.items():
            curve = curves.setdefault((split, name), Curve([], []))
            curve.steps.append(step)
            curve.values.append(value)
    return History(curves, _epochs(ends, validated), seconds if len(seconds.steps) > 1 else None)


def thinned(curve: Curve, most: int) -> Curve:
    """At most ``most`` points: of each stretch the least and the greatest, so that no spike is lost."""
    count = len(curve.steps)
    if count <= most:
        return curve
    kept = {0, count - 1}
    stretches = (most - 2) // 2
    for number in range(stretches):
        begin, end = 1 + number * (count - 2) // stretches, 1 + (number + 1) * (count - 2) // stretches
        part = range(begin, end)
        if part:
            kept |= {min(part, key=curve.values.__getitem__), max(part, key=curve.values.__getitem__)}
    order = sorted(kept)
    return Curve([curve.steps[place] for place in order], [curve.values[place] for place in order])


def _epochs(ends: dict[int, float], validated: set[tuple[Any, float]]) -> Curve | None:
    """Epochs over steps. Of every epoch that ended the last step is recorded; the last one may not have ended."""
    steps, epochs = [0.0], [0.0]
    for epoch, step in sorted(ends.items()):
        done = epoch + 1.0
        # A validation after an epoch is of the next one, a validation within it is not.
        if epoch == max(ends) and (epoch + 1, step) not in validated:
            if len(steps) < 2:
                return None
            length = (steps[-1] - steps[-2]) / (epochs[-1] - epochs[-2])
            done = min(epochs[-1] + (step - steps[-1]) / length, done)
        steps.append(step)
        epochs.append(done)
    return Curve(steps, epochs) if len(steps) > 1 else None
