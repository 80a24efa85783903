"""Trainings of a few steps that are looked at: task=parity's two (traced), and task=speed (timed).

A trace is one NumPy file per run: outputs, gradients and parameters of the first step, in the order of execution. Of a
tensor of more than ``_KEPT`` values an evenly spaced part is kept, the same on every backend.
"""

from __future__ import annotations

import statistics
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmengine.hooks import Hook
from torch import nn

from exp.data.loader import tensors_of
from exp.engine.building import build_data, build_model, make_result, record_environment
from exp.engine.training import build_trainer
from exp.engine.wrapper import unwrapped

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["StepTimer", "TraceHook", "measure_speed", "train_traced", "train_with"]

_KEPT = 2**20


def train_with(session: Session, data: Any, model: nn.Module, hook: Hook) -> int:
    """Train with ``hook``, and without checkpoints; returns how many steps it took."""
    runner = build_trainer(session, data, model)
    runner.hooks.remove(runner.checkpoints)
    runner.register_hook(hook)
    runner.train()
    steps: int = runner.iter
    runner.close()
    return steps


def train_traced(session: Session) -> dict[str, Any]:
    """Train ``steps`` steps; ``trace.npz`` has what they computed, ``metrics.jsonl`` their losses."""
    record_environment(session)
    data = build_data(session)
    trace = TraceHook(session.folder.path / "trace.npz", session.config.task.steps)
    steps = train_with(session, data, build_model(session, data), trace)
    return make_result(session, {}, None, steps=steps)


class TraceHook(Hook):
    """Collects the trace on rank 0, and ends the training after ``steps`` steps.

    Args:
        path: the file to write.
        steps: optimizer steps.
    """

    priority = "LOWEST"

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self.steps = steps
        self._file: zipfile.ZipFile | None = None
        self._handles: list[Any] = []
        self._order: dict[str, None] = {}  # modules, as they began
        self._seen: set[str] = set()
        self._step = 1

    def before_train(self, runner: Any) -> None:
        """Listen to the modules and to the optimizer."""
        runner.optim_wrapper.before_step = lambda: self._keep_all(runner, "gradient")
        if runner.distributed_group.is_main:
            self._file = zipfile.ZipFile(self.path, "w")
            if not runner.session.config.compile:  # there are no modules in what torch has compiled
                for name, module in unwrapped(runner.model).named_modules():
                    self._listen(module, name or "model")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Take the parameters after the first step."""
        self._keep_all(runner, "parameter")
        while self._handles:
            self._handles.pop().remove()
        if self._step >= self.steps:
            runner.train_loop.stop_training = True
        self._step += 1

    def after_train(self, runner: Any) -> None:
        """Complete the file."""
        runner.optim_wrapper.before_step = None
        if self._file is not None:
            self._write("order", np.array(list(self._order)))
            self._file.close()

    def _keep_all(self, runner: Any, kind: str) -> None:
        """The parameters of the first step, or their gradients."""
        if self._step > 1 or self._file is None:
            return
        for name, parameter in unwrapped(runner.model).named_parameters():
            values = parameter.grad if kind == "gradient" else parameter
            if values is not None:
                self._keep(kind, name, values)

    def _listen(self, module: nn.Module, name: str) -> None:
        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if name not in self._seen:  # the first of several calls
                self._seen.add(name)
                for index, tensor in enumerate(each for each in tensors_of(output) if each.is_floating_point()):
                    self._keep("output", f"{name}[{index}]" if index else name, tensor)

        before = module.register_forward_pre_hook(lambda *_: self._order.setdefault(name))
        self._handles += [before, module.register_forward_hook(after)]

    def _keep(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor at once: all of a large model's would not fit into memory."""
        values = tensor.detach().reshape(-1)
        stride = max(1, -(-values.numel() // _KEPT))
        self._write(f"{kind}/{name}", values[::stride].float().cpu().numpy())

    def _write(self, key: str, values: np.ndarray[Any, Any]) -> None:
        assert self._file is not None
        with self._file.open(f"{key}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, values, allow_pickle=False)


def measure_speed(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps; the result has their times and each rank's largest memory."""
    record_environment(session)
    config = session.config
    data = build_data(session)
    timer = StepTimer(config.task.warm_up)
    steps = train_with(session, data, build_model(session, data, to_place=True), timer)
    own = {"memory": session.backend.usage().get("max_allocated"), "seconds": timer.seconds}
    ranks = session.distributed.gather(own)
    slowest = [max(each) for each in zip(*(rank["seconds"] for rank in ranks))]
    step_s = statistics.median(slowest) if slowest else None
    return make_result(
        session,
        {},
        None,
        steps=steps,
        step_seconds=step_s,
        samples_per_second=config.global_batch_size / step_s if step_s else None,
        memory_by_rank=[rank["memory"] for rank in ranks],
    )


class StepTimer(Hook):
    """Times every step by itself, from the end of the one before, the device's work included; no validation.

    Args:
        warm_up: steps at the beginning that do not count: kernels are compiled, caches filled.
    """

    priority = "VERY_LOW"

    def __init__(self, warm_up: int) -> None:
        self._left = warm_up
        self._mark = 0.0
        self.seconds: list[float] = []

    def before_train_epoch(self, runner: Any) -> None:
        """What came before is no part of a step."""
        runner.backend.synchronize()
        self._mark = time.perf_counter()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Nor is a validation in mid-epoch."""
        self.before_train_epoch(runner)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Wait for the device, and read the clock."""
        runner.backend.synchronize()
        now = time.perf_counter()
        if self._left > 0:
            self._left -= 1
        else:
            self.seconds.append(now - self._mark)
        self._mark = now
