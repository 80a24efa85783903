"""Checkpoint files: written so that none is ever half there, read so that none can run code.

A checkpoint is plain data (dicts, lists, numbers, strings, CPU tensors). The sharded tensors of a model that no rank
has whole lie beside the file, in a folder ``<name>.shards<k>`` of torch's distributed checkpoint: the file names the
folder and the digests of what is in it, and is written last. A sharded model reads its parts of them, on any number of
ranks; others read whole tensors.

One restricted unpickler reads all pickles, those of other tools, too. The tools of the field pickle histories, settings
and NumPy scalars beside the weights: names of these companions are read as inert stand-ins, and a file that names
anything else is refused. Torch's own can be told no more names before 2.5, and be got around before 2.6
(CVE-2025-32434).
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import shutil
import tarfile
import types
import warnings
import zipfile
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Container, Mapping, Sequence

import numpy as np
import torch

from exp.engine.fsdp import is_sharded, local_part, part_like, sharded_like, sharded_parameters
from exp.errors import CheckpointError, message_of
from exp.hardware.compat import TORCH_VERSION
from exp.hub import shards_of
from exp.runs.files import digest_of, write_atomically
from exp.runs.folder import CHECKPOINT_NAME

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "BESIDE", "NO_DIGEST", "SET_ASIDE", "complete", "digest_in", "digests", "free_folder", "list_checkpoints",
    "load_pickle", "not_finite", "plain", "prune", "read", "reason", "remove_leftovers", "set_aside", "sharded_holders",
    "step_of", "weights_of", "write",
]  # fmt: skip

BESIDE = "beside"
"""Key of a checkpoint that tells what lies beside it: ``{"name", "digests"}``, and ``folder`` where it was read."""
NO_DIGEST = "it has no digest: whether it is as it was written is not known"
SET_ASIDE = "set_aside"
"""Folder below ``checkpoints/`` of what no run goes on from: damaged, foreign, or of steps that one went back from."""

_COMMENT = b"sha256 "
_NO_COMMENT = b"\0\0"  # where a zip archive without one ends: the length of its comment
_SEAL = len(_NO_COMMENT) + len(_COMMENT) + 64  # bytes at the end of a file that are not digested
_HOLDERS = ("state_dict", "model", "teacher", "student")
# torch.compile, FSDP and activation checkpointing wrap any module of a model, not only the whole.
_WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_READERS = 8  # threads


# -- one file ----------------------------------------------------------------------------------------------------------


def plain(
    value: Any, on_cpu: Callable[[torch.Tensor], torch.Tensor] = lambda each: each.detach().cpu(), key: str = ""
) -> Any:
    """``value`` with tensors on the CPU, NumPy scalars as Python numbers, and plain containers.

    Args:
        value: of whatever structure.
        on_cpu: gives the tensor that takes a tensor's place.
        key: of ``value`` in what it is a part of, for messages.

    Raises:
        TypeError: something in it is not plain data; the message names its type and its key.
    """
    if isinstance(value, torch.Tensor):
        return on_cpu(value)
    if isinstance(value, Mapping):
        return {name: plain(item, on_cpu, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, on_cpu, key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"a {kind} cannot go into a checkpoint: not plain data (key {key or 'of no name'})")


def write(path: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write a checkpoint under a temporary name, flush it to the disk and rename it.

    The file ends with the SHA-256 of what ``torch.save`` writes, as the comment that a zip archive may have: every
    torch opens it, and a copy under another name keeps it.

    Args:
        path: the file to be.
        checkpoint: its content; see :func:`plain`.

    Raises:
        TypeError: it is not plain data.
        OSError: as the file system says it.
    """
    content = plain(checkpoint)

    def save(file: BinaryIO) -> None:
        stream: Any = _Stream(file)
        torch.save(content, stream)
        if stream.error is not None:
            raise stream.error
        comment = _COMMENT + stream.sha256.hexdigest().encode()
        file.seek(-len(_NO_COMMENT), os.SEEK_CUR)
        file.write(len(comment).to_bytes(2, "little") + comment)

    former = _companions(path)
    write_atomically(path, save)
    for each in former:
        if each.name != content.get(BESIDE, {}).get("name"):
            shutil.rmtree(each)


class _Stream:
    """A file as ``torch.save`` needs it, which digests and writes what it is given piece by piece.

    An error of the file system waits here: torch would replace it by one of its own, and old torch ends the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256 = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            self._file.write(b"" if self.error else data)
        except OSError as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        """At the end the file is."""


def digest_in(path: Path) -> str | None:
    """The digest at the end of a file of :func:`write`; None: others, and older versions, leave none."""
    with path.open("rb") as file:
        file.seek(-min(_SEAL, path.stat().st_size), os.SEEK_END)
        comment = file.read()[len(_NO_COMMENT) :]
    return comment[len(_COMMENT) :].decode("ascii", "replace") if comment.startswith(_COMMENT) else None


def read(path: Path, mapped: bool = False, whole: bool = True, check: bool = True) -> Any:
    """Read a ``.pth`` of plain data, or the tensors of a ``.safetensors``, onto the CPU.

    Args:
        path: the file.
        mapped: read each tensor when it is used, where torch can (>= 2.5): for who needs the weights of a file alone,
            and does not need them for long. Processes of one machine share the memory.
        whole: with the tensors of a sharded training, which lie beside the file; else :func:`complete` brings them.
        check: compare digests, also of what lies beside the file; not needed where another rank has done it.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it holds more than plain data.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; check resume and init_from")
    try:
        if path.name.endswith((".safetensors", ".safetensors.index.json")):
            return _safetensors(path)
        written = digest_in(path) if check else None
        if written is not None and digest_of(path, _SEAL, _NO_COMMENT) != written:
            raise CheckpointError(
                f"{path} is damaged: its digest is not that of what it holds; remove it, or use another"
            )
        content = _load_torch(path, mapped)
        if not isinstance(content, Mapping) or not isinstance(content.get(BESIDE), Mapping):
            return content
        beside = {**content[BESIDE], "folder": str(path.parent)}
        place = path.parent / str(beside["name"])
        if place not in _companions(path) or (check and digests(place) != beside.get("digests")):
            raise CheckpointError(f"{path}: {beside['name']} beside it is missing or not as it was written")
        content = {**content, BESIDE: beside}
        return complete(content, state=not mapped) if whole else content
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {reason(error)}\n"
            "Only plain tensors and containers are loaded; a file that needs more could run code. "
            "Save foreign weights as model.state_dict() or as .safetensors."
        ) from error


def reason(error: BaseException) -> str:
    """The first line of what an error says."""
    return (message_of(error).strip() or type(error).__name__).splitlines()[0][:200]


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of all files that an index lists, which lie beside it."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for name in [path.name] if path.suffix == ".safetensors" else shards_of(path):
        if not (path.parent / name).is_file():
            raise CheckpointError(f"{path} lists {name}, which is not beside it; fetch all files of the weights")
        state.update(load_file(str(path.parent / name)))
    return state


# -- pickles -----------------------------------------------------------------------------------------------------------

_ADMITTED = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(?:tensor_v2|tensor_v3|parameter)|torch\.(?:Size|device|\w*Storage)"
    # What the index of a distributed checkpoint of tensors is made of.
    r"|torch\.distributed\.checkpoint\.metadata\.(?:Metadata|TensorStorageMetadata|TensorProperties|ChunkStorageMetadata"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.serialization\._get_layout"
)
# What MMEngine, OpenMMLab's libraries, Lightning and the ViTs' training scripts leave beside the weights.
_COMPANIONS = re.compile(
    r"(?:mmengine|mmcv|mmseg|mmdet|mmcls|mmpretrain|mmaction|mmselfsup|numpy|omegaconf|yacs|fvcore|addict"
    r"|lightning|lightning_fabric|pytorch_lightning|pathlib|datetime)\..+"
    r"|_codecs\.encode|argparse\.Namespace|collections\.(?:defaultdict|deque)"
    r"|(?:builtins|__builtin__)\.(?:getattr|bool|int|float|complex|str|bytes|bytearray|list|tuple|dict|set|frozenset|slice|range)"
    r"|typing\.Any|torch\.torch_version\.TorchVersion"
)


class _Inert:
    """Stands where a file has an object that is not needed; takes whatever unpickling hands it, and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return object.__new__(cls)

    def _forget(self, *_: Any, **__: Any) -> None:
        pass

    __init__ = __setstate__ = __setitem__ = append = extend = _forget


class _PlainUnpickler(pickle.Unpickler):
    """Admits tensors, their storages and containers, and stand-ins; anything else in the file is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what the pickle asks for, if it is harmless."""
        if _ADMITTED.fullmatch(f"{module}.{name}"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if _COMPANIONS.fullmatch(f"{module}.{name}"):
            return type(name, (_Inert,), {"__module__": module})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data")


def load_pickle(file: Any, **options: Any) -> Any:
    """The object in a pickle.

    Raises:
        pickle.UnpicklingError: it names what is neither plain data nor a known companion of weights.
    """
    return _PlainUnpickler(file, **options).load()


def _load_torch(path: Path, mapped: bool) -> Any:
    """The content of a file of ``torch.save``, on the CPU; files older than zip are not mapped."""
    if tarfile.is_tarfile(str(path)):  # torch would unpack it, wherever the names in it lead
        raise pickle.UnpicklingError("it is a tar archive, as torch wrote them before 0.1.10")
    guard = types.SimpleNamespace(Unpickler=_PlainUnpickler, load=load_pickle, __name__="exp.plain_pickle")
    maps = mapped and TORCH_VERSION >= (2, 5) and zipfile.is_zipfile(path)
    options: dict[str, Any] = {"mmap": True} if maps else {}
    with warnings.catch_warnings():
        # Of TorchScript, which is a program: torch warns before it hands the file on.
        warnings.filterwarnings("error", message=".*TorchScript archive")
        return torch.load(str(path), map_location="cpu", pickle_module=guard, **options)


# -- shards beside the file: keys are state_dict/<name> and optimizer/<index>/<name> -----------------------------------


def sharded_holders(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A checkpoint with new dicts where it may have sharded tensors, and these dicts by the prefix of their keys.

    Args:
        content: it stays as it is.
    """
    copied = {**content, "state_dict": dict(content["state_dict"])}
    holders = {"state_dict": copied["state_dict"]}
    if "optimizer" in content:
        state = {index: dict(each) for index, each in content["optimizer"]["state"].items()}
        copied["optimizer"] = {**content["optimizer"], "state": state}
        holders.update((f"optimizer/{index}", each) for index, each in state.items())
    return copied, holders


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in a folder of shards, by name."""
    files = sorted(folder.iterdir())
    with ThreadPoolExecutor(_READERS) as pool:  # hashing lets go of the interpreter's lock
        return dict(zip((each.name for each in files), pool.map(digest_of, files)))


def free_folder(path: Path) -> Path:
    """A folder for the shards of a checkpoint that there is not yet: the former ones are still good."""
    taken = _companions(path)
    free = (path.with_name(f"{path.stem}.shards{number}") for number in range(len(taken) + 1))
    return next(folder for folder in free if folder not in taken)


def complete(
    content: Mapping[str, Any],
    model: nn.Module | None = None,
    trained: Sequence[nn.Parameter] = (),
    state: bool = True,
) -> dict[str, Any]:
    """A checkpoint with all its tensors: for a sharded model this rank's part of each, else whole ones on the CPU.

    Args:
        content: as :func:`read` gives it, from whatever number of ranks, sharded or not.
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
    if BESIDE not in content and not parameters:
        return dict(content)

    def like(key: str, shape: Sequence[int]) -> Any:
        """The parameter that a tensor is sharded as; None: it is wanted whole."""
        found = parameters.get(key, parameters.get(key.rpartition("/")[0]))
        if found is not None and tuple(shape) != tuple(found.shape):
            raise CheckpointError(
                f"a tensor of shape {tuple(shape)} where the model has {tuple(found.shape)}: of another model, or "
                "state that its optimizer does not keep like the weights, which cannot be sharded anew"
            )
        return found

    done, holders = sharded_holders(content)
    for prefix, holder in holders.items():
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.dim():
                own = like(f"{prefix}/{name}", value.shape)
                holder[name] = value if own is None else part_like(value, own)
    if BESIDE in content:
        beside = done.pop(BESIDE)
        folder = Path(beside["folder"], beside["name"])
        try:
            found = _load_shards(folder, like, "" if trained or (model is None and state) else "state_dict/")
        except CheckpointError:
            raise
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            raise CheckpointError(f"cannot read {folder}: {reason(error)}") from error
        for key, value in found.items():
            prefix = "state_dict" if key.startswith("state_dict/") else key.rpartition("/")[0]
            holders[prefix][key[len(prefix) + 1 :]] = value
    return done


def _load_shards(folder: Path, like: Callable[[str, Sequence[int]], Any], prefix: str) -> dict[str, Any]:
    """The tensors whose keys begin with ``prefix``, each rank for itself; no collective."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (folder / ".metadata").open("rb") as file:
                return load_pickle(file)

    reader = Reader(str(folder))
    wanted = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(prefix):
            own = like(key, entry.size)
            local = torch.empty(entry.size if own is None else own.to_local().shape, dtype=entry.properties.dtype)
            wanted[key] = local if own is None else sharded_like(local.to(own.device), own)
    try:
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise min(error.failures.items())[1][0] from error
    return wanted


# -- the folder --------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The ``step_*.pth`` in ``folder``, newest (largest step) first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if CHECKPOINT_NAME.match(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of one of :func:`list_checkpoints`."""
    found = CHECKPOINT_NAME.match(path.name)
    assert found is not None
    return int(found.group(1))


def _companions(path: Path) -> list[Path]:
    """The folders of shards beside a checkpoint: its own, and those of a save that was cut short."""
    return list(path.parent.glob(f"{path.stem}.shards*"))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` of the ``step_*.pth``, and what lies beside them; at least one stays."""
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink()
        for each in _companions(path):
            shutil.rmtree(each)


def set_aside(paths: Sequence[Path]) -> None:
    """Move files into the folder :data:`SET_ASIDE` beside them, where nothing takes them for checkpoints."""
    for path in paths:
        place = path.parent / SET_ASIDE
        place.mkdir(exist_ok=True)
        for each in [*_companions(path), path]:  # without the file what lies beside it counts for nothing
            if (place / each.name).is_dir():
                shutil.rmtree(place / each.name)  # set aside before, of the same step
            each.replace(place / each.name)


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed writer left behind. Only call it while no rank writes."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
    for path in folder.glob("*.shards*"):
        if not path.with_suffix(".pth").is_file():
            shutil.rmtree(path)


# -- weights, of any tool ----------------------------------------------------------------------------------------------


def weights_of(content: Any, source: Path | None = None) -> OrderedDict[str, torch.Tensor]:
    """The model's state dict in ``content``, without the names that wrappers of a model put before its own.

    Args:
        content: a bare state dict, or one under ``state_dict`` (ours, MMEngine's, Lightning's), ``model``, ``teacher``
            (self-distillation, such as DINO's; taken before its student) or ``student``.
        source: the file, for messages.

    Raises:
        CheckpointError: there are no tensors by name in it.
    """
    state = content
    for _ in range(4):  # such as {"model": {"teacher": {...}}}
        if not isinstance(state, Mapping):
            break
        if state and all(isinstance(value, torch.Tensor) for value in state.values()):
            names = OrderedDict((_WRAPPER.sub("", key), value) for key, value in state.items())
            while all(key.startswith("module.") for key in names):  # of DDP and DataParallel, round the whole model
                names = OrderedDict((key[len("module.") :], value) for key, value in names.items())
            return names
        inner = next((state[key] for key in _HOLDERS if isinstance(state.get(key), Mapping)), None)
        if inner is None:
            break
        state = inner
    keys = f"; it has the keys {', '.join(map(str, list(state)[:8]))}" if isinstance(state, Mapping) else ""
    raise CheckpointError(
        f"{source or 'the checkpoint'} holds no state dict: expected tensors by name, or under one of "
        f"{', '.join(_HOLDERS)}{keys}"
    )


def not_finite(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
    """Names of the tensors in a state dict that hold what no sound training leaves there.

    For parameters that is NaN or infinity; a buffer may hold infinity, as masks of attention
    do, but not NaN. The device is waited for once, or twice where something is not finite.

    Args:
        state: tensors by name.
        parameters: names of those that are parameters.
    """
    candidates = {
        name: local_part(value.detach())
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and local_part(value).numel()
    }
    # A sum is finite only where all its elements are. It may overflow before they do, so what it suspects is looked at
    # element by element, which takes several times as long, and memory.
    sums = _read_values({name: value.sum() for name, value in candidates.items()})
    # A difference is NaN where the element is not finite.
    odd = {
        name: ((value - value).ne(0) if name in parameters else value.ne(value)).any()
        for name, value in candidates.items()
        if not math.isfinite(sums[name])
    }
    return [name for name, value in _read_values(odd).items() if value]


def _read_values(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Values of one element each, by name; the device is waited for once."""
    if not values:
        return {}
    device = next(iter(values.values())).device  # of all, but for a state that was copied before a validation
    return dict(zip(values, torch.stack([value.float().to(device) for value in values.values()]).cpu().tolist()))
