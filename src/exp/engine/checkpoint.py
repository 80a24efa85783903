"""Checkpoint files: written so that none is ever half there, read so that none can run code.

A checkpoint is plain data (dicts, lists, numbers, strings, CPU tensors), so it opens with ``weights_only=True``. Torch
below 1.13 has no such switch; there :class:`_PlainUnpickler` is handed to ``torch.load`` instead, which admits the same
few names. A file that needs more is refused; nothing is ever retried without the guard.
"""

from __future__ import annotations

import io
import pickle
import re
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any, Mapping

import numpy as np
import torch

from exp.compat import TORCH_VERSION
from exp.errors import CheckpointError
from exp.runfolder import write_atomically

__all__ = [
    "list_checkpoints",
    "newest_that_opens",
    "plain",
    "prune",
    "read",
    "remove_stale_temporaries",
    "weights_of",
    "write",
]

_NAME = re.compile(r"^step_(\d+)\.pth$")
_ADMITTED = {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch", "Size")}


class _PlainUnpickler(pickle.Unpickler):
    """Admits tensors, their storages and containers; anything else in the file is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what the pickle asks for, if it is plain data."""
        if (module, name) in _ADMITTED or (module == "torch" and name.endswith("Storage")):
            return super().find_class(module, name)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")


def plain(value: Any) -> Any:
    """``value`` with tensors on the CPU, NumPy scalars as Python numbers, and plain containers.

    Raises:
        TypeError: something in it is not plain data; the message names its type.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot go into a checkpoint: not plain data"
    )


def write(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint under a temporary name, flush it to the disk and rename it.

    Args:
        path: the file to be.
        checkpoint: its content; see :func:`plain`.
    """
    buffer = io.BytesIO()
    torch.save(plain(checkpoint), buffer)
    write_atomically(path, buffer.getbuffer())


def read(path: Path) -> Any:
    """Read a ``.pth`` of plain data, or the tensors of a ``.safetensors``, onto the CPU.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it holds more than plain data.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; check resume and init_from")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        if TORCH_VERSION >= (1, 13):
            return torch.load(str(path), map_location="cpu", weights_only=True)
        guard = types.SimpleNamespace(Unpickler=_PlainUnpickler, load=_refuse_legacy, __name__="exp.plain_pickle")
        return torch.load(str(path), map_location="cpu", pickle_module=guard)
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {reason}\n"
            "Only plain tensors and containers are loaded; a file that needs more could run code. "
            "Save foreign weights as model.state_dict() or as .safetensors."
        ) from error


def _refuse_legacy(*_: Any, **__: Any) -> None:
    raise pickle.UnpicklingError("written by torch < 1.6; save it again with a newer torch")


def list_checkpoints(folder: Path) -> list[Path]:
    """The ``step_*.pth`` in ``folder``, newest (largest step) first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.match(path.name)]
    return sorted(found, key=lambda path: int(_NAME.match(path.name).group(1)), reverse=True)  # type: ignore[union-attr]


def newest_that_opens(folder: Path) -> tuple[Path | None, Any, list[str]]:
    """The newest readable checkpoint.

    Returns:
        Its path and content (both None where there is none), and one line for each newer file that did not open.
    """
    skipped: list[str] = []
    for path in list_checkpoints(folder):
        try:
            return path, read(path), skipped
        except CheckpointError as error:
            skipped.append(str(error).splitlines()[0])
    return None, None, skipped


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest ``step_*.pth``."""
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink()


def remove_stale_temporaries(folder: Path) -> None:
    """Remove what a killed writer left behind. Only call it while no rank writes."""
    if folder.is_dir():
        for path in folder.glob(".*.tmp"):
            path.unlink()


def weights_of(content: Any) -> OrderedDict[str, torch.Tensor]:
    """The model's state dict in ``content``: ours (``state_dict``), or a bare one.

    Raises:
        CheckpointError: there are no tensors by name in it.
    """
    state = content.get("state_dict", content) if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError("the checkpoint holds no state dict: expected tensors by name, or a key 'state_dict'")
    return OrderedDict(state)
