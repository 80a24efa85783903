"""Simulated ``torch_gcu``: the public interface of the vendor's plug-in for Enflame GCU, over host memory.

Importing it registers the device type ``gcu``, the module ``torch.gcu`` and the process group ``eccl``; importing it
twice is harmless. Only :func:`simulated_gcu.activate`, or its folder on ``PYTHONPATH``, makes it importable.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

# Otherwise importing torch would import this package again, through its entry point. As in the vendor's package, the
# variable stays 0 for child processes, unless the entry point has imported this package.
_autoload_before = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
import torch.distributed  # defines the types that the process group returns

if os.environ.get("SIM_GCU_PROFILE", "") not in ("", "s60", "l600"):
    raise ValueError(f"SIM_GCU_PROFILE={os.environ['SIM_GCU_PROFILE']} is no card; write s60 or l600, or leave it out")

# As in the vendor's package: this shadows a user's own modules named distributed, gcu or version.
sys.path.insert(0, str(Path(__file__).parent))

from simulated_gcu import device_type
from simulated_gcu.build import load

torch.utils.rename_privateuse1_backend(device_type())
_C = load("torch_gcu._C")

from torch_gcu import gcu

torch._register_device_module(device_type(), gcu)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

from torch_gcu import distributed, no_cuda, simulator

no_cuda.guard()

__all__ = ["distributed", "gcu", "simulator"]
__version__ = f"{torch.__version__.split('+')[0]}+simulated"


def _autoload() -> None:
    """Entry point that torch calls after it has imported this package: restore the variable."""
    if _autoload_before is None:
        os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    else:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload_before


def _drain() -> None:
    """Let autograd's device threads release their objects before the interpreter shuts down.

    On torch 2.13 such a thread may need the interpreter lock during the shutdown, which aborts the process ("terminate
    called without an active exception", pytorch pull request 180701).
    """
    if _C.is_initialized():
        for _ in range(5):
            time.sleep(0.01)


atexit.register(_drain)
