"""task=probe: every probe at every setting, the best on validation, and its metrics on the test split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np
import pandas as pd

from exp.engine.building import make_result, record_environment
from exp.errors import ConfigError
from exp.runs.files import write_atomically
from exp.vision.probe import fit
from exp.vision.probe.rows import Rows, check_sizes, per_class, rows_of
from exp.vision.probe.store import Store

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["run_probes"]

_HELD_OUT = 5  # a fifth of the training images, where there is no test split besides validation


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
    in_order = sorted((each for part in distributed.gather(mine) for each in part), key=lambda pair: pair[0])
    table = pd.DataFrame([row for _, rows in in_order for row in rows])
    metrics, best, by_validation, probe = _chosen(table, bench.metric)
    short = table["setting"][table["note"] != ""].unique()
    if len(short):
        bench.notes.append(f"logistic: not converged after task.iterations={task.iterations}: {', '.join(short)}")
    for each in bench.notes:
        session.say(each)
    for row in best.to_dict("records"):
        shots = f", {row['shots']} of each class, seed {row['seed']}" if row["shots"] else ""
        session.say(
            f"{row['probe']}: {row['setting']}{shots}: {bench.metric} {100 * row[f'test_{bench.metric}']:.2f} %"
        )
    if distributed.is_main:
        content = table.assign(shots=table["shots"].replace(0, "all")).to_csv(index=False)
        write_atomically(session.folder.path / "probes.csv", content.encode())
    about = bench.store.about
    return make_result(
        session,
        metrics,
        None,
        by_validation,
        files=["probes.csv"],
        metric_name=bench.metric,
        metric=metrics[bench.metric],
        greater_is_better=True,
        probe=probe,
        chosen=[_in_parts(row) for row in best.to_dict("records")],
        store=str(task.store),
        fingerprint=bench.store.used(),
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

    def run(self, job: _Job) -> list[dict[str, Any]]:
        """All settings of a job, in the order of the user's: rows of ``probes.csv``; 0 shots mean all."""
        train = per_class(self.train, job.shots, job.seed) if job.shots else self.train
        made = self._neighbors(train) if job.probe == "knn" else self._linear(train, job)
        return [
            {
                "probe": job.probe,
                "shots": job.shots,
                "seed": job.seed,
                "setting": setting,
                **{f"val_{name}": value for name, value in val.items()},
                **{f"test_{name}": value for name, value in test.items()},
                "note": "" if converged else "not converged",
            }
            for setting, val, test, converged in made
        ]

    def _neighbors(self, train: Rows) -> list[Any]:
        wanted, count = [k for k in self.task.k if k <= len(train)], len(self.classes)
        found = [(rows, *fit.nearest(train, rows, max(wanted), self.task.metric)) for rows in (self.val, self.test)]
        made = []
        for k, warmth in [(k, warmth) for k in wanted for warmth in self.task.temperature]:
            values = [
                fit.of_images(fit.votes(alike[:, :k], train.labels[places[:, :k]], count, warmth), rows.labels)
                for rows, alike, places in found
            ]
            made.append((f"k={k} temperature={warmth:g}", *values, True))
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


def _chosen(table: pd.DataFrame, metric: str) -> tuple[dict[str, float], pd.DataFrame, float, str]:
    """The setting of each probe that is best on validation; of equal ones the first.

    Returns:
        Metrics for the record: those of the best probe by their own names, and of each probe, with means over seeds;
        the rows that were chosen; the best probe's metric on validation, and its name.
    """
    best = table.loc[table.groupby(["probe", "shots", "seed"], sort=False)[f"val_{metric}"].idxmax()]
    groups = best.groupby(["probe", "shots"], sort=False)
    means, most = groups.mean(numeric_only=True), best["shots"].max()
    probe = means.xs(most, level="shots")[f"val_{metric}"].idxmax()
    test = means.filter(like="test_").rename(columns=lambda name: name[len("test_") :])
    metrics = {name: float(value) for name, value in test.loc[(probe, most)].items()}
    for key, row in test.iterrows():
        metrics.update({f"{_title(*key)}_{name}": float(value) for name, value in row.items()})
    for key, value in groups[f"test_{metric}"].std().dropna().items():
        metrics[f"{_title(*key)}_{metric}_std"] = float(value)
    return metrics, best, float(means.loc[(probe, most), f"val_{metric}"]), str(probe)


def _title(probe: str, shots: int) -> str:
    return f"{probe}_{shots}_shots" if shots else probe


def _in_parts(row: dict[str, Any]) -> dict[str, Any]:
    """A row for ``result.json``: metrics of ``val`` and ``test`` apart."""
    parts = {part: {name[len(part) + 1 :]: value for name, value in row.items() if name.startswith(f"{part}_")}
             for part in ("val", "test")}  # fmt: skip
    return {**{name: row[name] for name in ("probe", "shots", "seed", "setting", "note")}, **parts}
