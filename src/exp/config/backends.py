"""Whether the members of a backend of the user's give what exp asks of them. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp.contract import asked, is_own, shown
from exp.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from exp.backend import Backend

__all__ = ["BACKEND_PAGE", "check_backend", "selected_device"]

BACKEND_PAGE = "docs/add-a-backend.md"


def check_backend(backend: Backend) -> None:
    """Ask what the parent and the workers will ask before torch is imported.

    Raises:
        ConfigError: a member raises, takes other arguments, or gives something of another form; names it and the page.
    """
    if is_own(backend):
        return
    reason = _given(backend, "why_unavailable()", backend.why_unavailable)
    if reason is not None and not isinstance(reason, str):
        raise _refusal(backend, "why_unavailable", "None or a text", reason)
    if reason is not None:
        return  # and so nothing else can be asked
    count = _given(backend, "device_count()", backend.device_count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise _refusal(backend, "device_count", "a whole number from 0 on", count)
    call = "worker_env(local_rank, local_world_size, single_node=...)"
    environment = _given(backend, call, backend.worker_env, 0, 1, single_node=True)
    if not isinstance(environment, dict):
        raise _refusal(backend, "worker_env", "a dict of texts by name", environment)
    for name, value in environment.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise _refusal(backend, "worker_env", f"texts, also for {name!r}", value)


def selected_device(backend: Backend, local_rank: int) -> torch.device:
    """What ``set_device`` gives, in a worker.

    Raises:
        ConfigError: it is no device of torch's, or of another type than the backend's.
        Exception: what it raises.
    """
    import torch

    if is_own(backend):
        return backend.set_device(local_rank)
    with asked("backend", backend, ".set_device(local_rank)", BACKEND_PAGE, inside=False):
        device: Any = backend.set_device(local_rank)
    if not isinstance(device, torch.device):
        raise _refusal(backend, "set_device", "a torch.device", device)
    if device.type != backend.device_type:
        raise _refusal(backend, "set_device", f"a device of its device_type {backend.device_type!r}", device)
    return device


def _given(backend: Backend, call: str, member: Any, *arguments: Any, **keywords: Any) -> Any:
    with asked("backend", backend, f".{call}", BACKEND_PAGE):
        return member(*arguments, **keywords)


def _refusal(backend: Backend, member: str, wanted: str, found: Any) -> ConfigError:
    shown_value = f"{type(found).__name__} {found!r}" if found is not None else "None"
    return ConfigError(f"backend: {shown(backend)}.{member} must give {wanted}, not {shown_value}; see {BACKEND_PAGE}")
