"""Checkpoints of a model that no rank has whole: torch's distributed checkpoint beside the plain file.

``step_<n>.pth`` and ``best.pth`` are the plain checkpoints that they always are, but sharded tensors lie beside them,
in a folder ``<name>.shards<k>``. The plain file names the folder and the digests of its files, and is written after
them: without it they count for nothing. Whoever reads gets tensors as wanted: parts of them for a sharded model, on any
number of ranks, or whole ones.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from exp.engine.fsdp import is_sharded, sharded_parameters
from exp.engine.unpickle import load_index
from exp.errors import CheckpointError, RunError
from exp.runs.files import digest_of
from exp.user_code import message_of

if TYPE_CHECKING:
    from torch import nn

    from exp.engine.distributed import Distributed

__all__ = ["BESIDE", "ShardedSaver", "adopt", "companions", "complete", "digests", "opened", "remove", "remove_orphans"]

BESIDE = "beside"
"""Key of a checkpoint that tells what lies beside it: ``{"name", "digests"}``, and ``folder`` where it was read."""

_READERS = 8  # threads


# -- files -------------------------------------------------------------------------------------------------------------


def companions(path: Path) -> list[Path]:
    """The folders of shards beside a checkpoint: its own, and those of a save that was cut short."""
    return list(path.parent.glob(f"{path.stem}.shards*"))


def remove(path: Path) -> None:
    """Remove a checkpoint, and then what lies beside it."""
    path.unlink()
    for each in companions(path):
        shutil.rmtree(each)


def remove_orphans(folder: Path) -> None:
    """Remove shards without their checkpoint: of a writer that was killed."""
    for each in folder.glob("*.shards*"):
        if not each.with_suffix(".pth").is_file():
            shutil.rmtree(each)


def new_folder(path: Path) -> Path:
    """A folder for the shards of a checkpoint that there is not yet: the former ones are still good."""
    taken = companions(path)
    free = (path.with_name(f"{path.stem}.shards{number}") for number in range(len(taken) + 1))
    return next(folder for folder in free if folder not in taken)


def adopt(content: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Copy what lies beside a checkpoint to another place; gives the checkpoint that is to be written there."""
    if BESIDE not in content:
        return content
    beside, folder = content[BESIDE], new_folder(path)
    shutil.copytree(Path(beside["folder"], beside["name"]), folder)
    return {**content, BESIDE: {**beside, "name": folder.name}}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder, by name; empty: there is none."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    with ThreadPoolExecutor(_READERS) as pool:  # hashing lets go of the interpreter's lock
        return dict(zip((each.name for each in found), pool.map(digest_of, found)))


def opened(path: Path, content: Any, check: bool = True) -> Any:
    """What has been read from ``path``, after a look at what lies beside it.

    Args:
        path: of the checkpoint.
        content: of it.
        check: whether to compare digests; else it is enough that the folder is there.

    Raises:
        CheckpointError: it is not there, or not as it was written.
    """
    if not isinstance(content, Mapping) or not isinstance(content.get(BESIDE), Mapping):
        return content
    beside = {**content[BESIDE], "folder": str(path.parent)}
    place = path.parent / str(beside["name"])
    if place not in companions(path) or (check and digests(place) != beside.get("digests")):
        raise CheckpointError(f"{path}: {beside['name']} beside it is missing or not as it was written")
    return {**content, BESIDE: beside}


# -- where tensors stand in a checkpoint: keys are state_dict/<name> and optimizer/<index>/<name> ----------------------


def _holders(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The dicts of a checkpoint that may hold sharded tensors, by the prefix of their keys."""
    yield "state_dict", content["state_dict"]
    for index, state in content.get("optimizer", {}).get("state", {}).items():
        yield f"optimizer/{index}", state


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with holders of its own."""
    copied = {**content, "state_dict": dict(content["state_dict"])}
    if "optimizer" in content:
        state = {index: dict(each) for index, each in content["optimizer"]["state"].items()}
        copied["optimizer"] = {**content["optimizer"], "state": state}
    return copied


# -- writing -----------------------------------------------------------------------------------------------------------


class ShardedSaver:
    """Writes checkpoints of which each rank has a part, by torch's distributed checkpoint. To make it is a collective.

    Ranks agree on who writes what over a group of their writing threads: in that of the training a collective could
    meet one of a step.

    Args:
        group: of all ranks.
        write: writes a plain checkpoint.
    """

    def __init__(self, group: Distributed, write: Callable[[Path, Any], None]) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self._is_main, self._write_plain = group.is_main, write
        self._group = dist.new_group(backend="gloo")
        self._mesh = DeviceMesh.from_group(self._group, "cpu")

    def prepare(self, content: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path, Any], None]]:
        """What this rank keeps of a checkpoint, and what writes a copy of that in the background of every rank.

        No collective; the call that it gives is one, of the threads.
        """
        rest, parts = _copied(content), {}
        for prefix, holder in _holders(rest):
            for name in [name for name, value in holder.items() if hasattr(value, "full_tensor")]:
                parts[f"{prefix}/{name}"] = holder.pop(name)
        kept = {"parts": {key: value.to_local() for key, value in parts.items()}}
        kept["rest"] = rest if self._is_main else {}

        def write(path: Path, copied: Mapping[str, Any]) -> None:
            folder = self._write(path, {key: _sharded(copied["parts"][key], parts[key], self._mesh) for key in parts})
            if self._is_main:
                self._write_plain(path, {**copied["rest"], BESIDE: {"name": folder.name, "digests": digests(folder)}})

        return kept, write

    def _write(self, path: Path, tensors: dict[str, Any]) -> Path:
        """Write the shards of one checkpoint; gives their folder.

        Raises:
            RunError: a rank, which is named, could not write its part.
        """
        import torch.distributed.checkpoint as dcp

        names = [new_folder(path).name if self._is_main else ""]
        dist.broadcast_object_list(names, src=0, group=self._group)
        folder = path.with_name(names[0])
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(folder)), process_group=self._group)
        except dcp.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise RunError(f"rank {rank}: cannot write {folder}: {_first_line(cause)}") from error
        return folder


def _sharded(local: torch.Tensor, like: Any, mesh: Any = None) -> Any:
    """This rank's part of a tensor that is sharded as ``like``, on that one's mesh or another."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, mesh or like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def complete(
    content: Mapping[str, Any],
    model: nn.Module | None = None,
    trained: Sequence[nn.Parameter] = (),
    state: bool = True,
) -> dict[str, Any]:
    """A checkpoint with all its tensors: for a sharded model this rank's part of each, else whole ones on the CPU.

    Args:
        content: as :func:`exp.engine.checkpoint.read` gives it, from whatever number of ranks, sharded or not.
        model: without a wrapper, to be given the weights; None: not sharded.
        trained: parameters in the order in which the optimizer's state counts them; empty: a model wants none of it.
        state: whether the optimizer's state, two thirds of the bytes, is wanted where there is no model.

    Raises:
        CheckpointError: what lies beside the file does not open, or does not fit the model.
    """
    parameters: dict[str, Any] = {}
    if model is not None and is_sharded(model):
        parameters = {f"state_dict/{name}": parameter for name, parameter in sharded_parameters(model).items()}
        parameters.update((f"optimizer/{index}", parameter) for index, parameter in enumerate(trained))

    def like(key: str) -> Any:
        return parameters.get(key, parameters.get(key.rpartition("/")[0]))

    if BESIDE not in content and not parameters:
        return dict(content)
    done = _copied(content)
    for prefix, holder in _holders(done) if parameters else ():
        for name, value in holder.items():
            whole = like(f"{prefix}/{name}")
            if whole is not None and isinstance(value, torch.Tensor) and value.dim():
                holder[name] = _part_of(value, whole)
    if BESIDE in content:
        beside = done.pop(BESIDE)
        folder = Path(beside["folder"], beside["name"])
        try:
            found = _load(folder, like, "" if trained or (model is None and state) else "state_dict/")
        except CheckpointError:
            raise
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            raise CheckpointError(f"cannot read {folder}: {_first_line(error)}") from error
        holders = dict(_holders(done))
        for key, value in found.items():
            prefix = "state_dict" if key.startswith("state_dict/") else key.rpartition("/")[0]
            holders[prefix][key[len(prefix) + 1 :]] = value
    return done


def _load(folder: Path, like: Callable[[str], Any], prefix: str) -> dict[str, Any]:
    """The tensors whose keys begin with ``prefix``, each rank for itself; no collective."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            return load_index(folder / ".metadata")

    reader = Reader(str(folder))
    index = reader.read_metadata().state_dict_metadata
    wanted = {key: _empty(entry, like(key)) for key, entry in index.items() if key.startswith(prefix)}
    try:
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise min(error.failures.items())[1][0] from error
    return wanted


def _first_line(error: BaseException) -> str:
    return (message_of(error).strip() or type(error).__name__).splitlines()[0][:200]


def _empty(entry: Any, like: Any) -> Any:
    if like is None:
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    _check_shape(entry.size, like)
    return _sharded(torch.empty_like(like.to_local(), dtype=entry.properties.dtype), like)


def _part_of(whole: torch.Tensor, like: Any) -> Any:
    """This rank's rows of a tensor: those of rank r of n begin at row ``r * ceil(rows / n)``."""
    _check_shape(whole.shape, like)
    rows, mesh = len(whole), like.device_mesh
    first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return _sharded(whole.narrow(0, first, len(like.to_local())).to(like.device, copy=True), like)


def _check_shape(shape: Sequence[int], like: Any) -> None:
    if tuple(shape) != tuple(like.shape):
        raise CheckpointError(
            f"a tensor of shape {tuple(shape)} where the model has {tuple(like.shape)}: of another model, or state "
            "that its optimizer does not keep like the weights, which cannot be sharded anew"
        )
