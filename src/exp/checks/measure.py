"""Measurements of the ranks: traced steps (task=parity), speed of steps (task=speed) and all-reduce (task=collectives).

A trace is one NumPy file (``.npz``) per run: outputs, gradients and parameters of the first step, in the order of
execution. Of a tensor with more than ``_MAX_VALUES`` values, only evenly spaced values are written, the same on every
backend.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence, cast

import numpy as np
import torch
from mmengine.hooks import Hook
from torch import nn

from exp.checks.check import LIMITS_S, Journal, ok
from exp.console import format_bytes
from exp.data.loader import tensors_of
from exp.engine.build import build_data, build_model
from exp.engine.optim import BackwardOnly
from exp.engine.result import make_result
from exp.engine.train import build_trainer
from exp.engine.wrapper import is_sharded, unwrapped

if TYPE_CHECKING:
    from exp.session import Session


_MAX_VALUES = 2**20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_REPEATS = 5


def train_with(session: Session, *hooks: Hook) -> int:
    """Train without checkpoints, with some more MMEngine hooks; returns the number of steps."""
    data = build_data(session)
    runner = build_trainer(session, data, build_model(session, data, for_training=True))
    runner.hooks.remove(runner.checkpoints)
    for hook in hooks:
        runner.register_hook(hook)
    runner.train()
    steps: int = runner.iter
    runner.close()
    return steps


def train_traced(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps; writes the trace of the first to ``trace.npz``, all losses to ``metrics.jsonl``.

    Returns:
        The content of ``result.json``.
    """
    return make_result(session, {}, None, steps=train_with(session, TraceHook(session.folder.path / "trace.npz")))


class TraceHook(Hook):
    """Writes the trace of the first training step to ``path``, on rank 0 only."""

    priority = "LOWEST"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: zipfile.ZipFile | None = None  # open during the first step

    def before_train(self, runner: Any) -> None:
        """Register hooks that record the outputs of the modules."""
        if runner.distributed_group.is_main:
            self._file = zipfile.ZipFile(self._path, "w")
            if not runner.session.config.compile:  # compiled code does not call the modules one by one
                for name, module in unwrapped(runner.model).named_modules():
                    module.register_forward_hook(functools.partial(self._write_output, name or "model"))

    def before_clipping(self, runner: Any) -> None:
        """In the first step, add the gradients."""
        self._write_all(runner, "gradient")

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """After the first step, add the parameters and close the file."""
        self._write_all(runner, "parameter")
        # Stop here after the last step: the training loop would run a validation next.
        runner.train_loop.stop_training = runner.iter + 1 >= runner.session.config.max_steps
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_all(self, runner: Any, kind: str) -> None:
        """Write all parameters, or all their gradients."""
        for name, parameter in unwrapped(runner.model).named_parameters():
            self._write(kind, name, parameter.grad if kind == "gradient" else parameter)

    def _write_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for index, tensor in enumerate(value for value in tensors_of(output) if value.is_floating_point()):
            self._write("output", f"{name}[{index}]" if index else name, tensor)

    def _write(self, kind: str, name: str, tensor: torch.Tensor | None) -> None:
        """Write a tensor to the file at once, because all tensors of a large model would not fit into memory.

        If a module is called several times, only its first call is kept. Does nothing after the first step.
        """
        path = f"{kind}/{name}.npy"
        if self._file is not None and tensor is not None and path not in self._file.namelist():
            values = tensor.detach().reshape(-1)
            stride = max(1, -(-values.numel() // _MAX_VALUES))
            with self._file.open(path, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values[::stride].float().cpu().numpy(), allow_pickle=False)


class ComputeSpeed(Hook):
    """After a training, times forward and backward passes of this rank alone, which wait for no other rank.

    Attributes:
        samples_per_second: of this rank; None: not measured, because the model is sharded.
    """

    samples_per_second: float | None = None

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Keep the last batch."""
        self._batch = data_batch

    def after_train(self, runner: Any) -> None:
        """Time some passes; the first is not counted. All ranks do so at the same time, as in a training."""
        model, backend, seconds = unwrapped(runner.model), runner.backend, []
        if is_sharded(model):
            return
        passes = BackwardOnly(functools.partial(backend.autocast, runner.session.config.precision))
        model.train()
        runner.distributed_group.barrier()
        for _ in range(_REPEATS + 1):
            backend.synchronize()
            started = time.perf_counter()
            backend.end_batch(cast("Any", model).train_step(self._batch, optim_wrapper=passes))
            backend.synchronize()
            seconds.append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
        self.samples_per_second = runner.train_loop.sampler.batch_size / statistics.median(seconds[1:])


def propose_shares(speeds: Sequence[float | None], local_ranks: Sequence[int]) -> list[list[float]]:
    """Shares of a batch (``launcher.shares``) with which all ranks would compute equally long, by node.

    Args:
        speeds: samples per second of each rank; None: not known.
        local_ranks: of each rank; a node begins with 0.

    Returns:
        Multiples of the slowest rank's share, in steps of 0.05; empty if a speed is not known.
    """
    known = [speed for speed in speeds if speed]
    nodes: list[list[float]] = []
    for speed, local_rank in zip(known, local_ranks) if len(known) == len(speeds) else ():
        nodes += [[]] * (local_rank == 0)
        nodes[-1] = [*nodes[-1], round(speed / min(known) * 20) / 20]
    return nodes


def measure_speed(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps; the speed is what the training logs after the warm-up.

    Returns:
        The content of ``result.json``, with ``samples_per_second`` over all ranks (median over the logged lines),
        ``step_seconds``, and each rank's peak memory ``memory_peak`` in bytes; None for what was not measured. With
        several ranks also each rank's own ``compute_samples_per_second``, and the ``shares`` that follow, by node.
    """
    config, own_speed = session.config, ComputeSpeed()
    steps = train_with(session, *[own_speed] * (session.info.world_size > 1))
    memory = session.distributed.gather(session.backend.usage().get("max_allocated"))
    lines = [record for record in session.folder.records() if record["split"] == "train"]
    rates = [line["samples_per_second"] for before, line in zip(lines, lines[1:]) if before["step"] >= config.log_every]
    rate = statistics.median(rates) if rates else None
    step_s = config.global_batch_size / rate if rate else None
    numbers: dict[str, Any] = {"step_seconds": step_s, "samples_per_second": rate, "memory_peak": memory}
    finding = f"{step_s * 1e3:.4g} ms a step, {rate:.4g} samples/s" if step_s and rate else "no step was timed"
    finding += f", {format_bytes(max(num_bytes or 0 for num_bytes in memory))} of memory" if any(memory) else ""
    if session.info.world_size > 1:
        speeds = session.distributed.gather(own_speed.samples_per_second)
        shares = propose_shares(speeds, [device["local_rank"] for device in session.devices])
        numbers.update(compute_samples_per_second=speeds, shares=shares)
        if any(share != 1.0 for node in shares for share in node):
            texts = [f"launcher.shares=[{','.join(f'{share:g}' for share in node)}]" for node in shares]
            finding += f"; for ranks that compute equally long: {', on the next node '.join(texts)}"
    check = asdict(ok(finding, batch_size=config.batch_size, **numbers))
    return make_result(session, {}, None, steps=steps, **numbers, check=check)


def measure_collectives(session: Session) -> dict[str, Any]:
    """Test and time all-reduce in every supported precision and configured size; rank 0 writes ``collectives.jsonl``.

    Precisions that ended the process in an earlier attempt are skipped.
    """
    session.start_run()
    path = session.folder.path / "collectives.jsonl" if session.distributed.is_main else Path(os.devnull)
    journal = Journal(path, LIMITS_S["collectives"])
    crashed = {name for names in session.distributed.gather(journal.crashed) for name in names}
    for precision in filter(session.backend.supports, _DTYPES):
        name = f"all_reduce {precision}"
        for kib in [] if name in crashed else session.config.task.sizes_kib:
            journal.begin(name, kib=kib)
            measurement = _measure(session, _DTYPES[precision], kib)
            journal.end(name, kib=kib, **measurement)
            if "error" in measurement:
                break
    return make_result(session, {}, None)


def exact_values(rank: int, world_size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Test values that every precision represents exactly.

    Args:
        rank: number of the rank.
        world_size: number of ranks.
        count: number of values.

    Returns:
        Values of this rank, alternating 0 and 1, and the sum over all ranks; both float32, (count,).
    """
    parity = torch.arange(count, dtype=torch.int64) % 2
    return ((parity + rank) % 2).float(), (world_size // 2 + parity * (world_size % 2)).float()


def _measure(session: Session, dtype: torch.dtype, kib: int) -> dict[str, Any]:
    """Test and time one all-reduce of ``kib`` KiB.

    Returns:
        ``error`` if a result is wrong, or if the library refuses the dtype (then also ``refusal``). Otherwise
        ``seconds`` (median of some repeats on the slowest rank) and ``bus_bytes_per_second``: 2 (n - 1) / n times the
        tensor's bytes per second, the traffic on each card's link in a ring all-reduce over n ranks.
    """
    world_size, backend, gather = session.info.world_size, session.backend, session.distributed.gather
    count = kib * 1024 // (4 if dtype is torch.float32 else 2)
    values, expected = exact_values(session.info.rank, world_size, count)
    tensor = values.to(dtype).to(session.device)
    refusal = None
    try:
        backend.collectives.all_reduce(tensor)
        backend.synchronize()
    except RuntimeError as error:  # a dtype that the library does not support; every rank raises
        refusal = str(error).split("\n")[0]
    reasons = [reason for reason in gather(refusal) if reason]
    if reasons:
        return {"error": reasons[0], "refused": True}
    wrong_ranks = [rank for rank, wrong in enumerate(gather(bool((tensor.cpu().float() != expected).any()))) if wrong]
    if wrong_ranks:
        return {"error": f"wrong on rank {', '.join(map(str, wrong_ranks))}"}
    durations = []
    for _ in range(_REPEATS):
        tensor.zero_()
        backend.synchronize()
        session.distributed.barrier()
        started = time.perf_counter()
        backend.collectives.all_reduce(tensor)
        backend.synchronize()
        durations.append(time.perf_counter() - started)
    seconds = max(gather(statistics.median(durations)))
    return {"seconds": seconds, "bus_bytes_per_second": 2 * (world_size - 1) / world_size * kib * 1024 / seconds}
