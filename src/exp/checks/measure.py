"""What ranks measure: a few steps, traced (task=parity) or timed (task=speed), and what they exchange
(task=collectives).

A trace is one NumPy file per run: outputs, gradients and parameters of the first step, in the order of execution. Of a
tensor of more than ``_KEPT`` values an evenly spaced part is kept, the same on every backend.
"""

from __future__ import annotations

import os
import statistics
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmengine.hooks import Hook
from torch import nn

from exp.checks.check import LIMITS_S, Journal, ok
from exp.console import size
from exp.data.loader import tensors_of
from exp.engine.building import build_data, build_model, make_result
from exp.engine.training import build_trainer
from exp.engine.wrapper import unwrapped

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["StepTimer", "TraceHook", "addends", "measure_collectives", "measure_speed", "train_traced", "train_with"]

_KEPT = 2**20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS = 5


def train_with(session: Session, hook: Hook, to_place: bool = False) -> int:
    """Train with ``hook``, and without checkpoints; returns how many steps it took.

    Args:
        session: of a task that trains.
        hook: of MMEngine's kind.
        to_place: as :func:`exp.engine.building.build_model` takes it.
    """
    data = build_data(session)
    runner = build_trainer(session, data, build_model(session, data, to_place=to_place))
    runner.hooks.remove(runner.checkpoints)
    runner.register_hook(hook)
    runner.train()
    steps: int = runner.iter
    runner.close()
    return steps


def train_traced(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps; ``trace.npz`` has what the first computed, ``metrics.jsonl`` the losses of all."""
    return make_result(session, {}, None, steps=train_with(session, TraceHook(session.folder.path / "trace.npz")))


class TraceHook(Hook):
    """Collects the trace on rank 0, in ``path``."""

    priority = "LOWEST"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: zipfile.ZipFile | None = None  # during the first step
        self._handles: list[Any] = []

    def before_train(self, runner: Any) -> None:
        """Listen to the modules and to the optimizer."""
        if runner.distributed_group.is_main:
            self._file = zipfile.ZipFile(self._path, "w")
            if not runner.session.config.compile:  # there are no modules in what torch has compiled
                for name, module in unwrapped(runner.model).named_modules():
                    self._listen(module, name or "model")
        runner.optim_wrapper.before_step = lambda: self._keep_all(runner, "gradient")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Complete the file with the parameters after the first step."""
        self._keep_all(runner, "parameter")
        # Without the validation that comes after the last step otherwise.
        runner.train_loop.stop_training = runner.iter + 1 >= runner.session.config.max_steps
        runner.optim_wrapper.before_step = None
        while self._handles:
            self._handles.pop().remove()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _keep_all(self, runner: Any, kind: str) -> None:
        """The parameters, or their gradients."""
        for name, parameter in unwrapped(runner.model).named_parameters() if self._file is not None else ():
            values = parameter.grad if kind == "gradient" else parameter
            if values is not None:
                self._keep(kind, name, values)

    def _listen(self, module: nn.Module, name: str) -> None:
        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [each for each in tensors_of(output) if each.is_floating_point()]
            for index, tensor in enumerate(tensors):
                self._keep("output", f"{name}[{index}]" if index else name, tensor)

        self._handles.append(module.register_forward_hook(after))

    def _keep(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor at once: all of a large model's would not fit into memory. Of several calls the first."""
        assert self._file is not None
        path = f"{kind}/{name}.npy"
        if path not in self._file.namelist():
            values = tensor.detach().reshape(-1)
            stride = max(1, -(-values.numel() // _KEPT))
            with self._file.open(path, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values[::stride].float().cpu().numpy(), allow_pickle=False)


def measure_speed(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps; the result has their times and each rank's largest memory."""
    config, timer = session.config, StepTimer(session.config.task.warm_up)
    steps = train_with(session, timer, to_place=True)
    own = {"memory": session.backend.usage().get("max_allocated"), "seconds": timer.seconds}
    ranks = session.distributed.gather(own)
    slowest = [max(each) for each in zip(*(rank["seconds"] for rank in ranks))]
    step_s = statistics.median(slowest) if slowest else None
    rate, memory = config.global_batch_size / step_s if step_s else None, [rank["memory"] for rank in ranks]
    figures: dict[str, Any] = {"step_seconds": step_s, "samples_per_second": rate, "memory_by_rank": memory}
    finding = f"{step_s * 1e3:.4g} ms a step, {rate:.4g} samples/s" if step_s and rate else "no step was timed"
    finding += f", {size(max(each or 0 for each in memory))} of memory" if any(memory) else ""
    answer = ok(finding, batch_size=config.batch_size, **figures).__dict__
    return make_result(session, {}, None, steps=steps, **figures, answer=answer)


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


def measure_collectives(session: Session) -> dict[str, Any]:
    """The sum over all ranks, in every precision and size; rank 0 writes them down.

    What has ended the process before is left out.
    """
    session.begin()
    path = session.folder.path / "collectives.jsonl" if session.distributed.is_main else Path(os.devnull)
    journal = Journal(path, LIMITS_S["collectives"])
    crashed = {name for names in session.distributed.gather(journal.crashed) for name in names}
    for precision in filter(session.backend.supports, _DTYPES):
        name = f"all_reduce {precision}"
        for kib in [] if name in crashed else session.config.task.sizes_kib:
            journal.begin(name, kib=kib)
            found = _measure(session, _DTYPES[precision], kib)
            journal.end(name, kib=kib, **found)
            if "error" in found:
                break
    return make_result(session, {}, None)


def addends(rank: int, world_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has, 0 and 1 in turns, and what all add up to, both float32 (count,): every precision has them."""
    turns = torch.arange(count, dtype=torch.int64) % 2
    return ((turns + rank) % 2).float(), (world_size // 2 + turns * (world_size % 2)).float()


def _measure(session: Session, dtype: torch.dtype, kib: int) -> dict[str, Any]:
    """Wrong values on any rank, and the slowest rank's time.

    Returns:
        ``error``, where it is refused; else ``wrong`` (ranks), ``seconds`` (median of some repeats) and
        ``bus_bytes_per_second``: what each card's link carries, 2 (n - 1) / n of the tensor.
    """
    world_size, backend, gather = session.info.world_size, session.backend, session.distributed.gather
    own, right = addends(session.info.rank, world_size, kib * 1024 // (2 if dtype is not torch.float32 else 4))
    tensor = own.to(dtype).to(session.device)
    refused = None
    try:
        backend.collectives.all_reduce(tensor)
        backend.synchronize()
    except RuntimeError as error:  # of a type that a library does not know, on every rank alike
        refused = str(error).split("\n")[0]
    refusals = [each for each in gather(refused) if each]
    if refusals:
        return {"error": refusals[0]}
    wrong, taken = bool((tensor.cpu().float() != right).any()), []
    for _ in range(_REPEATS):
        tensor.zero_()
        backend.synchronize()
        session.distributed.barrier()
        started = time.perf_counter()
        backend.collectives.all_reduce(tensor)
        backend.synchronize()
        taken.append(time.perf_counter() - started)
    found = gather((wrong, statistics.median(taken)))
    seconds = max(each[1] for each in found)
    rate = 2 * (world_size - 1) / world_size * kib * 1024 / seconds
    bad = [number for number, each in enumerate(found) if each[0]]
    return {"wrong": bad, "seconds": seconds, "bus_bytes_per_second": rate}
