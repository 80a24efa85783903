"""A worker's device before the model is built: its kernels, and random states, which every checkpoint keeps."""

from __future__ import annotations

import logging
import math
import os
import random
from typing import TYPE_CHECKING, Any, Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.hardware.compat import TORCH_VERSION, forbid_fused_attention, supports_compilation, supports_portable_operators

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = [
    "check_compilation", "device_state", "rng_state", "seed_everything", "set_rng_state", "settle_kernels",
]  # fmt: skip

logger = logging.getLogger(__name__)

_LARGEST_DIFFERENCE = 1e-2
"""Between compiled and plain code, of the largest number: products may round to 10 bits."""


def settle_kernels(backend: Backend, device: torch.device, precision: str) -> frozenset[str]:
    """Keep every step of any model on the device, as far as the backend knows what would not stay there.

    Operators that the device lacks get portable kernels (:mod:`exp.hardware.operators`, imported only then), and
    attention takes no fused form where the device has none in this precision. For the rest of the process.

    Args:
        backend: of this worker; its device has been selected.
        device: the same.
        precision: one of :data:`exp.hardware.backend.PRECISIONS`.

    Returns:
        ATen names of the operators that have a portable kernel now.
    """
    if not supports_portable_operators():
        return frozenset()
    capabilities = backend.capabilities
    if precision not in capabilities.fused_attention:
        forbid_fused_attention()
        logger.info("attention without fused kernels: %s has none in %s", device, precision)
    lacking = capabilities.lacking_operators
    if not lacking:
        return frozenset()
    from exp.hardware.operators import install

    portable = install(device.type, lacking)
    logger.info("%s lacks %d overloads of operators; %d have portable kernels now", device, len(lacking), len(portable))
    return portable


def check_compilation(backend: Backend, device: torch.device) -> None:
    """Refuse ``compile=true`` where it cannot be had: before the data are read, and not in the middle of a first step.

    Where the backend has nothing against it, torch compiles a small forward and backward pass of usual layers: it finds
    out what is missing here, such as a compiler, or a code generator for this type of device; and its result and
    gradients must be those of the same layers uncompiled. Unless the user has said how many,
    torch gets as many compiling processes as this worker has threads; each of eight workers would have one per core.

    Args:
        backend: of this worker; its device has been selected.
        device: the same.

    Raises:
        ConfigError: it cannot; says why.
    """
    if not supports_compilation():
        reason: str | None = f"it needs torch 2.3 or later, and this is {'.'.join(map(str, TORCH_VERSION))}"
    else:
        reason = backend.capabilities.uncompiled or _why_not_compiled(device)
    if reason is not None:
        raise ConfigError(f"compile=true on {device} ({backend.name}): {reason}; set compile=false")


def _why_not_compiled(device: torch.device) -> str | None:
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # the fork server has imported it: the variable would come too late

        config.compile_threads = torch.get_num_threads()
    plain = _numbers_of(_usual_layers, device)
    try:
        compiled = _numbers_of(torch.compile(_usual_layers), device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises
        cause = getattr(error, "inner_exception", error)  # up to torch 2.6 the error only says that there is one
        first = str(cause).strip().splitlines() or [""]
        return f"torch cannot compile here: {type(cause).__name__}: {first[0]}"
    for name, expected in plain.items():
        off = float((compiled.get(name, expected + math.inf) - expected).abs().max() / expected.abs().max())
        if not off <= _LARGEST_DIFFERENCE:
            return f"what torch compiles here computes wrongly: {name} is off by {off:.3g} of its largest number"
    return None


def _usual_layers(tokens: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A loss of normalized, activated and mixed tokens."""
    hidden = F.gelu(F.layer_norm(tokens @ weight, scale.shape, scale))
    mixed = (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden
    return F.mse_loss(mixed.mean(1).log_softmax(-1), tokens[:, 0])


def _numbers_of(layers: Callable[..., torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Result and gradients, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens": (4, 8, 16), "weight": (16, 16), "scale": (16,)}
    given = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    loss = layers(*(each.requires_grad_() for each in given.values()))
    loss.backward()
    gradients = {f"the gradient of {name}": each.grad for name, each in given.items()}
    return {
        "the loss": loss.detach().cpu(),
        **{name: each.cpu() for name, each in gradients.items() if each is not None},
    }


def seed_everything(seed: int, backend: Backend) -> None:
    """Seed Python, NumPy, torch's CPU generator and the device's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    seed_all = getattr(backend.module, "manual_seed_all", None) or getattr(backend.module, "manual_seed", None)
    if seed_all is not None:
        seed_all(seed)


def device_state(backend: Backend) -> torch.Tensor | None:
    """State of the device's random generator (uint8, on the CPU), or None where there is none of its own."""
    if not hasattr(backend.module, "get_rng_state"):
        return None
    state: torch.Tensor = backend.module.get_rng_state()
    return state.cpu()


def rng_state(backend: Backend) -> dict[str, Any]:
    """This process's random states, as plain data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": device_state(backend),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: Mapping[str, Any], backend: Backend) -> None:
    """Restore what :func:`rng_state` gave."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        backend.module.set_rng_state(state["device"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
