"""Prepares a worker's device: portable kernels, a check of compilation, seeds, and the state of random generators."""

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
"""Allowed difference between compiled and eager results, relative to the largest value: products may have mantissas of
10 bits."""


def settle_kernels(backend: Backend, device: torch.device, precision: str) -> frozenset[str]:
    """Avoid CPU fallbacks of operators that the device lacks, as far as the backend lists them.

    These operators get portable kernels (:mod:`exp.hardware.operators`, imported only if needed). If the device has no
    fused attention in this precision, attention uses the plain form. Both apply for the rest of the process.

    Args:
        backend: the backend of this worker, with the device selected.
        device: the device of this worker.
        precision: one of :data:`exp.config.schema.PRECISIONS`.

    Returns:
        ATen names of the operators that now have a portable kernel.
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
    """Refuse ``compile=true`` if torch cannot compile for this device, before the data are read.

    Unless the backend rules it out, torch compiles the forward and backward pass of a few common layers. This fails if
    something is missing, such as a compiler, or a code generator for this type of device. The result and the gradients
    must equal those of the same layers without compilation.

    Also sets the number of torch's compile processes to the number of this worker's threads, unless the user has set
    ``TORCHINDUCTOR_COMPILE_THREADS``; by default each worker would start up to one per core.

    Args:
        backend: the backend of this worker, with the device selected.
        device: the device of this worker.

    Raises:
        ConfigError: torch cannot compile, or compiled code gives other results; the message has the reason.
    """
    if not supports_compilation():
        reason: str | None = f"it needs torch 2.3 or later, and this is {'.'.join(map(str, TORCH_VERSION))}"
    else:
        reason = backend.capabilities.uncompiled or _why_not_compiled(device)
    if reason is not None:
        raise ConfigError(f"compile=true on {device} ({backend.name}): {reason}; set compile=false")


def _why_not_compiled(device: torch.device) -> str | None:
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # not the variable: the fork server has imported torch._inductor already

        config.compile_threads = torch.get_num_threads()
    plain = _numbers_of(_usual_layers, device)
    try:
        compiled = _numbers_of(torch.compile(_usual_layers), device)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        cause = getattr(error, "inner_exception", error)  # up to torch 2.6 the outer error does not have the reason
        first = str(cause).strip().splitlines() or [""]
        return f"torch cannot compile here: {type(cause).__name__}: {first[0]}"
    for name, expected in plain.items():
        off = float((compiled.get(name, expected + math.inf) - expected).abs().max() / expected.abs().max())
        if not off <= _LARGEST_DIFFERENCE:
            return f"compiled code gives wrong results here: {name} differs by {off:.3g} of its largest value"
    return None


def _usual_layers(tokens: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A 0-dim loss of layer norm, GELU, attention and softmax over ``tokens`` (B, N, C)."""
    hidden = F.gelu(F.layer_norm(tokens @ weight, scale.shape, scale))
    mixed = (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden
    return F.mse_loss(mixed.mean(1).log_softmax(-1), tokens[:, 0])


def _numbers_of(layers: Callable[..., torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The loss and the gradients of the layers for fixed inputs, on the CPU, by name."""
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
    """State of the device's random generator, a uint8 CPU tensor; None if the device has no generator of its own."""
    if not hasattr(backend.module, "get_rng_state"):
        return None
    state: torch.Tensor = backend.module.get_rng_state()
    return state.cpu()


def rng_state(backend: Backend) -> dict[str, Any]:
    """The states of the random generators of torch, the device, Python and NumPy in this process, as plain data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": device_state(backend),
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: Mapping[str, Any], backend: Backend) -> None:
    """Restore the states that :func:`rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        backend.module.set_rng_state(state["device"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
