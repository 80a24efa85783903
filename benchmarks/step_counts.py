"""Cost of a training step for a card, counted on a simulated one. Nothing here is a time: all machines count the same.

For a small experiment of each family: host synchronizations, bytes over the bus, kernel launches and peak memory, of
our engine and of a minimal hand-written loop over the same model, optimizer and batches; and, on two ranks,
collectives. A test compares them with `LIMITS`.

    python benchmarks/step_counts.py [family ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import operator
import os
import subprocess
import sys
import tempfile
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch
from mmengine.hooks import Hook

from exp.engine.wrapper import unwrapped
from exp.hardware.compat import dispatch_mode

LIMITS = {"waits": 0, "launches": 1.02, "peak": 1.02, "unexpected_bytes": 0, "collective_bytes": 1.01}
"""Of one step: waits of the host, launches and peak memory of ours by those of the loop by hand, bytes to the card
beyond the batch (or beyond the numbers of its samples, where the card cuts it), and bytes in collectives by the
gradients': once a second ranks also ask each other whether to end, in 16 bytes."""

_SERIES = ["data.lookback=96", "data.horizon=24", "model.d_model=16", "model.d_ff=16", "model.num_heads=2"]
_IMAGES = ["model.backbone.size=tiny", "data.size=64"]
FAMILIES = {
    "timebridge": ["experiment=timebridge_etth1", *_SERIES],
    "prior": ["experiment=timebridge_prior_etth1", *_SERIES],
    "scenes": ["experiment=dinov3_eurosat", *_IMAGES],
    "segmentation": ["experiment=dinov3_dubai", *_IMAGES, "data.eval_batch_size=1", "model.inference=whole"],
}
_FIRST, _STEPS, _BATCH = 2, 2, 2  # within the first epoch of the smallest sample data, also on two ranks


class StepCounts(Hook):
    """Counts some steps in the middle of a training, then as many of the hand-written loop; writes both as JSON.

    Args:
        path: of the JSON file, which rank 0 writes.
    """

    priority = "LOWEST"  # from the end of a step to the end of another

    def __init__(self, path: str) -> None:
        self.path = path
        self.found: dict[str, Any] = {}
        self.context = contextlib.ExitStack()
        self.collectives: dict[str, list[int]] = {}
        self.batch: dict[str, Any] = {}

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Start and stop counting."""
        step = runner.iter + 1
        if step == _FIRST:
            if runner.world_size > 1:  # passes every operator through Python, so not when launches are counted
                self.context.enter_context(dispatch_mode(self._called))
            _reset()
        elif step == _FIRST + _STEPS:
            self.found["ours"] = _counted()
            self.context.close()
            self.batch = data_batch

    def _called(self, called: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        name = str(called)
        if name.startswith("c10d"):
            count = self.collectives.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += sum(tensor.nbytes for tensor in _tensors(arguments))
        return called(*arguments, **keywords)

    def after_train(self, runner: Any) -> None:
        """Count the hand-written loop, and write the file."""
        model = unwrapped(runner.model)
        gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.found.update(gradient_bytes=gradients, collectives=self.collectives)
        if runner.world_size == 1:
            loader = runner.train_dataloader
            crosses = [self.batch["index"]] if getattr(loader, "cut", None) is not None else list(self.batch.values())
            self.found["batch_bytes"] = sum(tensor.nbytes for tensor in _tensors(crosses))
            self.found["by hand"] = _by_hand(model, runner.optim_wrapper, loader)
        if runner.rank == 0:
            Path(self.path).write_text(json.dumps(self.found))


def _by_hand(model: Any, wrapper: Any, loader: Any) -> dict[str, Any]:
    """The hand-written loop over the same batches, with the same optimizer."""
    optimizer = wrapper.optimizer
    running: dict[str, torch.Tensor] = {}
    loader.sampler.set_position(0, 0)
    model.train()
    for step, batch in enumerate(islice(loader, _FIRST + _STEPS), 1):
        with wrapper.backend.autocast(wrapper.precision):
            losses = model(**batch, mode="loss")
        losses = {name: value for name, value in losses.items() if "loss" in name}
        if "loss" not in losses:
            losses["loss"] = reduce(operator.add, losses.values())
        losses["loss"].backward()
        if wrapper.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), wrapper.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for name, value in losses.items():  # read later, like ours
            if step == 1:
                running[name] = torch.zeros_like(value)
            running[name] += value.detach()
        if step == _FIRST:
            _reset()
    return _counted()


def _reset() -> None:
    from torch_gcu import simulator

    simulator.reset_traffic()
    torch.gcu.reset_peak_memory_stats()  # type: ignore[attr-defined]


def _counted() -> dict[str, Any]:
    """The counts since :func:`_reset`, summed over all steps; the peak in bytes."""
    from torch_gcu import simulator

    return {
        "waits": simulator.waits(),
        "traffic": simulator.traffic(),
        "launches": simulator.launches(),
        "peak": torch.gcu.max_memory_allocated(),  # type: ignore[attr-defined]
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def order(family: str, nproc: int, folder: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of ``python -m exp`` for a few training steps of a family with the hook above.

    The run writes ``counts.json`` to the folder.
    """
    arguments = [
        *FAMILIES[family], "backend=gcu_simulated", f"nproc={nproc}", f"global_batch_size={_BATCH * nproc}",
        "max_epochs=null", f"max_steps={_FIRST + _STEPS + 1}", "log_every=1000", "plots=false", "debug.eval_batches=1",
        f"output_dir={folder}/run", "plugins=[step_counts]",
        f"hooks=[{{type: step_counts.StepCounts, path: {folder}/counts.json}}]",
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return arguments, {"PYTHONPATH": path, "ENFLAME_PT_OP_DEBUG_CONFIG": "op_statistics=true"}


def measure(family: str, nproc: int = 1) -> dict[str, Any]:
    """Run it, and read ``counts.json``."""
    with tempfile.TemporaryDirectory() as folder:
        arguments, environment = order(family, nproc, folder)
        command = [sys.executable, "-m", "exp", *arguments]
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, cwd=folder
        )
        if done.returncode != 0:
            raise RuntimeError(f"{family}: no counts\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = json.loads(Path(folder, "counts.json").read_text())
        return found


def per_step(found: dict[str, Any]) -> dict[str, float]:
    """The figures of :data:`LIMITS`, per step, from the counts of one rank."""
    if "by hand" not in found:
        sent = sum(size for _, size in found["collectives"].values()) / _STEPS
        return {"collective_bytes": sent / found["gradient_bytes"]}
    ours, plain = found["ours"], found["by hand"]
    launches = [sum(each["launches"].values()) for each in (ours, plain)]
    return {
        "waits": sum(ours["waits"].values()) / _STEPS,
        "launches": launches[0] / launches[1],
        "peak": ours["peak"] / plain["peak"],
        "unexpected_bytes": ours["traffic"]["to card"][1] / _STEPS - found["batch_bytes"],
    }


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    for family in parser.parse_args().families:
        found = measure(family)
        ours, plain = found["ours"], found["by hand"]
        print(f"{family}, per step: exp / the loop by hand")
        for name, count in (("waits of the host", "waits"), ("kernel launches", "launches")):
            sums = [sum(each[count].values()) / _STEPS for each in (ours, plain)]
            ratio = f"{sums[0] / sums[1]:.2f} x" if sums[1] else ""
            print(f"  {name:<22} {sums[0]:8g} {sums[1]:8g}  {ours[count] if count == 'waits' else ratio}")
        for direction in ("to card", "to host"):
            sums = [each["traffic"][direction][1] / _STEPS for each in (ours, plain)]
            print(f"  bytes {direction:<16} {sums[0]:8g} {sums[1]:8g}  (the batch: {found['batch_bytes']})")
        print(f"  peak memory, bytes     {ours['peak']:8d} {plain['peak']:8d}  {ours['peak'] / plain['peak']:.2f} x")
        two = measure(family, 2)
        calls = ", ".join(f"{name} {count}, {size} bytes" for name, (count, size) in two["collectives"].items())
        print(f"  on two ranks, in {_STEPS} steps: {calls}; gradients {two['gradient_bytes']} bytes a step")


if __name__ == "__main__":
    main()
