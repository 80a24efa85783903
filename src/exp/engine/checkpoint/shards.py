"""The tensors of a sharded model, in a folder beside the checkpoint, in the format of ``torch.distributed.checkpoint``.

A sharded model reads its own parts of the tensors, on any number of ranks; other models read whole tensors. The keys of
the tensors are ``state_dict/<name>`` and ``optimizer/<index>/<name>``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch

from exp.engine.checkpoint.pickles import load_pickle
from exp.engine.fsdp import dtensor_like, shard_like, sharded_parameters
from exp.engine.wrapper import is_sharded
from exp.errors import CheckpointError, first_line
from exp.runs.files import file_digest

if TYPE_CHECKING:
    from torch import nn


SHARDS = "shards"
"""Key of a checkpoint whose shards are in a folder beside it: ``{"name", "digests"}``, and after reading ``folder``,
the parent folder."""
_READERS = 8  # threads


def short_reason(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its type if there is no message."""
    return (first_line(error) or type(error).__name__)[:200]


def copy_containers(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Copy a checkpoint so that its sharded tensors can be replaced.

    Args:
        content: the checkpoint; not changed.

    Returns:
        The checkpoint with new dicts where sharded tensors may be, and these dicts by the prefix of their keys.
    """
    copied = {**content, "state_dict": dict(content["state_dict"])}
    holders = {"state_dict": copied["state_dict"]}
    if "optimizer" in content:
        state = {index: dict(moments) for index, moments in content["optimizer"]["state"].items()}
        copied["optimizer"] = {**content["optimizer"], "state": state}
        holders.update((f"optimizer/{index}", moments) for index, moments in state.items())
    return copied, holders


def folder_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder of shards, by name."""
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor(_READERS) as pool:  # hashing releases the GIL
        return dict(zip((path.name for path in files), pool.map(file_digest, files)))


def load_shards(
    content: Mapping[str, Any],
    model: nn.Module | None = None,
    trained: Sequence[nn.Parameter] = (),
    with_optimizer: bool = True,
) -> dict[str, Any]:
    """Add the tensors of the shards to a checkpoint: this rank's parts for a sharded model, else whole CPU tensors.

    Args:
        content: result of :func:`exp.engine.checkpoint.files.read_checkpoint`, saved by any number of ranks, sharded or
            not; not changed.
        model: the model that will take the weights, not wrapped; None: whole tensors.
        trained: for a sharded model, the parameters in the order of the optimizer's state; empty: leave out this state.
        with_optimizer: without a model, whether to read the optimizer's state, which can be two thirds of the bytes.

    Raises:
        CheckpointError: the shards cannot be read, or do not match the model.
    """
    parameters: dict[str, Any] = {}
    if model is not None and is_sharded(model):
        parameters = {f"state_dict/{name}": parameter for name, parameter in sharded_parameters(model).items()}
        parameters.update((f"optimizer/{index}", parameter) for index, parameter in enumerate(trained))
    if SHARDS not in content and not parameters:
        return dict(content)

    def target_param(key: str, shape: Sequence[int]) -> Any:
        """The parameter whose sharding a tensor gets; None: the tensor stays whole."""
        parameter = parameters.get(key, parameters.get(key.rpartition("/")[0]))
        if parameter is not None and tuple(shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"a tensor of shape {tuple(shape)} where the model has {tuple(parameter.shape)}: it is of another "
                "model, or of an optimizer whose state has other shapes than the weights, which cannot be resharded"
            )
        return parameter

    content_copy, holders = copy_containers(content)
    for prefix, holder in holders.items():
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.dim():
                target = target_param(f"{prefix}/{name}", value.shape)
                holder[name] = value if target is None else shard_like(value, target)
    if SHARDS in content:
        record = content_copy.pop(SHARDS)
        folder = Path(record["folder"], record["name"])
        try:
            tensors = _read_tensors(
                folder, target_param, "" if trained or (model is None and with_optimizer) else "state_dict/"
            )
        except CheckpointError:
            raise
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"cannot read {folder}: {short_reason(error)}") from error
        for key, value in tensors.items():
            prefix = "state_dict" if key.startswith("state_dict/") else key.rpartition("/")[0]
            holders[prefix][key[len(prefix) + 1 :]] = value
    return content_copy


def _read_tensors(folder: Path, target_param: Callable[[str, Sequence[int]], Any], prefix: str) -> dict[str, Any]:
    """Read the tensors whose keys begin with ``prefix``; each rank reads by itself, without collectives."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                return load_pickle(file)

    reader = Reader(str(folder))
    tensors = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(prefix):
            target = target_param(key, entry.size)
            local = torch.empty(entry.size if target is None else target.to_local().shape, dtype=entry.properties.dtype)
            tensors[key] = local if target is None else dtensor_like(local.to(target.device), target)
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise min(error.failures.items())[1][0] from error
    return tensors


def shard_folders(path: Path) -> list[Path]:
    """The folders of shards beside a checkpoint: its own, and those of an interrupted save."""
    return list(path.parent.glob(f"{path.stem}.shards*"))
