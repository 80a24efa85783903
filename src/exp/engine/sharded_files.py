"""Files of sharded tensors: torch's distributed checkpoint, read without running code, and plain safetensors.

Only tensors go into either. The index of a distributed checkpoint is a pickle; it is read by an unpickler that knows
its few classes and nothing else, and the tensors under torch's own restricted one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Mapping, Sequence

import torch

from exp.engine.distributed import Distributed
from exp.errors import CheckpointError, RunError
from exp.runfolder import to_json

__all__ = ["load_shards", "part_of", "read_weights", "save_shards", "sizes", "write_whole"]

_INDEX = ".metadata"
_CLASSES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(?:Metadata|TensorStorageMetadata|TensorProperties|ChunkStorageMetadata"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)"
    r"|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.Size|torch\.serialization\._get_layout"
    r"|collections\.OrderedDict"
)
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def sizes(path: Path) -> dict[str, int]:
    """Bytes by name of the files in a folder, or of the one file; empty: there are none."""
    if path.is_dir():
        return {each.name: each.stat().st_size for each in sorted(path.iterdir())}
    return {path.name: path.stat().st_size} if path.is_file() else {}


class _IndexUnpickler(pickle.Unpickler):
    """Admits the classes of which the index of tensors is made; entries that are no tensors have another class."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what the pickle asks for, if it is one of them."""
        if module.split(".")[0] == "pathlib":  # where the writer has put it
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and not _CLASSES.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in an index of tensors")
        return super().find_class(module, name)


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / _INDEX).open("rb") as file:
                return _IndexUnpickler(file).load()

    return Reader(str(folder))


def save_shards(folder: Path, tensors: Mapping[str, Any], group: Any) -> None:
    """Write sharded tensors: every rank its parts, and rank 0 the index, when all are there. A collective.

    Args:
        folder: made here.
        tensors: DTensors by name.
        group: carries objects; None: the default one does.
    """
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(str(folder)), process_group=group)


def load_shards(folder: Path, like: Callable[[str], Any], prefix: str = "") -> dict[str, Any]:
    """Read tensors, each rank for itself; no collective.

    Args:
        folder: of :func:`save_shards`, by whatever number of ranks.
        like: gives a DTensor whose form a tensor of that name is to have; None: it is wanted whole, on the CPU.
        prefix: of the names that are wanted.
    """
    import torch.distributed.checkpoint as dcp

    reader = _reader(folder)
    index = reader.read_metadata().state_dict_metadata
    wanted = {key: _empty(entry, like(key)) for key, entry in index.items() if key.startswith(prefix)}
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def _empty(entry: Any, like: Any) -> Any:
    dtype = entry.properties.dtype
    if like is None:
        return torch.empty(entry.size, dtype=dtype)
    _check_shape(entry.size, like)
    return _as_sharded(torch.empty_like(like.to_local(), dtype=dtype), like)


def _as_sharded(local: torch.Tensor, like: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _rows(like: Any) -> tuple[int, int]:
    """The first row that this rank keeps, and how many: rank r of n begins at row ``r * ceil(rows / n)``."""
    step = -(-like.shape[0] // like.device_mesh.size())
    return min(like.device_mesh.get_local_rank() * step, like.shape[0]), like.to_local().shape[0]


def _check_shape(shape: Sequence[int], like: Any) -> None:
    if tuple(shape) != tuple(like.shape):
        raise CheckpointError(
            f"a tensor of shape {tuple(shape)} where the model has {tuple(like.shape)}: of another model, or state "
            "that its optimizer does not keep like the weights, which cannot be sharded anew"
        )


def part_of(whole: torch.Tensor, like: Any) -> Any:
    """A tensor that this rank has whole, sharded as ``like`` (a DTensor of its shape) and on that one's device."""
    _check_shape(whole.shape, like)
    first, count = _rows(like)
    return _as_sharded(whole.narrow(0, first, count).to(like.device, copy=True), like)


def read_weights(path: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a safetensors file, of those in ``like`` (DTensors by name) only what this rank keeps.

    Raises:
        CheckpointError: a shape is not that of ``like``.
    """
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with safe_open(str(path), framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            if name not in like:
                found[name] = file.get_tensor(name)
                continue
            part = file.get_slice(name)
            _check_shape(part.get_shape(), like[name])
            first, count = _rows(like[name])
            found[name] = _as_sharded(part[first : first + count].to(like[name].device), like[name])
    return found


def write_whole(path: Path, tensors: Mapping[str, torch.Tensor], group: Distributed) -> None:
    """Write one plain safetensors file, a tensor at a time; never more than one of them is whole. A collective.

    Args:
        path: the file; it is there once it is complete and on the disk.
        tensors: sharded or not, by name; the same names on every rank.
        group: carries CPU tensors.

    Raises:
        RunError: rank 0 cannot write it, or a tensor has a dtype that the format lacks; all ranks raise it.
    """
    odd = next((f"{name} is {value.dtype}" for name, value in tensors.items() if value.dtype not in _NAMES), None)
    if odd is not None:
        raise RunError(f"cannot write {path}: {odd}, which safetensors has no name for; keep it out of the state dict")
    temporary = path.with_name(f".{path.name}.tmp")
    trouble, file = None, None
    try:
        if group.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open("wb")
            file.write(_header(tensors))
    except OSError as error:
        trouble = str(error)
    for value in tensors.values():
        whole = _gathered(value, group)
        try:
            if file is not None and trouble is None and whole is not None:
                whole.contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
        except OSError as error:
            trouble = str(error)  # the others go on gathering, and are told at the end
    try:
        if file is not None and trouble is None:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            temporary.replace(path)
    except OSError as error:
        trouble = str(error)
    if trouble is not None and file is not None:
        with contextlib.suppress(OSError):
            file.close()
            temporary.unlink()  # half of it helps nobody, and the disk may be full
    trouble = group.gather(trouble)[0]
    if trouble is not None:
        raise RunError(f"cannot write {path}: {trouble}")


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.numel() * value.element_size()
        entries[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = to_json(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@torch.no_grad()
def _gathered(value: Any, group: Distributed) -> torch.Tensor | None:
    """A tensor whole, on the CPU of rank 0; None on the others."""
    if not hasattr(value, "full_tensor"):
        return value.detach().cpu() if group.is_main else None
    import torch.distributed as dist

    local = value.to_local().detach().cpu()
    step = -(-value.shape[0] // group.world_size)
    padded = local.new_zeros((step, *value.shape[1:]))
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(group.world_size)] if group.is_main else None
    dist.gather(padded, parts, dst=0, group=group.cpu_group)
    return None if parts is None else torch.cat(parts)[: value.shape[0]]
