"""Forward and backward of our DINOv3 backbone against transformers' DINOv3ViTModel, with the same weights and images.

In turns (A B A B ...), in one process; the medians are compared. On a card in bfloat16 with fused attention, also
relative to the card's rate of matrix products in the same run; on the CPU in float32.

    pip install transformers
    python benchmarks/dinov3_step.py [--sizes vits16 vitl16] [--image 512] [--batch 1] [--rounds 3] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch

from exp.vision.backbones.vit import VisionTransformer
from exp.vision.backbones.vit_weights import SIZES, Size

REFERENCE = Path(sys.prefix) / "reference"  # where `make test` keeps transformers


def reference_model(size: Size) -> Any:
    """Transformers' model of one size, with fused attention."""
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    config = DINOv3ViTConfig(
        hidden_size=size.embed_dim,
        intermediate_size=size.hidden_dim,
        num_hidden_layers=size.depth,
        num_attention_heads=size.num_heads,
        use_gated_mlp=size.gated,
        hidden_act="silu" if size.gated else "gelu",
        num_register_tokens=size.storage_tokens,
        pos_embed_rescale=None,
        attn_implementation="sdpa",
    )
    return DINOv3ViTModel(config)


def floating_operations(size: Size, image: int, batch: int) -> float:
    """Multiplications and additions of matrix products, forward and backward (three times the forward's)."""
    tokens = 1 + size.storage_tokens + (image // 16) ** 2
    width = size.embed_dim
    per_token = 4 * width**2 + (3 if size.gated else 2) * width * size.hidden_dim
    attention = 2 * tokens * width
    return 3 * 2.0 * batch * tokens * size.depth * (per_token + attention)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product on this device."""
    size = 8192 if device.type != "cpu" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    repeats = 20 if device.type != "cpu" else 2
    seconds = [measure(lambda: [a @ b for _ in range(repeats)], device) for _ in range(3)]
    return 2.0 * size**3 * repeats / min(seconds)


def measure(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that ``work`` takes on the device."""
    synchronize(device)
    begun = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def step(model: torch.nn.Module, image: torch.Tensor, reading: Callable[[Any], torch.Tensor]) -> Callable[[], None]:
    """One forward and backward pass."""
    half = image.device.type != "cpu"

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(image.device.type, dtype=torch.bfloat16, enabled=half):
            features = reading(model(image))
        features.float().square().mean().backward()

    return run


def main() -> None:
    """Compare, and print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["vits16", "vitl16"])
    parser.add_argument("--image", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    sys.path.append(str(REFERENCE))
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    rate = matrix_rate(device, dtype)
    print(f"{device}, {str(dtype)[6:]}, torch {torch.__version__}: matrix products at {rate / 1e12:.2f} Tflop/s")
    for name in arguments.sizes:
        size = SIZES[name]
        torch.manual_seed(0)
        reference = reference_model(size).to(device).train()
        ours = VisionTransformer(size=name).to(device).train()
        ours.load_state_dict(ours.adapt_state_dict(reference.state_dict(), Path("reference")).weights)
        image = torch.randn(arguments.batch, 3, arguments.image, arguments.image, device=device)
        contenders = {
            "transformers": step(reference, image, lambda outputs: outputs.last_hidden_state[:, 5:]),
            "ours": step(ours, image, lambda outputs: outputs.maps[0]),
        }
        for run in contenders.values():
            run()
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for _ in range(arguments.rounds):
            for contender, run in contenders.items():
                seconds[contender].append(measure(run, device))
        median = {contender: statistics.median(values) for contender, values in seconds.items()}
        work = floating_operations(size, arguments.image, arguments.batch)
        for contender, value in median.items():
            print(
                f"{name:<11}{contender:<13}{value * 1e3:9.1f} ms  {arguments.batch / value:7.2f} images/s  "
                f"{work / value / rate:4.0%} of the matrix rate"
            )
        print(f"{name:<11}ours is {median['transformers'] / median['ours']:.2f} times as fast")


if __name__ == "__main__":
    main()
