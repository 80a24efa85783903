"""Registers the process group ``eccl`` for the device type ``gcu``. CPU tensors need gloo."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, Callable

import torch.distributed as dist
from simulated_gcu import device_type
from torch.distributed import distributed_c10d

from torch_gcu import _C

__all__ = ["is_available"]


def is_available() -> bool:
    """Whether collectives are available."""
    return dist.is_available()


if hasattr(distributed_c10d, "_get_object_coll_device"):
    _device_of_objects: Callable[..., Any] = distributed_c10d._get_object_coll_device
else:  # torch 2.5, which gives a torch.device
    _device_of_objects = distributed_c10d._get_pg_default_device


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    return _C.make_eccl(store, rank, size, gloo)


def _refusing_objects(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Make a collective for objects raise over eccl, where real cards hang.

    Args:
        function: the collective.
        place: position of the argument ``group``.
    """

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        group = args[place] if len(args) > place else kwargs.get("group")
        if str(_device_of_objects(group)) == device_type():
            raise RuntimeError(
                f"eccl: torch.distributed.{function.__name__} hangs over eccl on a real card; use a gloo group, or a "
                "default group of cpu:gloo,gcu:eccl"
            )
        return function(*args, **kwargs)

    checked.refused_over_eccl = True  # type: ignore[attr-defined]
    return checked


if is_available():
    for _name, _place in (("all_gather_object", 2), ("gather_object", 3)):
        _function = getattr(distributed_c10d, _name)
        if not hasattr(_function, "refused_over_eccl"):
            _checked = _refusing_objects(_function, _place)
            setattr(distributed_c10d, _name, _checked)
            setattr(dist, _name, _checked)
    dist.Backend.register_backend("eccl", _create, devices=[device_type()])
    dist.is_eccl_available = is_available  # torch looks for it here, as for is_nccl_available
