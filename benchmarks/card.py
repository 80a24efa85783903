r"""How fast one card trains: a table of exp beside the plainest loop over the same work, in at most seven minutes.

Each row runs in turns with its reference (A B A B ...) in one process; values are medians over the turns, and a ratio
is the median of the ratios of the turns. Nothing is downloaded: weights are random, images and series come with exp or
are made. The share of the matrix rate is that of matrix products of the same precision, measured in the same run.

    python benchmarks/card.py [--rows scenes_s segmentation_l] [--max-autotune] [--out card]
    python benchmarks/card.py --device cpu --small   # every row at tiny sizes, to see that it runs; no figures

It needs this folder and an installed wheel of exp, with torch >= 2.4. On a machine without a network that has torch
already, bring the wheels of exp and of what it needs (on a machine with a network, of the same Python):

    pip wheel --no-deps -w wheels . hydra-core omegaconf antlr4-python3-runtime==4.9.3 mmengine mmcv-lite addict \
        yapf platformdirs termcolor submitit cloudpickle opencv-python-headless
    pip install --no-index --no-deps wheels/*.whl   # there, without those that it has; `pip check` names what lacks
    python card.py --commit <of the wheel>   # in a copy of this folder

It writes ``card.json`` and ``card.md``, after each row. transformers is the reference of the image models, and timm, if
installed, a second one. Rows for which no time is left, and rows that fail, are listed; a failure gives exit code 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import checkpoint_blocking
import cv2
import mmcv
import numpy as np
import step_overhead
import timebridge_epoch
import torch
import torch.nn.functional as F
from dinov3_step import REFERENCE, floating_operations, matrix_rate, reference_model
from hydra import initialize_config_module
from mmengine.hooks import Hook
from positions import Positions
from torch import nn
from torch.utils.data import DataLoader, Dataset

from exp.config.compose import compose, typed
from exp.config.sources import register
from exp.data.loader import TrainBatchSampler, device_loader, make_loader, to_device
from exp.distributed import Distributed
from exp.engine.build import build_data, build_model
from exp.engine.fsdp import FullyShard
from exp.engine.loops import TrainLoop
from exp.engine.optim import BackendOptimWrapper, build_optimizer
from exp.engine.trainer import Trainer
from exp.hardware.compat import dispatch_mode
from exp.hardware.environment import describe_environment, version_of
from exp.hardware.registry import create_backend
from exp.runs.folder import RunFolder
from exp.session import RankInfo, Session
from exp.tasks.train import Train
from exp.vision.backbones.vit_weights import SIZES

CLASSES = 10
TIMM = {"vits16": "vit_small_patch16_dinov3", "vitb16": "vit_base_patch16_dinov3", "vitl16": "vit_large_patch16_dinov3"}
_OPTIMIZER = [
    "optim=adamw", "optim.lr=1e-4", "optim.weight_decay=0.05", "optim.decay_norm_and_bias=true",
    "optim.clip_grad_norm=null", "optim.options={fused: true}", "schedule=constant",
]  # fmt: skip


@dataclass
class Line:
    """A line of the table.

    Attributes:
        row: name of the row.
        what: whose value it is.
        value: the median, in ``unit``.
        ratio: how many times as fast as the reference, the first line of its turns; None: there is no reference.
        share: of the matrix rate.
        memory: peak of a step in bytes, with weights and the optimizer's state.
    """

    row: str
    what: str
    value: float
    unit: str
    ratio: float | None = None
    share: float | None = None
    memory: int | None = None


class Bench:
    """What all rows share.

    Attributes:
        choice: of ``backend`` on the command line.
        small: whether sizes are tiny.
        steps: training steps of a turn.
        rounds: turns of each contender, after one that warms up.
        rate: operations per second of matrix products.
        compilation: arguments of ``torch.compile``.
        found: the lines of the rows before.
        folder: of files that are deleted in the end.
    """

    def __init__(self, choice: str, small: bool, mode: str, folder: Path) -> None:
        self.choice, self.small, self.folder = choice, small, folder
        self.found: list[Line] = []
        # At tiny sizes without the generation of code, which takes a minute for each model.
        self.compilation = {"backend": "aot_eager"} if small else {"mode": mode}
        self.backend = create_backend(compose("config", [f"backend={choice}"]).backend)
        for name, value in self.backend.worker_env(0, 1, single_node=True).items():
            os.environ.setdefault(name, value)
        self.device = self.backend.set_device(0)
        self.precision = "bf16" if self.device.type != "cpu" else "fp32"
        self.backend.set_precision(self.precision)
        self.steps, self.rounds = (1, 1) if small else (10, 5)
        self.rate = matrix_rate(self.device, torch.bfloat16 if self.precision == "bf16" else torch.float32)

    def session(self, *overrides: str) -> Session:
        """A session of one rank on the device, of a configuration as the command line composes it."""
        settings = [f"precision={self.precision}", f"backend={self.choice}", "log_every=1000000", "plots=false"]
        config = typed(compose("config", [*overrides, *settings]))  # the loss is read after the last step of a turn
        folder = RunFolder(tempfile.mkdtemp(dir=self.folder))
        folder.create()
        session = Session(config, folder, RankInfo(), self.backend, Train())
        session.device, session.distributed = self.device, Distributed()
        return session

    def in_turns(self, contenders: dict[str, Contender]) -> tuple[dict[str, list[float]], dict[str, int]]:
        """Seconds of each turn, and the peak of memory in bytes, if the device counts it."""
        for contender in contenders.values():
            contender.turn(self.steps)
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        memory: dict[str, int] = {}
        for _ in range(self.rounds):
            for name, contender in contenders.items():
                before = self.backend.usage().get("allocated")
                if before is not None:
                    self.backend.torch_module.reset_peak_memory_stats()
                seconds[name].append(contender.turn(self.steps))
                if before is not None:  # the other contenders' weights stay on the device, too
                    peak = self.backend.usage()["max_allocated"] - before + contender.static_bytes()
                    memory[name] = max(peak, memory.get(name, 0))
        return seconds, memory

    def lines(
        self, row: str, contenders: dict[str, Contender], amount: float, unit: str, operations: float | None = None
    ) -> Iterator[Line]:
        """Run the contenders, the first of which is the reference; ``amount`` of ``unit`` and operations per step."""
        seconds, memory = self.in_turns(contenders)
        first = next(iter(contenders))
        for name, values in seconds.items():
            median = statistics.median(values) / self.steps
            ratio = statistics.median(reference / own for reference, own in zip(seconds[first], values))
            share = None if operations is None else operations / median / self.rate
            yield Line(row, name, amount / median, unit, ratio, share, memory.get(name))


class Contender:
    """A model in training; ``turn(steps)`` trains, waits for the device, and returns seconds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def turn(self, steps: int) -> float:
        """Train some steps."""
        raise NotImplementedError

    def static_bytes(self) -> int:
        """Bytes of weights and of the optimizer's state."""
        states = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        tensors = chain(self.model.parameters(), self.model.buffers(), states)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


class Clock(Hook):
    """Times the steps of a training, without the set-up before and the work after them."""

    priority = "LOWEST"  # after the reading of the last loss, which waits for the device

    def before_train_epoch(self, runner: Any) -> None:
        """Start the clock."""
        self.begun = time.perf_counter()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Stop the clock after the last step."""
        if runner.iter + 1 == runner.train_loop.max_iters:
            self.seconds = time.perf_counter() - self.begun


class Ours(Contender):
    """Exp's engine with its own hooks, except for checkpoints.

    Args:
        session: of :meth:`Bench.session`.
        loader: yields batches.
        data: its ``model_arguments()`` are arguments of the model.
        compilation: arguments of ``torch.compile``; None: eager.
        sharded: whether the model is sharded, over one rank.
    """

    def __init__(
        self, session: Session, loader: Any, data: Any, compilation: Any = None, sharded: bool = False
    ) -> None:
        self.session, self.loader, config, backend = session, loader, session.config, session.backend
        model = build_model(session, data, for_training=True)
        if compilation is not None:
            model.compile(**compilation)
        if sharded:
            store = torch.distributed.FileStore(str(session.folder.path / "store"), 1)
            session.distributed = Distributed.create(backend, store, 0, 1, timedelta(seconds=60))
            self.model = FullyShard(config.precision).move_to_device(model, backend, session.device)
        else:
            self.model = model.to(session.device)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.wrapper = BackendOptimWrapper(self.optimizer, backend, config.precision, model=self.model)

    def turn(self, steps: int) -> float:
        """Train some steps."""
        clock = Clock()
        loop = TrainLoop(self.loader, max_epochs=None, max_steps=steps)
        trainer = Trainer(self.session, self.model, self.wrapper, loop, hooks=[clock])
        trainer.hooks.remove(trainer.checkpoints)
        trainer.train()
        return clock.seconds


class PlainLoop(Contender):
    """The plainest loop: fused AdamW, autocast, and the loss read in the end."""

    def __init__(self, bench: Bench, loader: Any, model: nn.Module, compilation: Any = None) -> None:
        self.bench, self.loader, self.model = bench, loader, model.to(bench.device).train()
        if compilation is not None:
            self.model.compile(**compilation)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.05, fused=True)

    def turn(self, steps: int) -> float:
        """Train some steps."""
        begun = time.perf_counter()
        for batch in islice(self.loader, steps):
            with self.bench.backend.autocast(self.bench.precision):
                loss = self.model(**batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - begun


class PlainModel(nn.Module):
    """A backbone that returns tokens, with the linear head, the normalization and the loss of exp's models.

    Args:
        tokens: returns (B, 5 + N, D) for an image: the class token, four registers, and patches.
        backbone: the module of ``tokens``.
        width: D.
        dense: whether patches are classified, not images.
    """

    def __init__(self, tokens: Callable[[torch.Tensor], torch.Tensor], backbone: nn.Module, width: int, dense: bool):
        super().__init__()
        self.tokens, self.backbone, self.dense = tokens, backbone, dense
        self.head = nn.Linear(width if dense else 2 * width, CLASSES)
        self.register_buffer("mean", torch.tensor([123.7, 116.3, 103.5]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([58.4, 57.1, 57.4]).view(1, 3, 1, 1))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """The cross-entropy."""
        tokens = self.tokens((image.float() - self.mean) / self.std)
        if not self.dense:
            return F.cross_entropy(self.head(torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], dim=-1)).float(), label)
        scores = self.head(tokens[:, 5:]).transpose(1, 2).unflatten(2, (image.shape[2] // 16, -1))
        pixels = F.interpolate(scores.float(), size=image.shape[2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(pixels, label)


class SameBatch:
    """The same batch for every step, on the device."""

    def __init__(self, bench: Bench, image: int, batch: int, dense: bool) -> None:
        shape = (batch, image, image) if dense else (batch,)
        images = torch.randint(256, (batch, 3, image, image), dtype=torch.uint8)
        self.batch = to_device({"image": images, "label": torch.randint(CLASSES, shape)}, bench.device)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.batch


def same_batches(bench: Bench, image: int, batch: int, dense: bool) -> DataLoader[Any]:
    """A loader of a batch of random images with labels, without end."""
    dataset: Any = SameBatch(bench, image, batch, dense)
    return DataLoader(dataset, batch_size=None, sampler=Positions(10**9, batch))


def classes() -> Any:
    """Stands in for the data when a model is made."""
    return SimpleNamespace(model_arguments=lambda: {"num_classes": CLASSES, "in_channels": 3})


def installed(package: str) -> bool:
    """Whether a reference is installed."""
    return importlib.util.find_spec(package) is not None


def plain_model(kind: str, size: str, image: int, dense: bool) -> PlainModel:
    """The model of ``transformers`` or ``timm``, with random weights."""
    sizes = SIZES[size]
    if kind == "transformers":
        backbone: Any = reference_model(sizes)
        return PlainModel(lambda x: backbone(x).last_hidden_state, backbone, sizes.embed_dim, dense)
    import timm

    shape = {"depth": sizes.depth, "embed_dim": sizes.embed_dim, "num_heads": sizes.num_heads}
    network = timm.create_model(TIMM.get(size, TIMM["vits16"]), img_size=image, num_classes=0, **shape)
    return PlainModel(network.forward_features, network, sizes.embed_dim, dense)


def vision_overrides(size: str, dense: bool, *more: str) -> list[str]:
    """The settings of an experiment with the model of a row."""
    experiment = ["experiment=dinov3_dubai", "model/head=linear"] if dense else ["experiment=dinov3_eurosat"]
    return [*experiment, f"model/backbone={size}", *_OPTIMIZER, *more]


# -- rows --------------------------------------------------------------------------------------------------------------


def vision(bench: Bench, size: str, image: int, batch: int, dense: bool, compilation: Any = None) -> Iterator[Line]:
    """A vision transformer beside those of transformers and timm."""
    if bench.small:
        size, image, batch = "tiny", 64, 2
    loader = same_batches(bench, image, batch, dense)
    contenders: dict[str, Contender] = {
        kind: PlainLoop(bench, loader, plain_model(kind, size, image, dense), compilation)
        for kind in ("transformers", "timm")
        if installed(kind)
    }
    contenders["exp"] = Ours(bench.session(*vision_overrides(size, dense)), loader, classes(), compilation)
    how = "eager" if compilation is None else f"compiled ({', '.join(compilation.values())})"
    row = f"{'segmentation' if dense else 'scenes'}, {size}, {image} px, batch {batch}, {how}"
    yield from bench.lines(row, contenders, batch, "images/s", floating_operations(SIZES[size], image, batch))


def scenes_s(bench: Bench) -> Iterator[Line]:
    """DINOv3 ViT-S/16, scenes."""
    return vision(bench, "vits16", 224, 256, dense=False)


def scenes_s_compiled(bench: Bench) -> Iterator[Line]:
    """The same, compiled."""
    return vision(bench, "vits16", 224, 256, False, bench.compilation)


def scenes_b(bench: Bench) -> Iterator[Line]:
    """DINOv3 ViT-B/16, scenes."""
    return vision(bench, "vitb16", 224, 256, dense=False)


def scenes_b_compiled(bench: Bench) -> Iterator[Line]:
    """The same, compiled."""
    return vision(bench, "vitb16", 224, 256, False, bench.compilation)


def segmentation_l(bench: Bench) -> Iterator[Line]:
    """DINOv3 ViT-L/16, segmentation."""
    return vision(bench, "vitl16", 512, 16, dense=True)


def segmentation_l_compiled(bench: Bench) -> Iterator[Line]:
    """The same, compiled."""
    return vision(bench, "vitl16", 512, 16, True, bench.compilation)


def frozen(bench: Bench) -> Iterator[Line]:
    """A linear probe and low-rank updates beside the training of all weights."""
    size, image, batch = ("tiny", 64, 2) if bench.small else ("vitl16", 512, 16)
    loader = same_batches(bench, image, batch, dense=True)
    settings = {"all weights": [], "LoRA, rank 16": ["model.lora.rank=16"], "frozen": ["model.freeze=all"]}
    contenders: dict[str, Contender] = {}
    for name, more in settings.items():
        session = bench.session(*vision_overrides(size, True, *more))
        contenders[f"exp, {name}"] = Ours(session, loader, classes())
    if installed("transformers"):
        model = plain_model("transformers", size, image, dense=True)
        model.backbone.requires_grad_(False)
        contenders["transformers, frozen"] = PlainLoop(bench, loader, model)
    yield from bench.lines(f"segmentation, {size}, {image} px, batch {batch}, eager", contenders, batch, "images/s")


def segformer(bench: Bench) -> Iterator[Line]:
    """SegFormer-B0."""
    image, batch = (64, 2) if bench.small else (512, 16)
    loader = same_batches(bench, image, batch, dense=True)
    contenders: dict[str, Contender] = {}
    if installed("transformers"):
        from transformers import SegformerConfig, SegformerForSemanticSegmentation

        class Plain(nn.Module):
            """With the loss of transformers."""

            def __init__(self) -> None:
                super().__init__()
                self.net = SegformerForSemanticSegmentation(SegformerConfig(num_labels=CLASSES))  # B0

            def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
                loss: torch.Tensor = self.net((image.float() - 120) / 58, labels=label).loss
                return loss

        contenders["transformers"] = PlainLoop(bench, loader, Plain())
    overrides = vision_overrides("segformer_b0", True, "model/head=segformer")
    contenders["exp"] = Ours(bench.session(*overrides), loader, classes())
    yield from bench.lines(f"SegFormer-B0, {image} px, batch {batch}, eager", contenders, batch, "images/s")


def timebridge_parts(bench: Bench) -> tuple[Ours, Any]:
    """The training of ETTh1 at the published size, and its data."""
    small = ["data.lookback=96", "data.horizon=24"] if bench.small else ["data.lookback=720", "data.horizon=96"]
    session = bench.session("experiment=timebridge_etth1", *small, "optim.options={fused: true}", "schedule=constant")
    data = build_data(session)
    sampler = TrainBatchSampler(len(data.train), timebridge_epoch.BATCH)
    return Ours(session, device_loader(data.train, sampler, 0, session), data), data


class PlainSeries(Contender):
    """The authors' loop in plain torch (``timebridge_epoch.py``)."""

    def __init__(self, data: Any, ours: Ours) -> None:
        self.model, self.optimizer = ours.model, ours.optimizer  # as large
        self.arguments = data, ours.model.state_dict(), str(ours.session.device)

    def turn(self, steps: int) -> float:
        """Train some steps, the first of which also makes model and data."""
        data, weights, device = self.arguments
        run = timebridge_epoch.plain(data, TrainBatchSampler(len(data.train), timebridge_epoch.BATCH), weights, device)
        next(run).item()
        begun = time.perf_counter()
        losses = list(islice(run, steps))
        losses[-1].item()
        return time.perf_counter() - begun


def timebridge(bench: Bench) -> Iterator[Line]:
    """TimeBridge on ETTh1: epochs per second, from the time of steps."""
    ours, data = timebridge_parts(bench)
    epoch = TrainBatchSampler(len(data.train), timebridge_epoch.BATCH).steps_per_epoch
    contenders: dict[str, Contender] = {"the authors' loop in plain torch": PlainSeries(data, ours), "exp": ours}
    for line in bench.lines("TimeBridge, ETTh1, batch 64, eager", contenders, 1 / epoch, "epochs/s"):
        line.memory = None  # the plain loop makes its model anew
        yield line


def overhead(bench: Bench) -> Iterator[Line]:
    """The overhead of a step on a tiny model, whose losses are read every 20 steps."""
    steps, rounds = (20, 1) if bench.small else (2000, 7)
    samples = step_overhead.Samples(steps)
    positions = Positions(steps, step_overhead.BATCH)
    loader: DataLoader[Any] = DataLoader(samples, batch_size=None, sampler=positions)
    own, folder = make_loader(samples, positions, 0, 0), tempfile.mkdtemp(dir=bench.folder)
    RunFolder(folder).create()
    pairs = []
    for _ in range(rounds + 1):
        plain = step_overhead.by_hand(loader, steps, bench.device)
        pairs.append((plain, step_overhead.ours(own, steps, folder, bench.backend, bench.device)))
    for name, column in (("by hand", 0), ("exp", 1)):
        ratio = statistics.median(pair[0] / pair[column] for pair in pairs[1:])
        median = statistics.median(pair[column] for pair in pairs[1:])
        yield Line("a tiny step, loss read every 20", name, 1e6 * median, "us/step", ratio)


def counted_waits(bench: Bench, contender: Contender, steps: int) -> int:
    """How often the host waits for the device in a turn, or, where torch does not count that, reads a value."""
    if bench.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                contender.turn(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(each.message) for each in found)
    reads = []

    def call(operator: Any, arguments: Any, keywords: Any) -> Any:
        if "_local_scalar_dense" in str(operator) and arguments[0].device.type == bench.device.type:
            reads.append(operator)
        return operator(*arguments, **keywords)

    with dispatch_mode(call):
        contender.turn(steps)
    return len(reads)


def waits(bench: Bench) -> Iterator[Line]:
    """Waits of the host per step, between readings of the loss: what a turn of more steps has more."""
    size, image = ("tiny", 64) if bench.small else ("vits16", 224)
    scenes = Ours(bench.session(*vision_overrides(size, False)), same_batches(bench, image, 2, dense=False), classes())
    for name, contender in (("scenes", scenes), ("TimeBridge", timebridge_parts(bench)[0])):
        contender.turn(1)
        few, many = (counted_waits(bench, contender, steps) for steps in (2, 6))
        what = "waits of the host" if bench.device.type == "cuda" else "values read by the host"
        yield Line(what, f"exp, {name}", (many - few) / 4, "per step")


def checkpoint(bench: Bench) -> Iterator[Line]:
    """How long a checkpoint stops the training."""
    gib, saves = (0.004, 2) if bench.small else (1.0, 4)
    folder = tempfile.mkdtemp(dir=bench.folder)
    size, hook = checkpoint_blocking.measure(gib, saves, folder, bench.backend, bench.device)
    plain, saved = statistics.median(hook.plain), statistics.median(hook.hook[1:])
    row = f"a checkpoint of {size:.2f} GiB stops training for"
    yield Line(row, "written while training waits", plain, "s", 1.0)
    yield Line(row, "exp", saved, "s", plain / saved)


class PlainImages(Dataset):  # type: ignore[type-arg]
    """Images that are only decoded and resized, as in ``image_loading.py``."""

    def __init__(self, paths: list[str], side: int) -> None:
        self.paths, self.side = paths, side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        image = mmcv.imrescale(cv2.imread(self.paths[number]), (self.side, self.side))
        return torch.from_numpy(image.transpose(2, 0, 1).copy())


def write_images(folder: Path, side: int, distinct: int, links: int) -> None:
    """Photograph-like JPEG files in two folders of classes; each file has further names, so that few are written."""
    generator = np.random.default_rng(0)
    for number in range(distinct):
        coarse = generator.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
        noise = generator.integers(-12, 13, (side, side, 3))
        image = np.clip(cv2.resize(coarse, (side, side), interpolation=cv2.INTER_CUBIC) + noise, 0, 255)
        place = folder / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{number}.jpg"), image.astype(np.uint8))
        for link in range(links):
            os.link(place / f"{number}.jpg", place / f"{number}_{link}.jpg")


def loading(bench: Bench) -> Iterator[Line]:
    """JPEG files of the page cache, augmented by exp, to the device; a plain DataLoader only decodes and resizes."""
    cores = min(RankInfo().cores, 16)
    workers = 1 if bench.small else cores
    for side, batch, links in ((224, 64, 31), (512, 32, 11)):
        if bench.small:
            side, batch, links = side // 4, 2, 0
        folder = bench.folder / f"jpeg{side}"
        write_images(folder, side, 20 if bench.small else 256, links)
        session = bench.session(
            "experiment=dinov3_eurosat", f"data.root={folder}", f"data.size={side}", "data.cache_mb=0",
            f"data.num_workers={workers}",
        )  # fmt: skip
        data: Any = build_data(session)
        sampler = TrainBatchSampler(len(data.train), batch)
        plain: DataLoader[Any] = DataLoader(
            PlainImages([path for path, _ in data.train.samples], side), batch_size=batch, shuffle=True, drop_last=True,
            num_workers=workers, persistent_workers=workers > 0,
            pin_memory=bench.backend.capabilities.pinned_memory and bench.device.type != "cpu",
        )  # fmt: skip
        loaders = {
            "torch's DataLoader with OpenCV, not augmented": plain,
            "exp": device_loader(data.train, sampler, workers, session),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(1 + min(bench.rounds, 3)):
            for name, loader in loaders.items():
                begun = time.perf_counter()
                for each in loader:
                    to_device(each if isinstance(each, dict) else {"image": each}, bench.device)
                bench.backend.synchronize()
                seconds[name].append(time.perf_counter() - begun)
        images = sampler.steps_per_epoch * batch
        for name, values in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(next(iter(seconds.values()))[1:], values[1:]))
            row = f"loading JPEG, {side} px, {workers} processes"
            rate = images / statistics.median(values[1:])
            yield Line(row, name, rate, "images/s", ratio)
        taken = [line.value for line in bench.found if line.row.startswith("scenes, vits16") and line.what == "exp"]
        if taken:
            yield Line(row, "exp, as a multiple of what ViT-S/16 takes at 224 px", rate / max(taken), "")


def fsdp(bench: Bench) -> Iterator[Line]:
    """Sharding over one card: that it runs, and what it costs."""
    size, image, batch = ("tiny", 64, 2) if bench.small else ("vitb16", 224, 64)
    loader, overrides = same_batches(bench, image, batch, dense=False), vision_overrides(size, False)
    contenders: dict[str, Contender] = {
        "exp, not sharded": Ours(bench.session(*overrides), loader, classes()),
        "exp, fsdp": Ours(bench.session(*overrides), loader, classes(), sharded=True),
    }
    yield from bench.lines(f"scenes, {size}, {image} px, batch {batch}, one rank", contenders, batch, "images/s")
    torch.distributed.destroy_process_group()


ROWS: dict[str, Callable[[Bench], Iterator[Line]]] = {
    function.__name__: function
    for function in (
        scenes_s, scenes_s_compiled, segmentation_l, segmentation_l_compiled, overhead, waits, timebridge, checkpoint,
        loading, segformer, frozen, fsdp, scenes_b, scenes_b_compiled,
    )
}  # fmt: skip


# -- the table ---------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """The Markdown of what the JSON file has."""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    notes = [f"{found['card']}; commit {found['commit']}; {packages}; {found['precision']}, matrix products at "
             f"{found['matrix_rate'] / 1e12:.1f} Tflop/s; {found['seconds']:.0f} s"]  # fmt: skip
    notes += ["Tiny sizes: that every row runs, not how fast."] * found["small"]
    head = ["row", "what", "value", "times as fast", "of the matrix rate", "GiB"]
    lines = ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for line in found["lines"]:
        cells = [
            line["row"], line["what"], f"{line['value']:.4g} {line['unit']}",
            "" if line["ratio"] is None else f"{line['ratio']:.2f}",
            "" if line["share"] is None else f"{line['share']:.1%}",
            "" if line["memory"] is None else f"{line['memory'] / 2**30:.2f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    failed = [f"Failed: {row}: {error}" for row, error in found["failed"].items()]
    left = [f"No time left for: {', '.join(found['left_out'])}"] * bool(found["left_out"])
    return "\n".join([*notes, *lines, "", *failed, *left]).rstrip() + "\n"


def main() -> int:
    """Measure, print and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--device", default="cuda", help="a choice of backend: cuda, rocm, gcu, ..., cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--max-autotune", action="store_true", help="compile with max-autotune, without CUDA graphs")
    parser.add_argument("--minutes", type=float, default=7.0, help="nothing starts in the last 90 seconds of this time")
    parser.add_argument("--commit", default=None, help="of the installed exp, where git does not know it")
    parser.add_argument("--out", default="card", help="path of the files, without .json and .md")
    arguments = parser.parse_args()
    started = time.perf_counter()
    latest = started + 60 * arguments.minutes - 90
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*the method `get_instance` should not accept")
    sys.path.append(str(REFERENCE))
    register()
    torch.manual_seed(0)
    mode = "max-autotune-no-cudagraphs" if arguments.max_autotune else "default"
    with tempfile.TemporaryDirectory() as folder, initialize_config_module("exp.conf", version_base="1.3"):
        bench = Bench(arguments.device, arguments.small, mode, Path(folder))
        device = bench.backend.device_info(bench.device)
        environment = describe_environment(bench.backend, [device])
        extra = {name: version_of(name) for name in ("exp-accelerators", "transformers", "timm")}
        commit = arguments.commit or environment["git_revision"]
        found: dict[str, Any] = {
            "card": device["name"], "commit": commit, "precision": bench.precision,
            "matrix_rate": bench.rate, "small": bench.small, "environment": environment,
            "packages": {**extra, **environment["packages"], **bench.backend.packages()},
            "lines": [], "failed": {}, "left_out": [],
        }  # fmt: skip
        for name in arguments.rows:
            if time.perf_counter() > latest:
                found["left_out"].append(name)
                continue
            begun = time.perf_counter()
            try:
                for line in ROWS[name](bench):
                    bench.found.append(line)
            except Exception as error:  # noqa: BLE001 - the other rows are worth the card's time
                traceback.print_exc()
                found["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
            gc.collect()
            torch.compiler.reset()
            found["lines"] = [asdict(line) for line in bench.found]
            print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
            found["seconds"] = time.perf_counter() - started
            text = table(found)  # written after each row, in case the machine is taken away
            Path(f"{arguments.out}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            Path(f"{arguments.out}.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
