"""Finds and reads checkpoints, those of other projects too: plain data, and nothing that could run code.

A checkpoint is plain data (dicts, lists, numbers, strings, CPU tensors). The tensors of a sharded model are in a folder
beside the file, ``<name>.shards<k>``, in the format of ``torch.distributed.checkpoint``, with the keys
``state_dict/<name>`` and ``optimizer/<index>/<name>``. The file contains the name of the folder and the digests of its
files. A sharded model reads its own parts of the tensors, on any number of ranks; other models read whole tensors.

There is one restricted unpickler for all pickles. Checkpoints of other tools often contain histories, settings and
NumPy scalars beside the weights. Known classes of that kind are replaced by empty objects; a file with any other class
is refused. Torch's own ``weights_only`` accepts no further classes before torch 2.5, and can be bypassed before 2.6
(CVE-2025-32434).
"""

from __future__ import annotations

import math
import pickle
import re
import tarfile
import types
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Container, Mapping, Sequence

import torch

from exp.engine.fsdp import dtensor_like, local_part, shard_like, sharded_parameters
from exp.engine.wrapper import is_sharded
from exp.errors import CheckpointError, first_line
from exp.hardware.compat import TORCH_VERSION
from exp.hub.files import shards_of
from exp.runs.files import NO_COMMENT, SEAL_BYTES, Seal, file_digest, read_seal
from exp.runs.folder import CHECKPOINT_NAME, RunFolder

if TYPE_CHECKING:
    from torch import nn


BEST_NAME = "best.pth"
"""File name of the weights of the best validation."""
NO_DIGEST = "it has no digest, so damage cannot be detected"
SHARDS = "shards"
"""Key of a checkpoint whose shards are in a folder beside it: ``{"name", "digests"}``, and after reading ``folder``,
the parent folder."""
_READERS = 8  # threads

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


def list_checkpoints(folder: Path) -> list[Path]:
    """The files ``step_*.pth`` in ``folder``, with the newest (largest step) first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if CHECKPOINT_NAME.match(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a file of :func:`list_checkpoints`."""
    match = CHECKPOINT_NAME.match(path.name)
    assert match is not None
    return int(match.group(1))


def shard_folders(path: Path) -> list[Path]:
    """The folders of shards beside a checkpoint: its own, and those of an interrupted save."""
    return list(path.parent.glob(f"{path.stem}.shards*"))


def folder_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder of shards, by name."""
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor(_READERS) as pool:  # hashing releases the GIL
        return dict(zip((path.name for path in files), pool.map(file_digest, files)))


def short_reason(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its type if there is no message."""
    return (first_line(error) or type(error).__name__)[:200]


def read_checkpoint(
    path: Path, mapped: bool = False, with_shards: bool = True, check: bool = True, trusted: bool = False
) -> Any:
    """Read a ``.pth`` of plain data, or the tensors of a ``.safetensors``, into CPU memory.

    Args:
        path: the file.
        mapped: map the file into memory, so that each tensor is read when it is used (torch 2.5 and later); the
            processes of a machine share the memory. For callers that copy what they need, and soon.
        with_shards: also read the shards beside the file; if false,
            :func:`exp.engine.checkpoint.reader.load_shards` reads them later.
        check: compare the digests of the file and its shards, and see that it is the file that its run wrote; false if
            another rank does it.
        trusted: read a checkpoint of exp even if it has no digest, or is not the file that its run wrote.

    Raises:
        CheckpointError: the file does not exist, is damaged, contains other than plain data, or is not the file that
            the run wrote under this name.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; check resume and init_from")
    try:
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return _safetensors(path)
        seal = read_seal(path) if check else None
        if seal is not None and file_digest(path, SEAL_BYTES, NO_COMMENT + seal.run_id.encode()) != seal.digest:
            raise CheckpointError(
                f"{path} is damaged: its digest does not match its content; remove it, or use another checkpoint"
            )
        content = load_torch(path, mapped)
        if check and not trusted:
            _check_origin(path, content, seal)
        if not isinstance(content, Mapping) or not isinstance(content.get(SHARDS), Mapping):
            return content
        shards = {**content[SHARDS], "folder": str(path.parent)}
        shard_folder = path.parent / str(shards["name"])
        if shard_folder not in shard_folders(path) or (check and folder_digests(shard_folder) != shards.get("digests")):
            raise CheckpointError(f"{path}: the folder {shards['name']} beside it is missing or damaged")
        content = {**content, SHARDS: shards}
        return load_shards(content, with_optimizer=not mapped) if with_shards else content
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {short_reason(error)}",
            details=[
                "Only plain tensors and containers are loaded; a file that needs more could run code. "
                "Save foreign weights as model.state_dict() or as .safetensors."
            ],
            file=path,
        ) from error


def _check_origin(path: Path, content: Any, seal: Seal | None) -> None:
    """Refuse a checkpoint of exp without a digest, or that is not the file that its run wrote under this name.

    A run records its id in ``env.json`` and, at its end, the digests of its checkpoints in ``result.json``. A run that
    was killed has the id alone; each checkpoint contains its step, and ``best.pth`` the validation.

    Args:
        path: the file.
        content: what is in it.
        seal: the end of the file; None: it has none.

    Raises:
        CheckpointError: as above.
    """
    folder = path.absolute().parent
    run = RunFolder(folder.parent)
    recorded = run.saved_identity() if folder == run.checkpoints else {}
    digests: Mapping[str, str] = recorded.get("digests") or {}
    recorded_digest, sealed_digest = digests.get(f"{folder.name}/{path.name}"), seal and seal.digest
    meta: Any = content.get("meta") if isinstance(content, Mapping) else None
    is_of_exp, named = isinstance(meta, Mapping) and "format" in meta, CHECKPOINT_NAME.match(path.name)
    wrong = None
    if is_of_exp and seal is None:
        wrong = "has lost its digest, so it is not as exp wrote it"
    elif recorded_digest is not None and (sealed_digest or file_digest(path)) != recorded_digest:
        same = [name for name, digest in digests.items() if digest == sealed_digest]
        wrong = f"is not the file that the run wrote, but {same[0] if same else 'another one'}"
    elif recorded and seal is not None and seal.run_id != recorded["run_id"]:
        wrong = "was written by another run"
    elif (
        recorded
        and is_of_exp
        and (step_of(path) != meta["step"] if named else path.name == BEST_NAME and "validation" not in meta)
    ):
        wrong = f"is a copy of the checkpoint of step {meta['step']}"
    if wrong is not None:
        raise CheckpointError(
            f"{path} {wrong}; use another checkpoint, or read it all the same with checkpoint.trusted=true"
        )


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of all files in an index."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for name in [path.name] if path.suffix == ".safetensors" else shards_of(path):
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path} lists {name}, which is not beside it; fetch all files of the weights")
        state.update(load_file(str(path.parent / name)))
    return state


# -- the tensors of a sharded model ------------------------------------------------------------------------------------


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


def load_shards(
    content: Mapping[str, Any],
    model: nn.Module | None = None,
    trained: Sequence[nn.Parameter] = (),
    with_optimizer: bool = True,
) -> dict[str, Any]:
    """Add the tensors of the shards to a checkpoint: this rank's parts for a sharded model, else whole CPU tensors.

    Args:
        content: result of :func:`read_checkpoint`, saved by any number of ranks, sharded or not; not changed.
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


# -- tensors that are not finite ---------------------------------------------------------------------------------------


def nonfinite_tensors(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
    """Names of the tensors in a state dict with values that only a diverged training leaves.

    For parameters these are NaN and infinity. A buffer may contain infinity, as attention masks do, but not NaN. Waits
    for the device once, or twice if a sum is not finite.

    Args:
        state: tensors by name.
        parameters: names of the tensors that are parameters.
    """
    candidates = {
        name: local_part(value.detach())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and local_part(value).numel()
    }
    # If a sum is finite, so are all its elements. A sum of finite elements may overflow, so a tensor whose sum is not
    # finite is checked element by element, which takes several times as long, and more memory.
    sums = _read_values({name: value.sum() for name, value in candidates.items()})
    # x - x is NaN where x is not finite.
    nonfinite = {
        name: ((value - value).ne(0) if name in parameters else value.ne(value)).any()
        for name, value in candidates.items()
        if not math.isfinite(sums[name])
    }
    return [name for name, value in _read_values(nonfinite).items() if value]


def _read_values(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Read 0-dim tensors by name; waits for the device once."""
    if not values:
        return {}
    device = next(iter(values.values())).device  # usually that of all tensors; others are moved there
    return dict(zip(values, torch.stack([value.float().to(device) for value in values.values()]).cpu().tolist()))


# -- pickles -----------------------------------------------------------------------------------------------------------


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
