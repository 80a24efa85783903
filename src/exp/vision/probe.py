"""task=probe: nearest neighbors and linear probes on stored features; settings are chosen on the validation split."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler, normalize

from exp.engine.result import make_result
from exp.errors import ConfigError
from exp.runs.files import write_atomically
from exp.vision.feature_store import FeatureStore
from exp.vision.metrics import ConfusionMatrix, nan_mean

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["LabeledFeatures", "fit_logistic", "fit_sgd", "nearest_neighbors", "patch_labels", "pixel_metrics",
           "read_labeled_features", "run_probes", "sample_per_class", "vote_shares"]  # fmt: skip

_HELD_OUT = 5  # a fifth of the training images is held out to choose settings, if there are not both val and test
_DIGITS = 6  # of a share of votes: sums of the same votes differ by rounding
_NEVER = -1e9  # bias of a class without training rows
# Learning rates of the heads that SGD trains at once, before scaling: the grid of Oquab et al., arXiv 2304.07193.
_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_BATCH = 128


class LabeledFeatures(NamedTuple):
    """The rows of one split that have a label.

    Attributes:
        split: name of the split in the store.
        table: features, float64 (n, D).
        labels: int64 (n,).
        images: numbers of the images that the rows belong to, ascending.
    """

    split: str
    table: np.ndarray
    labels: np.ndarray
    images: np.ndarray


def read_labeled_features(
    store: FeatureStore, split: str, kind: str, images: np.ndarray | None = None
) -> LabeledFeatures:
    """Read rows; the label of a patch is that of most of its pixels.

    Args:
        store: of features.
        split: ``train``, ``val`` or ``test``.
        kind: ``cls``, ``mean``, ``cls+mean`` or ``patches``.
        images: numbers of the images to use, ascending; None: all.

    Raises:
        ConfigError: the store has no such features, or no image has a label.
    """
    missing = [name for name in kind.split("+") if name not in store.about["kinds"]]
    if missing:
        raise ConfigError(
            f"task.features={kind}: {store.folder} has no {', '.join(missing)}; make one with task=features "
            "task.patches=true"
        )
    arrays, labels = [store.array(split, name) for name in kind.split("+")], np.array(store.array(split, "labels"))
    images = np.arange(len(labels)) if images is None else images
    image_numbers = np.arange(len(labels))
    if kind == "patches":
        image_numbers, labels = image_numbers.repeat(np.prod(arrays[0].shape[1:3])), patch_labels(store, split)
    numbers = np.flatnonzero((labels >= 0) & (labels < len(store.about["classes"])) & np.isin(image_numbers, images))
    if not len(numbers):
        raise ConfigError(f"{store.folder}: no image of {split} has a label; nothing can be probed")
    chosen = [array.reshape(-1, array.shape[-1])[numbers] for array in arrays]
    table = np.concatenate(chosen, axis=1).astype(np.float64)
    return LabeledFeatures(split, table, labels[numbers].astype(np.int64), images)


def patch_labels(store: FeatureStore, split: str) -> np.ndarray:
    """The most frequent class of each patch, int64 (N * h * w,); -1 for patches without a known pixel."""
    masks, (count, tall, wide, _) = store.array(split, "labels"), store.array(split, "patches").shape
    patch, labels = int(store.about["patch_size"]), np.empty((count, tall * wide), np.int64)
    for number in range(count):
        mask = masks[number][: tall * patch, : wide * patch]
        edges = ((0, tall * patch - mask.shape[0]), (0, wide * patch - mask.shape[1]))
        patches = np.pad(mask, edges, constant_values=255).reshape(tall, patch, wide, patch)
        classes = range(len(store.about["classes"]))
        counts = np.stack([(patches == label).sum(axis=(1, 3)).ravel() for label in classes], axis=1)
        labels[number] = np.where(counts.any(axis=1), counts.argmax(axis=1), -1)
    return labels.reshape(-1)


def sample_per_class(rows: LabeledFeatures, shots: int, seed: int) -> LabeledFeatures:
    """At most ``shots`` rows of each class, drawn at random."""
    generator = np.random.default_rng([seed, shots])
    chosen = [generator.permutation(np.flatnonzero(rows.labels == label))[:shots] for label in np.unique(rows.labels)]
    indices = np.sort(np.concatenate(chosen))
    return rows._replace(table=rows.table[indices], labels=rows.labels[indices])


def nearest_neighbors(train: np.ndarray, queries: np.ndarray, k: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The most similar training rows of each query.

    Args:
        train: training rows, (N, D).
        queries: (n, D).
        k: neighbors per query (k), at most N.
        metric: ``cosine``, or ``l2``.

    Returns:
        Similarities (n, k), descending: cosines, or negative distances; and positions in ``train``, int64 (n, k).
    """
    if metric == "cosine":
        train, queries = normalize(train), normalize(queries)
    distances, indices = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(train).kneighbors(queries)
    return (1.0 - 0.5 * distances**2 if metric == "cosine" else -distances), indices


def vote_shares(similarities: np.ndarray, labels: np.ndarray, num_classes: int, temperature: float) -> np.ndarray:
    """Shares of votes; a neighbor's vote has the weight exp(similarity / temperature) (Wu et al., arXiv 1805.01978).

    Args:
        similarities: (n, k).
        labels: of the neighbors, (n, k).
        num_classes: classes (K).
        temperature: 0.07 in the paper; inf: all votes have the same weight.

    Returns:
        (n, K), rounded to six digits, so that ties go to the first class.
    """
    # Relative to the nearest neighbor: the same shares, without overflow.
    weights = np.exp((similarities - similarities[:, :1]) / temperature)[..., None]
    return np.round((weights * np.eye(num_classes)[labels]).sum(axis=1) / weights.sum(axis=1), _DIGITS)


def fit_logistic(
    table: np.ndarray, labels: np.ndarray, num_classes: int, strength: float, iterations: int
) -> tuple[np.ndarray, bool]:
    """Train scikit-learn's multinomial logistic regression.

    Args:
        table: training rows, float64 (n, D).
        labels: int64 (n,).
        num_classes: classes (K).
        strength: C of scikit-learn: the larger, the less regularization.
        iterations: most iterations of L-BFGS.

    Returns:
        Weights and, in the last row, biases: float64 (D + 1, K); and whether L-BFGS has converged.
    """
    weights, present = np.zeros((table.shape[1] + 1, num_classes)), np.unique(labels)
    weights[-1] = _NEVER
    weights[-1, present] = 0.0
    if len(present) == 1:
        return weights, True
    model = LogisticRegression(C=strength, max_iter=iterations, tol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(table, labels)
    fitted = np.concatenate([model.coef_.T, model.intercept_[None]])
    # For two classes scikit-learn returns the weights of the second one only.
    weights[:, present] = fitted if len(present) > 2 else fitted * [[-0.5, 0.5]]
    return weights, bool(np.max(model.n_iter_) < iterations)


def fit_sgd(
    table: np.ndarray, labels: np.ndarray, num_classes: int, epochs: int, seed: int, rates: Sequence[float] = _RATES
) -> np.ndarray:
    """Train linear heads with several learning rates on the same batches, as Oquab et al. (arXiv 2304.07193) do.

    Momentum 0.9, no weight decay, learning rates scaled by batch / 256 with a cosine schedule to 0. Unlike the authors'
    heads, which get features of augmented images, these get features of images without augmentation.

    Args:
        table: training rows, (n, D).
        labels: int64 (n,).
        num_classes: classes (K).
        epochs: epochs over all rows.
        seed: of the initial weights and of the order of the rows.
        rates: learning rates of the heads (G), before they are scaled.

    Returns:
        float32 (G, D + 1, K), biases last.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, dim = len(rates), table.shape[1]
    weights = (torch.randn((dim, 1, num_classes), generator=generator) * 0.01).expand(-1, heads, -1).reshape(dim, -1)
    weights = torch.cat([weights, torch.zeros(1, heads * num_classes)])
    momentum, truth = torch.zeros_like(weights), torch.eye(num_classes)[torch.from_numpy(labels)].unsqueeze(1)
    scaled = torch.tensor(rates).mul(_BATCH / 256).repeat_interleave(num_classes)
    inputs = F.pad(torch.from_numpy(table).float(), (0, 1), value=1.0)
    step, steps = 0, epochs * -(-len(table) // _BATCH)
    for _ in range(epochs):
        for indices in torch.randperm(len(table), generator=generator).split(_BATCH):
            block = inputs[indices]
            probabilities = torch.softmax((block @ weights).view(len(indices), heads, num_classes), dim=-1)
            gradient = (probabilities - truth[indices]).flatten(1) / len(indices)
            momentum.mul_(0.9).add_(block.t() @ gradient)
            weights -= scaled * (0.5 * (1.0 + math.cos(math.pi * step / steps))) * momentum
            step += 1
    return weights.view(dim + 1, heads, num_classes).transpose(0, 1).numpy()


def image_metrics(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """``accuracy`` and ``macro_f1`` of scores (n, K); ``labels``: int64 (n,)."""
    best = scores.argmax(axis=1)
    return {"accuracy": float(accuracy_score(labels, best)), "macro_f1": float(f1_score(labels, best, average="macro"))}


def pixel_metrics(store: FeatureStore, rows: LabeledFeatures, transform: Any, weights: np.ndarray) -> dict[str, float]:
    """``mIoU`` and ``pixel_accuracy`` of a linear probe on patches; logits are interpolated to the pixels (bilinear).

    Args:
        store: has patches and masks.
        rows: rows whose images are measured.
        transform: transform of features before the probe.
        weights: of the probe, biases last, (D + 1, K).
    """
    features, masks = store.array(rows.split, "patches"), store.array(rows.split, "labels")
    matrix, patch, (tall, wide, dim) = ConfusionMatrix(weights.shape[1]), store.about["patch_size"], features.shape[1:]
    for number in rows.images:
        block = transform(np.array(features[number], np.float64).reshape(tall * wide, dim))
        mask = torch.from_numpy(np.array(masks[number]))
        logits = torch.from_numpy(block @ weights[:-1] + weights[-1]).float().t().reshape(1, -1, tall, wide)
        pixels = F.interpolate(logits, size=(tall * patch, wide * patch), mode="bilinear", align_corners=False)
        matrix.update(pixels[0, :, : mask.shape[0], : mask.shape[1]].argmax(dim=0), mask)
    return {"mIoU": nan_mean(matrix.per_class()["iou"]), "pixel_accuracy": matrix.accuracy()}


def _jobs(task: Any) -> list[dict[str, Any]]:
    """The jobs that are distributed over ranks, in the order of the results; ``shots`` 0 means all images."""
    jobs = []
    for shots in sorted(task.shots) or [0]:
        for probe in task.probes:
            # Without ``shots``, only sgd depends on the seed.
            for seed in task.seeds if shots or probe == "sgd" else task.seeds[:1]:
                job = {"probe": probe, "shots": shots, "seed": seed}
                jobs += [{**job, "strength": strength} for strength in task.C] if probe == "logistic" else [job]
    return jobs


class ProbeRunner:
    """The rows of all splits, and the probes on them."""

    def __init__(self, task: Any) -> None:
        self.task, self.store = task, FeatureStore(task.store)
        counts, self.pixels = self.store.about["splits"], self.store.array("train", "labels").ndim == 3
        self.classes = len(self.store.about["classes"])
        self.metric = "mIoU" if self.pixels else "accuracy"
        self.kind = kind = task.features or ("patches" if self.pixels else "cls+mean")
        if self.pixels != (kind == "patches"):
            labels = "a label for each pixel" if self.pixels else "a label for each image"
            raise ConfigError(f"task.features={kind}: the images of {self.store.folder} have {labels}")
        if self.pixels:
            task.probes = [probe for probe in task.probes if probe != "knn"]  # neighbors are of images
            if not task.probes:
                raise ConfigError("task.probes=[knn] is for images, not for patches; take [logistic,sgd]")
        images = np.arange(counts["train"])
        if "test" in counts and "val" in counts:
            self.val = read_labeled_features(self.store, "val", kind)
        else:
            held_out = np.sort(np.random.default_rng(0).permutation(images)[::_HELD_OUT])
            images = np.setdiff1d(images, held_out)
            self.val = read_labeled_features(self.store, "train", kind, held_out)
        self.train = read_labeled_features(self.store, "train", kind, images)
        self.test = read_labeled_features(self.store, "test" if "test" in counts else "val", kind)

    def notes(self) -> list[str]:
        """A warning if some of ``task.k`` exceed the number of training rows.

        Raises:
            ConfigError: all of them do.
        """
        task, counts = self.task, np.unique(self.train.labels, return_counts=True)[1]
        fewest = int(np.minimum(counts, min(task.shots, default=counts.max())).sum())
        beyond = [k for k in task.k if k > fewest] if "knn" in task.probes else []
        if beyond and min(task.k) > fewest:
            raise ConfigError(f"task.k={list(task.k)}: there are only {fewest} training rows; take fewer neighbors")
        return [f"task.k={beyond}: left out where there are fewer training rows; the least are {fewest}"] * bool(beyond)

    def run(self, probe: str, shots: int, seed: int, strength: float = 0.0) -> list[dict[str, Any]]:
        """Run a job: a row of ``probes.csv`` for each setting, in the order of the keys."""
        train = sample_per_class(self.train, shots, seed) if shots else self.train
        results = self._run_knn(train) if probe == "knn" else self._run_linear(train, probe, seed, strength)
        job = {"probe": probe, "shots": shots, "seed": seed}
        return [
            {**job, "setting": setting, "note": "" if converged else "not converged", "val": val, "test": test}
            for setting, val, test, converged in results
        ]

    def _run_knn(self, train: LabeledFeatures) -> list[Any]:
        task, ks = self.task, [k for k in self.task.k if k <= len(train.labels)]
        splits = (self.val, self.test)
        neighbors = [(rows, *nearest_neighbors(train.table, rows.table, max(ks), task.metric)) for rows in splits]
        results = []
        for k, temperature in [(k, temperature) for k in ks for temperature in task.temperature]:
            values = []
            for rows, similarities, indices in neighbors:
                shares = vote_shares(similarities[:, :k], train.labels[indices[:, :k]], self.classes, temperature)
                values.append(image_metrics(shares, rows.labels))
            results.append((f"k={k} temperature={temperature:g}", *values, True))
        return results

    def _run_linear(self, train: LabeledFeatures, probe: str, seed: int, strength: float) -> list[Any]:
        task = self.task
        # Constant columns are only centered.
        transform = StandardScaler().fit(train.table).transform if task.standardize else np.asarray
        table, labels = transform(train.table), train.labels
        if probe == "sgd":
            heads = fit_sgd(table, labels, self.classes, task.epochs, seed)
            return [
                (f"lr={rate:g}", *(self._evaluate(rows, transform, head) for rows in (self.val, self.test)), True)
                for rate, head in zip(_RATES, heads)
            ]
        head, converged = fit_logistic(table, labels, self.classes, strength, task.max_iter)
        val = self._evaluate(self.val, transform, head)
        if task.refit:
            table = np.concatenate([table, transform(self.val.table)])
            labels = np.concatenate([labels, self.val.labels])
            head, _ = fit_logistic(table, labels, self.classes, strength, task.max_iter)
        return [(f"C={strength:g}", val, self._evaluate(self.test, transform, head), converged)]

    def _evaluate(self, rows: LabeledFeatures, transform: Any, head: np.ndarray) -> dict[str, float]:
        if self.pixels:
            return pixel_metrics(self.store, rows, transform, head)
        return image_metrics(transform(rows.table) @ head[:-1] + head[-1], rows.labels)


def run_probes(session: Session) -> dict[str, Any]:
    """Run all jobs, each rank a share, and write ``probes.csv`` with a row for each setting.

    Results do not depend on the number of ranks.

    Raises:
        ConfigError: ``task.features``, ``task.probes`` or ``task.k`` does not fit the store.
    """
    task, distributed = session.config.task, session.distributed
    runner = ProbeRunner(task)
    notes = runner.notes()
    session.start_run()
    chosen_on, tested_on, about = runner.val.split, runner.test.split, runner.store.about
    session.print(
        f"{len(runner.train.labels)} rows of {runner.train.table.shape[1]} ({runner.kind}), {runner.classes} classes; "
        f"settings are chosen on {chosen_on}, results are of {tested_on}"
    )
    jobs = _jobs(task)
    results = [
        (number, runner.run(**jobs[number])) for number in range(distributed.rank, len(jobs), distributed.world_size)
    ]
    ordered = sorted((pair for part in distributed.gather(results) for pair in part), key=lambda pair: pair[0])
    rows = [row for _, job_rows in ordered for row in job_rows]
    table = pd.json_normalize(rows, sep="_")  # val_accuracy, test_accuracy, ...
    metrics, best, by_validation, probe = _select_settings(table, runner.metric)
    unconverged = table["setting"][table["note"] != ""].unique()
    if len(unconverged):
        notes.append(f"logistic: not converged after task.max_iter={task.max_iter}: {', '.join(unconverged)}")
    for note in notes:
        session.print(note)
    for row in best.to_dict("records"):
        shots = f", {row['shots']} of each class, seed {row['seed']}" if row["shots"] else ""
        session.print(
            f"{row['probe']}: {row['setting']}{shots}: {runner.metric} {100 * row[f'test_{runner.metric}']:.2f} %"
        )
    if distributed.is_main:
        content = table.assign(shots=table["shots"].replace(0, "all")).to_csv(index=False)
        write_atomically(session.folder.path / "probes.csv", content.encode())
    return make_result(
        session,
        metrics,
        None,
        by_validation,
        files=["probes.csv"],
        metric_name=runner.metric,
        metric=metrics[runner.metric],
        greater_is_better=True,
        probe=probe,
        chosen=[rows[number] for number in best.index],
        store=str(task.store),
        fingerprint=runner.store.used(),
        weights=about["weights"],
        notes=notes,
        data={**about["splits"], **{key: about[key] for key in ("skipped",) if key in about}},
        measured_on=tested_on,
        published=None,
    )


def _select_settings(table: pd.DataFrame, metric: str) -> tuple[dict[str, float], pd.DataFrame, float, str]:
    """Choose the setting of each probe that is best on validation; ties go to the first.

    Returns:
        Metrics for the record, as means over seeds: those of the best probe, and those of each probe with its name as a
        prefix; the chosen rows; the best probe's metric on validation; the name of the best probe.
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
