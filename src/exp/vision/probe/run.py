"""task=probe: every probe at every setting, the best on validation, and its metrics on the test split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np

from exp.engine.building import make_result, record_environment
from exp.errors import ConfigError
from exp.runs.files import csv_content, write_atomically
from exp.vision.probe import fit
from exp.vision.probe.rows import Rows, check_sizes, per_class, rows_of
from exp.vision.probe.store import Store

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Found", "run_probes"]

_HELD_OUT = 5  # a fifth of the training images, where there is no test split besides validation


class Found(NamedTuple):
    """One probe at one setting.

    Attributes:
        probe: its name.
        shots: training images of each class; 0: all.
        seed: of the draw.
        setting: such as ``k=20 temperature=0.07``.
        val: metrics by name, by which the setting is chosen.
        test: likewise, of the chosen one reported.
        converged: whether the iterations were enough.
    """

    probe: str
    shots: int
    seed: int
    setting: str
    val: dict[str, float]
    test: dict[str, float]
    converged: bool = True


class _Job(NamedTuple):
    """What one rank does at a time."""

    probe: str
    shots: int
    seed: int
    strength: float | None = None


def run_probes(session: Session) -> dict[str, Any]:
    """Each rank does its share of the jobs; no result depends on how many there are.

    Writes ``probes.csv``, a row for each setting.

    Raises:
        ConfigError: the features do not go with the probes.
    """
    task, distributed = session.config.task, session.distributed
    record_environment(session)
    bench = _Bench(task)
    session.begin()
    session.say(
        f"{len(bench.train)} rows of {bench.train.dim} ({bench.kind}), {len(bench.classes)} classes; settings are "
        f"chosen on {bench.chosen_on}, results are of {bench.tested_on}"
    )
    jobs = _jobs(task)
    mine = [(number, bench.run(jobs[number])) for number in range(distributed.rank, len(jobs), distributed.world_size)]
    in_order = sorted(each for part in distributed.gather(mine) for each in part)
    everything = [Found(*found) for _, several in in_order for found in several]
    metrics, chosen, best = _chosen(everything, bench.metric)
    short = ", ".join(dict.fromkeys(each.setting for each in everything if not each.converged))
    if short:
        bench.notes.append(f"logistic: not converged after task.iterations={task.iterations}: {short}")
    for each in bench.notes:
        session.say(each)
    for each in chosen:
        shots = f", {each.shots} of each class, seed {each.seed}" if each.shots else ""
        session.say(f"{each.probe}: {each.setting}{shots}: {bench.metric} {100 * each.test[bench.metric]:.2f} %")
    if distributed.is_main:
        write_atomically(session.folder.path / "probes.csv", _csv(everything))
    about = bench.store.about
    return make_result(
        session,
        metrics,
        None,
        _mean(best, bench.metric, "val"),
        files=["probes.csv"],
        metric_name=bench.metric,
        metric=metrics[bench.metric],
        greater_is_better=True,
        probe=best[0].probe,
        chosen=[each._asdict() for each in chosen],
        store=str(task.store),
        fingerprint={key: about["fingerprint"][key] for key in ("weights", "preprocessing")},
        weights=about["weights"],
        notes=bench.notes,
        data={**about["parts"], **{key: about[key] for key in ("skipped",) if key in about}},
        measured_on=bench.tested_on,
        published=None,
    )


def _jobs(task: Any) -> list[_Job]:
    """In the order of the results; independent of one another."""
    found = []
    for shots in sorted(task.shots) or [0]:
        for probe in task.probes:
            # Without a draw, only SGD has anything random.
            for seed in task.seeds if shots or probe == "sgd" else task.seeds[:1]:
                strengths = task.strengths if probe == "logistic" else [None]
                found += [_Job(probe, shots, seed, strength) for strength in strengths]
    return found


class _Bench:
    """The rows of all splits, and what is done with them."""

    def __init__(self, task: Any) -> None:
        self.task, self.store = task, Store(task.store)
        self.classes, parts = self.store.about["classes"], self.store.about["parts"]
        self.pixels = self.store.array("train", "labels").ndim == 3
        self.kind = task.features or ("patches" if self.pixels else "cls+mean")
        if self.pixels != (self.kind == "patches"):
            labels = "a label for each pixel" if self.pixels else "a label for each image"
            raise ConfigError(f"task.features={self.kind}: the images of {self.store.folder} have {labels}")
        if self.pixels and "knn" in task.probes:
            task.probes = [probe for probe in task.probes if probe != "knn"]  # neighbors are of images
            if not task.probes:
                raise ConfigError("task.probes=[knn] is for images, not for patches; take [logistic,sgd]")
        self.tested_on, images = "test" if "test" in parts else "val", np.arange(parts["train"])
        if "test" in parts and "val" in parts:
            self.chosen_on, self.held = "val", np.arange(parts["val"])
        else:
            self.chosen_on, self.held = "train", np.sort(np.random.default_rng(0).permutation(images)[::_HELD_OUT])
            images = np.setdiff1d(images, self.held)
        self.train, self.val = self._rows("train", images), self._rows(self.chosen_on, self.held)
        self.test = self._rows(self.tested_on, None)
        self.metric = "mIoU" if self.pixels else "accuracy"
        self.notes = check_sizes(task, self.train)

    def _rows(self, split: str, images: np.ndarray | None) -> Rows:
        return rows_of(self.store, split, self.kind, self.task.resident_mib * 2**20, len(self.classes), images)

    def run(self, job: _Job) -> list[Any]:
        """All settings of a job, in the order of the user's: the arguments of :class:`Found`."""
        train = per_class(self.train, job.shots, job.seed) if job.shots else self.train
        made = self._neighbors(train) if job.probe == "knn" else self._linear(train, job)
        return [(job.probe, job.shots, job.seed, *each) for each in made]

    def _neighbors(self, train: Rows) -> list[Any]:
        wanted, count = [k for k in self.task.k if k <= len(train)], len(self.classes)
        found = [(rows, *fit.nearest(train, rows, max(wanted), self.task.metric)) for rows in (self.val, self.test)]
        made = []
        for k, warmth in [(k, warmth) for k in wanted for warmth in self.task.temperature]:
            values = [
                fit.of_images(fit.votes(alike[:, :k], train.labels[places[:, :k]], count, warmth), rows.labels)
                for rows, alike, places in found
            ]
            made.append((f"k={k} temperature={warmth:g}", *values))
        return made

    def _linear(self, train: Rows, job: _Job) -> list[Any]:
        task, count, converged = self.task, len(self.classes), True
        change = fit.standardizer(train) if task.standardize else np.asarray
        table = train.table(change)
        if job.strength is None:
            rates = list(task.learning_rates)
            weights = list(fit.fit_sgd(table, train.labels, count, rates, task.epochs, task.batch_size, job.seed))
            settings, tested = [f"lr={rate:g}" for rate in rates], weights
        else:
            fitted, converged = fit.fit_logistic(table, train.labels, count, job.strength, task.iterations)
            settings, weights = [f"C={job.strength:g}"], [fitted]
            tested = weights
            if task.refit:
                table = np.concatenate([table, self.val.table(change)])
                labels = np.concatenate([train.labels, self.val.labels])
                tested = [fit.fit_logistic(table, labels, count, job.strength, task.iterations)[0]]
        val = self._measured(self.chosen_on, self.held, self.val, change, weights)
        all_ = np.arange(self.store.about["parts"][self.tested_on])
        test = self._measured(self.tested_on, all_, self.test, change, tested)
        return [(*each, converged) for each in zip(settings, val, test)]

    def _measured(self, split: str, images: np.ndarray, rows: Rows, change: Any, weights: Sequence[Any]) -> list[Any]:
        if self.pixels:
            return fit.of_pixels(self.store, split, images, change, weights)
        return [fit.of_images(fit.scores(rows, change, each), rows.labels) for each in weights]


def _chosen(everything: list[Found], metric: str) -> tuple[dict[str, float], list[Found], list[Found]]:
    """The setting of each probe that is best on validation; of equal ones the first.

    Returns:
        Metrics for the record: those of the best probe by their own names, and of each probe, with means over seeds;
        what was chosen; and of that the best probe, over its seeds.
    """
    best: dict[tuple[str, int, int], Found] = {}
    groups: dict[tuple[str, int], list[Found]] = {}
    for each in everything:
        key = each.probe, each.shots, each.seed
        if key not in best or each.val[metric] > best[key].val[metric]:
            best[key] = each
    for each in best.values():
        groups.setdefault((each.probe, each.shots), []).append(each)
    most = max(shots for _, shots in groups)
    top = max((group for (_, shots), group in groups.items() if shots == most), key=lambda g: _mean(g, metric, "val"))
    metrics = {name: _mean(top, name) for name in top[0].test}
    for (probe, shots), group in groups.items():
        title = f"{probe}_{shots}_shots" if shots else probe
        metrics.update({f"{title}_{name}": _mean(group, name) for name in group[0].test})
        if len(group) > 1:
            metrics[f"{title}_{metric}_std"] = float(np.std([each.test[metric] for each in group], ddof=1))
    return metrics, list(best.values()), top


def _mean(group: list[Found], name: str, split: str = "test") -> float:
    return float(np.mean([getattr(each, split)[name] for each in group]))


def _csv(everything: list[Found]) -> bytes:
    rows = [
        {
            "probe": each.probe,
            "shots": each.shots or "all",
            "seed": each.seed,
            "setting": each.setting,
            **{f"val_{name}": value for name, value in each.val.items()},
            **{f"test_{name}": value for name, value in each.test.items()},
            "note": "" if each.converged else "not converged",
        }
        for each in everything
    ]
    return csv_content([rows[0], *(row.values() for row in rows)])
