"""One restricted unpickler for all pickles, also those of other tools: reading cannot run code.

Checkpoints of other tools often contain histories, settings and NumPy scalars beside the weights. Known classes of that
kind are replaced by empty objects; a file with any other class is refused. Torch's own ``weights_only`` accepts no
further classes before torch 2.5, and can be bypassed before 2.6 (CVE-2025-32434).
"""

from __future__ import annotations

import pickle
import re
import tarfile
import types
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exp.hardware.compat import TORCH_VERSION

if TYPE_CHECKING:
    pass


_ALLOWED_CLASSES = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(?:tensor_v2|tensor_v3|parameter)|torch\.(?:Size|device|\w*Storage)"
    # Classes in the metadata of a distributed checkpoint of tensors.
    r"|torch\.distributed\.checkpoint\.metadata\.(?:Metadata|TensorStorageMetadata|TensorProperties|ChunkStorageMetadata"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.serialization\._get_layout"
)
# Classes that MMEngine, OpenMMLab's libraries, Lightning and training scripts of ViTs save beside the weights.
_REPLACED_CLASSES = re.compile(
    r"(?:mmengine|mmcv|mmseg|mmdet|mmcls|mmpretrain|mmaction|mmselfsup|numpy|omegaconf|yacs|fvcore|addict"
    r"|lightning|lightning_fabric|pytorch_lightning|pathlib|datetime)\..+"
    r"|_codecs\.encode|argparse\.Namespace|collections\.(?:defaultdict|deque)"
    r"|(?:builtins|__builtin__)\.(?:getattr|bool|int|float|complex|str|bytes|bytearray|list|tuple|dict|set|frozenset|slice|range)"
    r"|typing\.Any|torch\.torch_version\.TorchVersion"
)


class _PickleStub:
    """An empty object that replaces one of a class in :data:`_REPLACED_CLASSES`; ignores all state from the pickle."""

    def __new__(cls, *_: Any, **__: Any) -> _PickleStub:
        return object.__new__(cls)

    def _forget(self, *_: Any, **__: Any) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = extend = _forget


class _PlainUnpickler(pickle.Unpickler):
    """Allows tensors, their storages, containers and empty replacements; refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that the pickle names, or its empty replacement.

        Raises:
            pickle.UnpicklingError: the class is not allowed.
        """
        if _ALLOWED_CLASSES.fullmatch(f"{module}.{name}"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if _REPLACED_CLASSES.fullmatch(f"{module}.{name}"):
            return type(name, (_PickleStub,), {"__module__": module})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data")


def load_pickle(file: Any, **options: Any) -> Any:
    """Read a pickle with the restricted unpickler.

    Raises:
        pickle.UnpicklingError: the pickle contains a class that is not allowed.
    """
    return _PlainUnpickler(file, **options).load()


def load_torch(path: Path, mapped: bool) -> Any:
    """The content of a file of ``torch.save``, on the CPU; files in the format before zip are not mapped."""
    if tarfile.is_tarfile(str(path)):  # torch would unpack it to the paths in it, which may lead anywhere
        raise pickle.UnpicklingError("it is a tar archive, the format of torch before 0.1.10")
    guard = types.SimpleNamespace(Unpickler=_PlainUnpickler, load=load_pickle, __name__="exp.plain_pickle")
    maps = mapped and TORCH_VERSION >= (2, 5) and zipfile.is_zipfile(path)
    options: dict[str, Any] = {"mmap": True} if maps else {}
    with warnings.catch_warnings():
        # A TorchScript archive is a program; torch warns before it loads one.
        warnings.filterwarnings("error", message=".*TorchScript archive")
        return torch.load(str(path), map_location="cpu", pickle_module=guard, **options)
