"""task=probe: every probe at every setting, the best on validation, and its metrics on the test split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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
    for note in bench.notes:
        session.say(note)
    jobs = _jobs(task)
    session.say(
        f"{len(bench.train)} rows of {bench.train.dim} ({bench.kind}), {len(bench.classes)} classes; settings are "
        f"chosen on {bench.chosen_on}, results are of {bench.tested_on}"
    )
    mine = [(jobs.index(job), bench.run(job)) for job in jobs[distributed.rank :: distributed.world_size]]
    in_order = sorted(each for part in distributed.gather(mine) for each in part)
    everything = [Found(*found) for _, several in in_order for found in several]
    metrics, chosen, best, selected = _chosen(everything, bench.metric)
    short = ", ".join(dict.fromkeys(each.setting for each in everything if not each.converged))
    if short:
        bench.notes.append(
            f"logistic: not converged after task.iterations={task.iterations}: {short}; allow more, or take smaller "
            "task.strengths"
        )
        session.say(f"warning: {bench.notes[-1]}")
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
        selected,
        files=["probes.csv"],
        metric_name=bench.metric,
        metric=metrics[bench.metric],
        greater_is_better=True,
        probe=best.probe,
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
            if list(task.probes) != ["knn", "logistic", "sgd"]:
                raise ConfigError("task.probes: knn is for images, not for patches; take [logistic,sgd]")
            task.probes = ["logistic", "sgd"]  # the default, less what is for images
        images = np.arange(parts["train"])
        self.tested_on = "test" if "test" in parts else "val"
        if "test" in parts and "val" in parts:
            self.chosen_on, self.held = "val", np.arange(parts["val"])
        else:
            order = np.random.default_rng(0).permutation(images)
            self.chosen_on, self.held, images = (
                "train",
                np.sort(order[::_HELD_OUT]),
                np.sort(np.delete(order, np.s_[::_HELD_OUT])),
            )
        self.train, self.val = self._rows("train", images), self._rows(self.chosen_on, self.held)
        self.test = self._rows(self.tested_on, None)
        several = self.train.labels.ndim == 2
        self.metric = "mIoU" if self.pixels else "mAP" if several else "accuracy"
        if several and task.shots:
            raise ConfigError("task.shots counts images of one class each, and these have several labels; leave it out")
        self.notes = check_sizes(task, self.train, self.classes)

    def _rows(self, split: str, images: np.ndarray | None) -> Rows:
        return rows_of(self.store, split, self.kind, self.task.resident_mib * 2**20, len(self.classes), images)

    def run(self, job: _Job) -> list[Any]:
        """All settings of a job, in the order of the user's."""
        train = per_class(self.train, job.shots, job.seed) if job.shots else self.train
        made = self._neighbours(train) if job.probe == "knn" else self._linear(train, job)
        return [(job.probe, job.shots, job.seed, *each) for each in made]

    def _neighbours(self, train: Rows) -> list[Any]:
        task, wanted = self.task, [k for k in self.task.k if k <= len(train)]
        found = [(rows, *fit.nearest(train, rows, max(wanted), task.metric)) for rows in (self.val, self.test)]
        made = []
        for k in wanted:
            for warmth in task.temperature:
                values = [
                    fit.of_images(
                        fit.votes(alike[:, :k], train.labels[places[:, :k]], len(self.classes), warmth), rows.labels
                    )
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
        if self.pixels:
            val = fit.of_pixels(self.store, self.chosen_on, self.held, change, weights)
            test = fit.of_pixels(
                self.store, self.tested_on, np.arange(self.store.about["parts"][self.tested_on]), change, tested
            )
        else:
            val, test = (
                [fit.of_images(fit.scores(rows, change, each), rows.labels) for each in several]
                for rows, several in ((self.val, weights), (self.test, tested))
            )
        return [(*each, converged) for each in zip(settings, val, test)]


def _chosen(everything: list[Found], metric: str) -> tuple[dict[str, float], list[Found], Found, float]:
    """The setting of each probe that is best on validation; of equal ones the first.

    Returns:
        Metrics for the record: those of the best probe by their own names, and of each probe, with means over seeds;
        what was chosen; the best of all; and its metric on validation.
    """
    best: dict[tuple[str, int, int], Found] = {}
    for each in everything:
        key = each.probe, each.shots, each.seed
        if key not in best or each.val[metric] > best[key].val[metric]:
            best[key] = each
    groups: dict[tuple[str, int], list[Found]] = {}
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
    return metrics, list(best.values()), top[0], _mean(top, metric, "val")


def _mean(group: list[Found], name: str, split: str = "test") -> float:
    return float(np.mean([getattr(each, split)[name] for each in group]))


def _csv(everything: list[Found]) -> bytes:
    names = list(everything[0].val)
    head = ["probe", "shots", "seed", "setting", *(f"{split}_{name}" for split in ("val", "test") for name in names)]
    rows = [
        [each.probe, each.shots or "all", each.seed, each.setting, *each.val.values(), *each.test.values(),
         "" if each.converged else "not converged"] for each in everything
    ]  # fmt: skip
    return csv_content([[*head, "note"], *rows])
