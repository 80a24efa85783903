"""Files of sharded tensors: torch's distributed checkpoint, read without running code, and plain safetensors.

Only tensors go into either. The index of a distributed checkpoint is a pickle; it is read by an unpickler that knows
its few classes and nothing else, and the tensors under torch's own restricted one.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Callable, Mapping, Sequence

import torch

from exp.engine.distributed import Distributed
from exp.errors import CheckpointError, RunError
from exp.runfolder import digest_of, to_json, write_atomically

__all__ = [
    "digests",
    "header",
    "load_shards",
    "part_of",
    "plan_shards",
    "put_together",
    "read_weights",
    "sizes",
    "unpickled",
    "write_index",
    "write_part",
    "write_rows",
]

_INDEX = ".metadata"
_PIECE = 2**24  # bytes
_READERS = 8  # threads
_CLASSES = re.compile(
    r"torch\.distributed\.checkpoint\.metadata\.(?:Metadata|TensorStorageMetadata|TensorProperties|ChunkStorageMetadata"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.storage\.WriteResult"
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


def digests(path: Path) -> dict[str, str]:
    """SHA-256 by name of the files in a folder, or of the one file."""
    found = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    with ThreadPoolExecutor(_READERS) as pool:  # hashing lets go of the interpreter's lock
        return dict(zip((each.name for each in found), pool.map(digest_of, found)))


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


def unpickled(report: bytes) -> Any:
    """Read what a rank reports of its part: of the classes of an index, too."""
    return _IndexUnpickler(io.BytesIO(report)).load()


def plan_shards(folder: Path, tensors: Mapping[str, Any], group: Distributed) -> tuple[Any, Any]:
    """Agree on which rank writes which part of a distributed checkpoint. A collective.

    Args:
        folder: need not be there.
        tensors: DTensors by name.
        group: carries objects.

    Returns:
        This rank's plan, and on rank 0 the index without the places in files. Good for all tensors of the same form.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    planner, writer = dcp.DefaultSavePlanner(), dcp.FileSystemWriter(str(folder))
    planner.set_up_planner(dict(tensors), is_coordinator=group.is_main)
    local: list[Any] | None = [None] * group.world_size if group.is_main else None
    dist.gather_object(planner.create_local_plan(), local, dst=0, group=group.cpu_group)
    plans: list[Any] = [None] * group.world_size
    index = None
    if local is not None:
        plans, index = planner.create_global_plan(local)
        plans = writer.prepare_global_plan(plans)
    own: list[Any] = [None]
    dist.scatter_object_list(own, plans, src=0, group=group.cpu_group)
    return own[0], index


def write_part(folder: Path, plan: tuple[Any, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """Write this rank's file of a distributed checkpoint, onto the disk. No collective.

    Args:
        folder: made where it is missing.
        plan: of :func:`plan_shards`.
        tensors: what this rank has of each tensor, on the CPU.

    Returns:
        What :func:`write_index` needs to know of it.
    """
    import torch.distributed.checkpoint as dcp

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> torch.Tensor:
            return tensors[write_item.index.fqn]

    folder.mkdir(parents=True, exist_ok=True)
    written: Any = dcp.FileSystemWriter(str(folder)).write_data(plan[0], Planner())
    return written.wait()


def write_index(folder: Path, plan: tuple[Any, Any], written: list[Any]) -> None:
    """Write the index of a distributed checkpoint, with what :func:`write_part` gave on each rank, by rank."""
    import torch.distributed.checkpoint as dcp

    dcp.FileSystemWriter(str(folder)).finish(copy.copy(plan[1]), written)


def load_shards(folder: Path, like: Callable[[str], Any], prefix: str = "") -> dict[str, Any]:
    """Read tensors, each rank for itself; no collective.

    Args:
        folder: of :func:`write_part`, by whatever number of ranks.
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
    return _rows_of(like.shape[0], like.device_mesh.get_local_rank(), like.device_mesh.size())


def _rows_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    step = -(-count // world_size)
    first = min(rank * step, count)
    return first, min(step, count - first)


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


def write_rows(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the bytes of tensors one after another; :func:`put_together` reads them once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for value in tensors.values():
            _write_bytes(file, value)


def put_together(
    path: Path, header: bytes, tensors: Mapping[str, torch.Tensor], rows: Mapping[str, int], others: Sequence[Path]
) -> None:
    """Write one plain safetensors file from rank 0's part and those of the other ranks, which are removed.

    Args:
        path: the file; it is there once it is complete and on the disk.
        header: of :func:`header`.
        tensors: what rank 0 has of each tensor, in the order of the header.
        rows: of each tensor that is sharded, how many it has on all ranks.
        others: what :func:`write_rows` made of the sharded ones on ranks 1, 2, ...
    """

    def save(out: BinaryIO) -> None:
        out.write(header)
        for name, value in tensors.items():
            _write_bytes(out, value)
            for rank, source in enumerate(sources, 1) if name in rows else ():
                _, count = _rows_of(rows[name], rank, len(sources) + 1)
                _copy(source, out, count * math.prod(value.shape[1:]) * value.element_size())

    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(each.open("rb")) for each in others]
        write_atomically(path, save)
    for each in others:
        each.unlink()


def _write_bytes(file: BinaryIO, value: torch.Tensor) -> None:
    data: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    file.write(data)


def _copy(source: BinaryIO, out: BinaryIO, size: int) -> None:
    while size:
        piece = source.read(min(size, _PIECE))
        if not piece:
            raise OSError(f"{source.name} is shorter than what its rank has written")
        out.write(piece)
        size -= len(piece)


def header(path: Path, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Give the beginning of a safetensors file.

    Args:
        path: the file to be, for messages.
        tensors: sharded or not, by name, in the order of the file.

    Raises:
        RunError: a tensor has a dtype that the format lacks.
    """
    odd = next((f"{name} is {value.dtype}" for name, value in tensors.items() if value.dtype not in _NAMES), None)
    if odd is not None:
        raise RunError(f"cannot write {path}: {odd}, which safetensors has no name for; keep it out of the state dict")
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        begin, end = end, end + value.numel() * value.element_size()
        entries[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = to_json(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
