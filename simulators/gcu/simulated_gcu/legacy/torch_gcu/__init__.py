"""The legacy generation of simulated GCU cards: torch 1.10, device type ``xla``, lazy graphs.

Has the interface of the vendor's package of the same name, as far as training needs it, over host memory. The README
of the package ``simulated_gcu`` lists what is modeled.
"""

# The extension uses torch's process group classes, so their module must be imported first.
import torch.distributed  # noqa: F401 isort: skip

import atexit

from simulated_gcu.build import load

from torch_gcu._settings import from_environment

_C = load("torch_gcu._C")
_C.configure(*from_environment())

from torch_gcu import _exit, _tensor, amp, distributed, nn, simulator  # noqa: E402
from torch_gcu._device import (  # noqa: E402
    current_device,
    device,
    device_count,
    gcu_device,
    get_device_name,
    get_hbm_alloc_size,
    is_available,
    set_device,
)
from torch_gcu._step import (  # noqa: E402
    JitRunMode,
    collect_buffers,
    fetch_gradients,
    manual_seed_all,
    optimizer_step,
    sync_lived_tensor,
    synchronize,
    unlazy,
)

__all__ = [
    "JitRunMode",
    "amp",
    "collect_buffers",
    "current_device",
    "device",
    "device_count",
    "distributed",
    "fetch_gradients",
    "gcu_device",
    "get_device_name",
    "get_hbm_alloc_size",
    "is_available",
    "manual_seed_all",
    "nn",
    "optimizer_step",
    "set_device",
    "simulator",
    "sync_lived_tensor",
    "synchronize",
    "unlazy",
]

_tensor.install()


def _prepare_to_exit() -> None:
    """The vendor's clean-up; a process that ends by ``os._exit`` must call it."""
    _exit.unmark()


_exit.mark()
atexit.register(_prepare_to_exit)
