"""task=probe: every probe at every setting, the best on validation, and what it says of the test part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exp.csvfile import csv_content
from exp.engine.building import make_result, record_environment
from exp.errors import ConfigError
from exp.runfolder import write_atomically
from exp.vision.probe.linear import Scale, fit_logistic, fit_sgd, scores
from exp.vision.probe.neighbours import nearest, votes
from exp.vision.probe.rows import Rows, check_sizes, per_class, rows_of
from exp.vision.probe.scoring import of_images, of_pixels
from exp.vision.probe.store import Store

if TYPE_CHECKING:
    import torch

    from exp.session import Session

__all__ = ["Found", "run_probes"]

_HELD_OUT = 5  # a fifth of the training images, where there is no test part besides validation


class Found(NamedTuple):
    """One probe at one setting.

    Attributes:
        probe: its name.
        shots: training images of each class; 0: all.
        seed: of the draw.
        setting: such as ``k=20 temperature=0.07``.
        val: metrics by name, by which the setting is chosen.
        test: likewise, of the chosen one reported.
        converged: whether a minimum that is looked for was reached.
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
    bench = _Bench(session)
    session.begin()
    for note in bench.notes:
        session.say(note)
    jobs = bench.jobs()
    session.say(
        f"{len(bench.train)} rows of {bench.train.dim} ({bench.kind}), {len(bench.classes)} classes; settings are "
        f"chosen on {bench.chosen_on}, results are of {bench.tested_on}"
    )
    mine = [found for job in jobs[distributed.rank :: distributed.world_size] for found in bench.run(job)]
    gathered = distributed.gather(mine)
    order = {job: place for place, job in enumerate(dict.fromkeys((job.probe, job.shots, job.seed) for job in jobs))}
    everything = [found for part in gathered for found in part]
    # Of the settings of one probe, the order in which the user gave them decides between equals.
    everything.sort(key=lambda each: (order[each.probe, each.shots, each.seed], bench.place_of(each)))
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
        fingerprint={key: bench.store.about["fingerprint"][key] for key in ("weights", "preprocessing")},
        weights=bench.store.about["weights"],
        notes=bench.notes,
        data={
            **bench.store.about["parts"],
            **{key: bench.store.about[key] for key in ("skipped",) if key in bench.store.about},
        },
        measured_on=bench.tested_on,
        published=None,
    )


class _Bench:
    """The rows of all parts, and what is done with them."""

    def __init__(self, session: Session) -> None:
        self.task, self.device = session.config.task, session.device
        self.store = Store(self.task.store)
        self.classes = self.store.about["classes"]
        pixels = self.store.array("train", "labels").ndim == 3
        self.kind = self.task.features or ("patches" if pixels else "cls+mean")
        self._check(pixels)
        parts = self.store.about["parts"]
        images = np.arange(parts["train"])
        self.tested_on = "test" if "test" in parts else "val"
        if "test" in parts and "val" in parts:
            self.chosen_on, held, kept = "val", np.arange(parts["val"]), images
        else:
            order = np.random.default_rng(0).permutation(images)
            held, kept = np.sort(order[::_HELD_OUT]), np.sort(np.delete(order, np.s_[::_HELD_OUT]))
            self.chosen_on = "train"
        self.images = {"val": held, "test": np.arange(parts[self.tested_on])}
        self.train = self._rows("train", kept)
        self.val = self._rows(self.chosen_on, held)
        self.test = self._rows(self.tested_on, None)
        self.several = self.train.labels.ndim == 2
        self.pixels = self.kind == "patches"
        self.metric = "mIoU" if self.pixels else "mAP" if self.several else "accuracy"
        if self.several and self.task.shots:
            raise ConfigError("task.shots counts images of one class each, and these have several labels; leave it out")
        self.notes = check_sizes(self.task, self.train, self.classes)

    def _check(self, pixels: bool) -> None:
        if pixels != (self.kind == "patches"):
            labels = "a label for each pixel" if pixels else "a label for each image"
            raise ConfigError(f"task.features={self.kind}: the images of {self.store.folder} have {labels}")
        if pixels and "knn" in self.task.probes:
            if len(self.task.probes) > 1 and list(self.task.probes) == ["knn", "logistic", "sgd"]:
                self.task.probes = ["logistic", "sgd"]  # the default, less what is for images
            else:
                raise ConfigError("task.probes: knn is for images, not for patches; take [logistic,sgd]")

    def _rows(self, part: str, images: np.ndarray | None) -> Rows:
        rows = rows_of(
            self.store, part, self.kind, self.device, self.task.resident_mib * 2**20, len(self.classes), images
        )
        rows.check_finite(f"task.store={self.task.store}, {part}")
        return rows

    def jobs(self) -> list[_Job]:
        """In the order of the results; independent of one another."""
        task = self.task
        found = []
        for shots in sorted(task.shots) or [0]:
            for probe in task.probes:
                # Without a draw, only SGD has anything random.
                for seed in task.seeds if shots or probe == "sgd" else task.seeds[:1]:
                    if probe == "logistic":
                        found += [_Job(probe, shots, seed, strength) for strength in task.strengths]
                    else:
                        found.append(_Job(probe, shots, seed))
        return found

    def place_of(self, found: Found) -> int:
        """Of a setting among those of its probe."""
        return self._settings(found.probe).index(found.setting)

    def _settings(self, probe: str) -> list[str]:
        task = self.task
        if probe == "knn":
            return [_neighbours(k, warmth) for k in task.k for warmth in task.temperature]
        if probe == "logistic":
            return [f"C={strength:g}" for strength in task.strengths]
        return [f"lr={rate:g}" for rate in task.learning_rates]

    def run(self, job: _Job) -> list[Found]:
        """All settings of a job."""
        train = per_class(self.train, job.shots, job.seed) if job.shots else self.train
        made = self._neighbours(train) if job.probe == "knn" else self._linear(train, job)
        return [Found(job.probe, job.shots, job.seed, *each) for each in made]

    def _neighbours(self, train: Rows) -> list[Any]:
        task, count = self.task, len(self.classes)
        wanted = [k for k in task.k if k <= len(train)]
        most = max(wanted)
        found = {part: nearest(train, rows, most) for part, rows in (("val", self.val), ("test", self.test))}
        made = []
        for k in wanted:
            for warmth in task.temperature:
                values = {}
                for part, rows in (("val", self.val), ("test", self.test)):
                    alike, places = found[part]
                    said = votes(alike[:, :k], train.labels[places[:, :k]], count, warmth)
                    values[part] = of_images(said, rows.labels)
                made.append((_neighbours(k, warmth), values["val"], values["test"]))
        return made

    def _linear(self, train: Rows, job: _Job) -> list[Any]:
        task, count = self.task, len(self.classes)
        scale = Scale(train if task.standardize else None)
        converged = True
        if job.strength is not None:
            fitted, converged = fit_logistic(train, scale, count, job.strength, task.iterations)
            weights = [fitted]
            settings = [f"C={job.strength:g}"]
        else:
            rates = list(task.learning_rates)
            weights = list(fit_sgd(train, scale, count, rates, task.epochs, task.batch_size, job.seed))
            settings = self._settings("sgd")
        val, test = (self._scored(part, scale, weights) for part in ("val", "test"))
        return list(zip(settings, val, test, [converged] * len(settings)))

    def _scored(self, part: str, scale: Scale, weights: list[torch.Tensor]) -> list[dict[str, float]]:
        rows, name = (self.val, self.chosen_on) if part == "val" else (self.test, self.tested_on)
        if self.pixels:
            return of_pixels(self.store, name, self.images[part], scale, weights, self.device)
        return [of_images(scores(rows, scale, each), rows.labels) for each in weights]


def _neighbours(k: int, temperature: float) -> str:
    return f"k={k} temperature={temperature:g}"


def _chosen(everything: list[Found], metric: str) -> tuple[dict[str, float], list[Found], Found, float]:
    """The setting of each probe that is best on validation.

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
    metrics: dict[str, float] = {}
    most = max(shots for _, shots in groups)
    top, selected = max(
        ((group, _mean(group, metric, "val")) for (_, shots), group in groups.items() if shots == most),
        key=lambda pair: pair[1],
    )
    metrics.update({name: _mean(top, name) for name in top[0].test})
    for (probe, shots), group in groups.items():
        title = f"{probe}_{shots}_shots" if shots else probe
        for name in group[0].test:
            metrics[f"{title}_{name}"] = _mean(group, name)
        if len(group) > 1:
            metrics[f"{title}_{metric}_std"] = float(np.std([each.test[metric] for each in group], ddof=1))
    return metrics, list(best.values()), top[0], selected


def _mean(group: list[Found], name: str, part: str = "test") -> float:
    return float(np.mean([getattr(each, part)[name] for each in group]))


def _csv(everything: list[Found]) -> bytes:
    names = list(everything[0].val)
    head = [
        "probe",
        "shots",
        "seed",
        "setting",
        *(f"val_{name}" for name in names),
        *(f"test_{name}" for name in names),
        "note",
    ]
    rows = [
        [
            *(each.probe, each.shots or "all", each.seed, each.setting, *each.val.values(), *each.test.values()),
            "" if each.converged else "not converged",
        ]
        for each in everything
    ]
    return csv_content([head, *rows])
