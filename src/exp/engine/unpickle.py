"""Opens pickled checkpoints of any tool, and runs nothing that they name.

Beside weights, the tools of the field pickle what describes a training: histories of its log, settings, NumPy scalars.
None of it is needed here. Names of these companions are read as inert stand-ins, which take whatever unpickling hands
them and keep nothing; tensors and containers are read as they are; a file that names anything else is refused. Torch's
own restricted unpickler can be told no more names before 2.5, and be got around before 2.6 (CVE-2025-32434).
"""

from __future__ import annotations

import pickle
import re
import tarfile
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from exp.hardware.compat import TORCH_VERSION

__all__ = ["load_index", "load_plain"]

_ADMITTED = {
    ("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_tensor_v3"), ("torch", "Size"), ("torch", "device"),
}  # fmt: skip
# What MMEngine, OpenMMLab's libraries, Lightning and the ViTs' training scripts leave beside the weights.
_COMPANIONS = re.compile(
    r"(?:mmengine|mmcv|mmseg|mmdet|mmcls|mmpretrain|mmaction|mmselfsup|numpy|omegaconf|yacs|fvcore|addict"
    r"|lightning|lightning_fabric|pytorch_lightning|pathlib|datetime)\..+"
    r"|_codecs\.encode|argparse\.Namespace|collections\.(?:defaultdict|deque)"
    r"|(?:builtins|__builtin__)\.(?:getattr|bool|int|float|complex|str|bytes|bytearray|list|tuple|dict|set|frozenset|slice|range)"
    r"|typing\.Any|torch\.torch_version\.TorchVersion"
)
# What the index of a distributed checkpoint of tensors is made of.
_INDEX = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(?:Metadata|TensorStorageMetadata|TensorProperties|ChunkStorageMetadata"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.serialization\._get_layout"
)
_MAPS = TORCH_VERSION >= (2, 5)


class _Inert:
    """Stands where a file has an object that is not needed."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Forget."""

    extend = append


class _PlainUnpickler(pickle.Unpickler):
    """Admits tensors, their storages and containers, and stand-ins; anything else in the file is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what the pickle asks for, if it is harmless."""
        if (module, name) in _ADMITTED or (module == "torch" and name.endswith("Storage")):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if _COMPANIONS.fullmatch(f"{module}.{name}"):
            return type(name, (_Inert,), {"__module__": module})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data")


class _IndexUnpickler(_PlainUnpickler):
    """Admits the classes of an index, too; entries that are no tensors have another."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what the pickle asks for, if it is harmless."""
        if _INDEX.fullmatch(f"{module}.{name}"):
            return pickle.Unpickler.find_class(self, module, name)
        return super().find_class(module, name)


def load_index(path: Path) -> Any:
    """The index of a distributed checkpoint, which is a pickle.

    Raises:
        pickle.UnpicklingError: it names what has no place in an index of tensors.
    """
    with path.open("rb") as file:
        return _IndexUnpickler(file).load()


def load_plain(path: Path, mapped: bool = False) -> Any:
    """The content of a file of ``torch.save``, on the CPU.

    Args:
        path: the file.
        mapped: read tensors when they are used (torch >= 2.5; files older than zip, at once).

    Raises:
        pickle.UnpicklingError: it names what is neither plain data nor a known companion of weights.
        Exception: it is damaged; what is raised depends on where.
    """
    if tarfile.is_tarfile(str(path)):  # torch would unpack it, wherever the names in it lead
        raise pickle.UnpicklingError("it is a tar archive, as torch wrote them before 0.1.10")
    guard = types.SimpleNamespace(Unpickler=_PlainUnpickler, load=_load_plain_pickle, __name__="exp.plain_pickle")
    options: dict[str, Any] = {"mmap": True} if mapped and _MAPS and zipfile.is_zipfile(path) else {}
    with warnings.catch_warnings():
        # Of TorchScript, which is a program: torch warns before it hands the file on.
        warnings.filterwarnings("error", message=".*TorchScript archive")
        return torch.load(str(path), map_location="cpu", pickle_module=guard, **options)


def _load_plain_pickle(file: Any, **options: Any) -> Any:
    return _PlainUnpickler(file, **options).load()
