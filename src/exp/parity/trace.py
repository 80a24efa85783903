"""What a parity run leaves for comparison: losses, outputs of the modules, gradients and parameters.

One NumPy file per run. Of large tensors a fixed, evenly spaced part is kept, the same on every backend, so that the
file stays small whatever the model: all of a tensor up to ``FIRST_STEP`` values in the first step, ``LATER_STEPS``
values after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator

import numpy as np
import torch
from mmengine.hooks import Hook
from torch import nn

from exp.engine.wrapper import unwrapped

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TraceHook", "without_dropout"]

FIRST_STEP = 2**20
LATER_STEPS = 2**12


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
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._handles: list[Any] = []
        self._step = 1

    def before_train(self, runner: Any) -> None:
        """Listen to the modules and to the optimizer."""
        runner.optim_wrapper.before_step = lambda: self._gradients(runner)
        if runner.distributed_group.is_main:
            for name, module in unwrapped(runner.model).named_modules():
                self._handles.append(module.register_forward_hook(self._output_hook(name or "model")))

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Take the parameters after the step."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if runner.distributed_group.is_main:
            for name, parameter in unwrapped(runner.model).named_parameters():
                self._keep("parameter", name, parameter)
        if self._step >= self.steps:
            runner.train_loop.stop_training = True
        self._step += 1

    def after_train(self, runner: Any) -> None:
        """Write the file."""
        runner.optim_wrapper.before_step = None
        if runner.distributed_group.is_main:
            arrays: Any = self.arrays
            np.savez(self.path, **arrays)

    def _gradients(self, runner: Any) -> None:
        if runner.distributed_group.is_main:
            for name, parameter in unwrapped(runner.model).named_parameters():
                if parameter.grad is not None:
                    self._keep("gradient", name, parameter.grad)

    def _output_hook(self, name: str) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for index, tensor in enumerate(_tensors(output)):
                key = name if index == 0 else f"{name}[{index}]"
                if not any(known.endswith(f"/{key}") and known.startswith("output/") for known in self.arrays):
                    self._keep("output", key, tensor, order=True)

        return keep

    def _keep(self, kind: str, name: str, tensor: torch.Tensor, order: bool = False) -> None:
        limit = FIRST_STEP if self._step == 1 else LATER_STEPS
        values = tensor.detach().reshape(-1)
        stride = -(-values.numel() // limit) if values.numel() else 1
        place = f"{len(self.arrays):06d}" if order else f"{self._step:06d}"
        # A copy, because a float32 tensor on the CPU would lend its memory.
        self.arrays[f"{kind}/{place}/{name}"] = values[::stride].float().cpu().numpy().copy()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors of a module's output, in order."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def without_dropout(model: nn.Module) -> None:
    """Turn dropout modules off: masks come from each device's own generator, so they would differ by design."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
