"""What a hardware family computes with: which operators it lacks, and in which precision it multiplies.

A part of the backend interface (:mod:`exp.hardware.backend`), on a page of its own because all of it has defaults.
"""

from __future__ import annotations

import abc
import contextlib
from typing import Any, ContextManager, Mapping

__all__ = ["FLOAT32", "PRECISIONS", "Numerics"]

PRECISIONS = ("fp32", "bf16", "fp16", "tf32", "efp")
FLOAT32 = ("fp32", "tf32", "efp")
"""Those that store all values as float32; ``tf32`` multiplies them with mantissas of 10 bits, ``efp`` as the device's
compiler sees fit."""


class Numerics(abc.ABC):
    """What a backend inherits; called in a worker, after the device has been selected."""

    device_type: str

    precisions: tuple[str, ...] = ("fp32",)
    """What this family can do at all; :meth:`supports` says what the device at hand can."""

    # -- Operators -----------------------------------------------------------------------------------------------------

    def lacking_operators(self) -> frozenset[str]:
        """What this rank's device has no kernel for, as ATen names of overloads such as ``"convolution_backward"``.

        Such an operator runs on the CPU, tensor by tensor, or not at all. Asked once, after :meth:`set_device`.
        """
        return frozenset()

    def fused_attention(self, precision: str) -> bool:
        """Whether ``scaled_dot_product_attention`` may take its fused forms on this device in ``precision``."""
        del precision
        return False

    def why_not_compiled(self) -> str | None:
        """Why ``compile=true`` is refused on this device; None: torch is asked, with a first small computation."""
        return None

    def fallbacks(self) -> Mapping[str, tuple[int, int]] | None:
        """What has left the device in this process so far: calls and bytes (there and back) by ATen name.

        None: nothing tells. Bytes are 0 where only calls are counted.
        """
        return None

    def counting_env(self) -> dict[str, str]:
        """Environment in which :meth:`fallbacks` can tell, where it takes more than is worth it in a training.

        Set before torch is imported, over what is set, for tasks that ask for it
        (:attr:`exp.task.Task.counts_fallbacks`).
        """
        return {}

    # -- Precision -----------------------------------------------------------------------------------------------------

    def supports(self, precision: str) -> bool:
        """Whether this device trains in ``precision`` (one of :data:`PRECISIONS`)."""
        return precision in self.precisions

    def set_precision(self, precision: str) -> None:
        """Have this process multiply float32 values in full, or as TF32 where ``precision`` is ``tf32``.

        Called before the first product. The switches that a family has beside torch's general one are set in its file.

        Raises:
            ConfigError: the environment overrules it.
        """
        import torch

        if hasattr(torch, "set_float32_matmul_precision"):  # torch >= 1.12
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")

    def autocast(self, precision: str) -> ContextManager[Any]:
        """Context manager for the forward pass; does nothing for :data:`FLOAT32`."""
        if precision in FLOAT32:
            return contextlib.nullcontext()
        import torch

        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        return torch.autocast(self.device_type, dtype=dtype)

    def grad_scaler(self, precision: str) -> Any | None:
        """A loss scaler with the interface of ``torch.amp.GradScaler``, or None where none is needed."""
        if precision != "fp16":
            return None
        import torch

        return torch.amp.GradScaler(self.device_type)
