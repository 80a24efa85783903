"""Whole training steps with portable operators (exp.hardware.operators) against torch's own, on the CPU.

Two processes have the same weights and batch; one has every portable kernel registered for the CPU. They step in turns
(A B A B ...), and the smallest CPU times are compared. Saved: storages that autograd keeps for the backward pass, each
counted once. Peak: resident memory above that before the step. Gradients: norm of the difference of all gradients,
relative to the norm of all gradients.

    python benchmarks/portable_operators.py [--models dinov3 timebridge] [--rounds 7] [--threads 1]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

import torch

_BACKBONE = {"_target_": "exp.vision.backbones.vit.VisionTransformer", "layer_scale_init": 1.0}


def dinov3() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A scene classifier, vits16, all of it trained, on 4 images of 224 pixels."""
    from exp.vision.models import SceneClassifier

    model = SceneClassifier(10, backbone=_BACKBONE)
    image, label = torch.randint(0, 256, (4, 3, 224, 224)).float(), torch.randint(0, 10, (4,))
    return model, lambda: model(image, label, mode="loss")["loss"]


def segmenter() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The up-sampling head on vits16, all of it trained, on 2 images of 224 pixels."""
    from exp.vision.models import Segmenter

    model = Segmenter(7, backbone=_BACKBONE, head={"_target_": "exp.vision.heads.Upsample"})
    image, label = torch.randint(0, 256, (2, 3, 224, 224)).float(), torch.randint(0, 7, (2, 224, 224))
    return model, lambda: model(image, label, mode="loss")["loss"]


def timebridge() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The published size for ETTh1, 32 windows, without dropout: draws would differ between the processes."""
    from exp.forecasting.timebridge.model import TimeBridge

    model = TimeBridge(channels=7, lookback=720, horizon=96, attention_dropout=0.0)
    batch = {"x": torch.randn(32, 720, 7), "marks": torch.randn(32, 720, 4), "y": torch.randn(32, 96, 7)}
    return model, lambda: model(**batch, mode="loss")["loss"]


MODELS = {"dinov3": dinov3, "segmenter": segmenter, "timebridge": timebridge}


def reset_peak() -> int:
    """Reset the peak of resident memory; returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Bytes in a line of ``/proc/self/status``."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def contender(name: str, portable: bool, threads: int, pipe: Connection) -> None:
    """On each request take a step, and send CPU seconds and peak memory; on ``False`` send the gradients and end."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if portable:
        from exp.hardware import operators
        from exp.hardware.operators import separable

        _kernels = operators.PortableKernels("cpu", set(operators.KERNELS) - separable.SELF_REFERENTIAL)
    model, loss_of = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of().backward()
    optimizer.zero_grad(set_to_none=True)
    while pipe.recv():  # `_kernels` lives until the end, and with it what it registers
        before = reset_peak()
        begun = time.process_time()
        loss_of().backward()
        optimizer.step()
        taken = time.process_time() - begun
        peak = resident("VmHWM") - before
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        optimizer.zero_grad(set_to_none=True)
        pipe.send((taken, peak))
    pipe.send((sum(saved.values()), {name: gradient.numpy() for name, gradient in gradients.items()}))


def compare(name: str, rounds: int, threads: int) -> None:
    """Measure, and print a line for each contender."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for kind in ("native", "portable"):
        pipes[kind], theirs = context.Pipe()
        given = (name, kind == "portable", threads, theirs)
        processes.append(context.Process(target=contender, args=given, daemon=True))
        processes[-1].start()
        theirs.close()  # else a dead contender would be waited for
    taken: dict[str, list[float]] = {kind: [] for kind in pipes}
    peaks: dict[str, list[int]] = {kind: [] for kind in pipes}
    for turn in range(rounds + 1):
        for kind, pipe in pipes.items():
            pipe.send(True)
            seconds, peak = pipe.recv()
            if turn:
                taken[kind].append(seconds)
                peaks[kind].append(peak)
    results: dict[str, Any] = {}
    for kind, pipe in pipes.items():
        pipe.send(False)
        results[kind] = pipe.recv()
    for process in processes:
        process.join()
    native, portable = (results[kind][1] for kind in pipes)
    difference = math.sqrt(sum(float(((native[key] - portable[key]) ** 2).sum()) for key in native))
    difference /= math.sqrt(sum(float((native[key] ** 2).sum()) for key in native))
    for kind in pipes:
        print(
            f"{name:<11}{kind:<9}{min(taken[kind]) * 1e3:8.1f} ms/step  saved {results[kind][0] / 2**20:6.1f} MiB  "
            f"peak {max(peaks[kind]) / 2**20:6.1f} MiB",
        )
    ratio = min(taken["portable"]) / min(taken["native"])
    print(f"{name:<11}portable takes {ratio:.2f} times as long; gradients differ by {difference:.1e}", flush=True)


def main() -> None:
    """Compare one model after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.threads} threads, float32, the least of {arguments.rounds} rounds")
    for name in arguments.models:
        compare(name, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
