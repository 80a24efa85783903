"""Checkpoint files: writing is atomic and in the background, and reading cannot run code.

A checkpoint is plain data (dicts, lists, numbers, strings, CPU tensors). The tensors of a sharded model are in a folder
beside the file, ``<name>.shards<k>``, in the format of ``torch.distributed.checkpoint``. The file contains the name of
the folder and the digests of its files, and is written last. A sharded model reads its own parts of the tensors, on any
number of ranks; other models read whole tensors.

Between two training steps the state is copied to host memory, page-locked if the backend supports it. A thread writes
the copy while training continues.

One restricted unpickler reads all pickles, also those of other tools. These often contain histories, settings and NumPy
scalars beside the weights. Known classes of that kind are replaced by empty objects; a file with any other class is
refused. Torch's own ``weights_only`` accepts no further classes before torch 2.5, and can be bypassed before 2.6
(CVE-2025-32434).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import os
import pickle
import re
import shutil
import tarfile
import types
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Container, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from exp.engine.wrapper import is_sharded, local_part, part_like, sharded_like, sharded_parameters
from exp.errors import CheckpointError, RunError, error_message
from exp.hardware.compat import TORCH_VERSION
from exp.hub import shards_of
from exp.runs.files import NO_COMMENT, NO_RUN, SEAL_BYTES, Seal, digest_of, seal_of, write_atomically
from exp.runs.folder import CHECKPOINT_NAME, RunFolder
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from torch import nn

    from exp.distributed import Distributed
    from exp.hardware.backend import Backend

logger = logging.getLogger(__name__)

BESIDE = "beside"
"""Key of a checkpoint whose shards are in a folder beside it: ``{"name", "digests"}``, and after reading ``folder``,
the parent folder."""
BEST = "best.pth"
"""File name of the weights of the best validation."""
NO_DIGEST = "it has no digest, so damage cannot be detected"
SET_ASIDE = "set_aside"
"""Folder below ``checkpoints/`` for checkpoints from which no run resumes: of another training, or of later
steps than the one from which a run has resumed, for example because they are damaged."""

_HOLDERS = ("state_dict", "model", "teacher", "student")
# torch.compile, FSDP and activation checkpointing may wrap any module inside a model.
_WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_READERS = 8  # threads


# -- one file ----------------------------------------------------------------------------------------------------------


def plain(
    value: Any, on_cpu: Callable[[torch.Tensor], torch.Tensor] = lambda each: each.detach().cpu(), key: str = ""
) -> Any:
    """``value`` in new dicts, lists and tuples, with tensors on the CPU and NumPy scalars as Python numbers.

    Args:
        value: nested mappings, lists and tuples.
        on_cpu: returns the tensor that replaces a tensor.
        key: the key of ``value`` in the whole structure, for messages.

    Raises:
        TypeError: something in ``value`` is not plain data; the message has its type and its key.
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
    raise TypeError(f"a {kind} cannot be saved in a checkpoint: it is not plain data (key {key or 'without name'})")


def write(path: Path, checkpoint: Mapping[str, Any], run_id: str = NO_RUN) -> None:
    """Write a checkpoint under a temporary name, flush it to the disk, and rename it.

    The file ends with the SHA-256 of the output of ``torch.save`` and of the run's id, and with this id, as the comment
    of the zip archive. Every version of torch can read such a file, and copies of it keep the comment. Former folders
    of shards are removed.

    Args:
        path: the file.
        checkpoint: its content; see :func:`plain`.
        run_id: of the run that writes it.

    Raises:
        TypeError: the content is not plain data.
        OSError: the file system reports an error.
    """
    content = plain(checkpoint)

    def save(file: BinaryIO) -> None:
        stream: Any = _Stream(file)
        torch.save(content, stream)
        if stream.error is not None:
            raise stream.error
        file.seek(-len(NO_COMMENT), os.SEEK_CUR)
        stream.sha256.update(run_id.encode())
        file.write(Seal(stream.sha256.hexdigest(), run_id).encoded())

    former = _companions(path)
    write_atomically(path, save)
    for each in former:
        if each.name != content.get(BESIDE, {}).get("name"):
            shutil.rmtree(each)


class _Stream:
    """A file object for ``torch.save`` that computes the digest of what it writes.

    It keeps an error of the file system in :attr:`error` instead of raising it. Torch would replace the error by one of
    its own, and old versions of torch would end the process.
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
        """Do nothing: the file is flushed once, at the end."""


def read(path: Path, mapped: bool = False, whole: bool = True, check: bool = True, trusted: bool = False) -> Any:
    """Read a ``.pth`` of plain data, or the tensors of a ``.safetensors``, into CPU memory.

    Args:
        path: the file.
        mapped: map the file into memory, so that each tensor is read when it is used (torch 2.5 and later); the
            processes of a machine share the memory. For callers that copy what they need, and soon.
        whole: also read the shards beside the file; if false, :func:`complete` reads them later.
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
        seal = seal_of(path) if check else None
        if seal is not None and digest_of(path, SEAL_BYTES, NO_COMMENT + seal.run_id.encode()) != seal.digest:
            raise CheckpointError(
                f"{path} is damaged: its digest does not match its content; remove it, or use another checkpoint"
            )
        content = _load_torch(path, mapped)
        if check and not trusted:
            _check_origin(path, content, seal)
        if not isinstance(content, Mapping) or not isinstance(content.get(BESIDE), Mapping):
            return content
        beside = {**content[BESIDE], "folder": str(path.parent)}
        place = path.parent / str(beside["name"])
        if place not in _companions(path) or (check and digests(place) != beside.get("digests")):
            raise CheckpointError(f"{path}: the folder {beside['name']} beside it is missing or damaged")
        content = {**content, BESIDE: beside}
        return complete(content, state=not mapped) if whole else content
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {_reason(error)}\n"
            "Only plain tensors and containers are loaded; a file that needs more could run code. "
            "Save foreign weights as model.state_dict() or as .safetensors."
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
    recorded = run.recorded() if folder == run.checkpoints else {}
    digests: Mapping[str, str] = recorded.get("digests") or {}
    expected, found = digests.get(f"{folder.name}/{path.name}"), seal and seal.digest
    meta: Any = content.get("meta") if isinstance(content, Mapping) else None
    ours, named = isinstance(meta, Mapping) and "format" in meta, CHECKPOINT_NAME.match(path.name)
    wrong = None
    if ours and seal is None:
        wrong = "has lost its digest, so it is not as exp wrote it"
    elif expected is not None and (found or digest_of(path)) != expected:
        same = [name for name, digest in digests.items() if digest == found]
        wrong = f"is not the file that the run wrote, but {same[0] if same else 'another one'}"
    elif recorded and seal is not None and seal.run_id != recorded["run_id"]:
        wrong = "was written by another run"
    elif (
        recorded
        and ours
        and (step_of(path) != meta["step"] if named else path.name == BEST and "validation" not in meta)
    ):
        wrong = f"is a copy of the checkpoint of step {meta['step']}"
    if wrong is not None:
        raise CheckpointError(
            f"{path} {wrong}; use another checkpoint, or read it all the same with checkpoint.trusted=true"
        )


def _reason(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its type if there is no message."""
    return (error_message(error).strip() or type(error).__name__).splitlines()[0][:200]


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or of all files in an index."""
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
    # Classes in the metadata of a distributed checkpoint of tensors.
    r"|torch\.distributed\.checkpoint\.metadata\.(?:Metadata|TensorStorageMetadata|TensorProperties|ChunkStorageMetadata"
    r"|MetadataIndex|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\._StorageInfo"
    r"|torch\.serialization\._get_layout"
)
# Classes that MMEngine, OpenMMLab's libraries, Lightning and training scripts of ViTs save beside the weights.
_COMPANIONS = re.compile(
    r"(?:mmengine|mmcv|mmseg|mmdet|mmcls|mmpretrain|mmaction|mmselfsup|numpy|omegaconf|yacs|fvcore|addict"
    r"|lightning|lightning_fabric|pytorch_lightning|pathlib|datetime)\..+"
    r"|_codecs\.encode|argparse\.Namespace|collections\.(?:defaultdict|deque)"
    r"|(?:builtins|__builtin__)\.(?:getattr|bool|int|float|complex|str|bytes|bytearray|list|tuple|dict|set|frozenset|slice|range)"
    r"|typing\.Any|torch\.torch_version\.TorchVersion"
)


class _Inert:
    """An empty object that replaces one of a class in :data:`_COMPANIONS`; ignores all state from the pickle."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
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
        if _ADMITTED.fullmatch(f"{module}.{name}"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if _COMPANIONS.fullmatch(f"{module}.{name}"):
            return type(name, (_Inert,), {"__module__": module})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not plain data")


def load_pickle(file: Any, **options: Any) -> Any:
    """Read a pickle with the restricted unpickler.

    Raises:
        pickle.UnpicklingError: the pickle contains a class that is not allowed.
    """
    return _PlainUnpickler(file, **options).load()


def _load_torch(path: Path, mapped: bool) -> Any:
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


# -- shards: their keys are state_dict/<name> and optimizer/<index>/<name> ---------------------------------------------


def sharded_holders(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Copy a checkpoint so that its sharded tensors can be replaced.

    Args:
        content: the checkpoint; not changed.

    Returns:
        The checkpoint with new dicts where sharded tensors may be, and these dicts by the prefix of their keys.
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
    with ThreadPoolExecutor(_READERS) as pool:  # hashing releases the GIL
        return dict(zip((each.name for each in files), pool.map(digest_of, files)))


def complete(
    content: Mapping[str, Any],
    model: nn.Module | None = None,
    trained: Sequence[nn.Parameter] = (),
    state: bool = True,
) -> dict[str, Any]:
    """Add the tensors of the shards to a checkpoint: this rank's parts for a sharded model, else whole CPU tensors.

    Args:
        content: result of :func:`read`, saved by any number of ranks, sharded or not; not changed.
        model: the model that will take the weights, not wrapped; None: whole tensors.
        trained: for a sharded model, the parameters in the order of the optimizer's state; empty: leave out this state.
        state: without a model, whether to read the optimizer's state, which can be two thirds of the bytes.

    Raises:
        CheckpointError: the shards cannot be read, or do not match the model.
    """
    parameters: dict[str, Any] = {}
    if model is not None and is_sharded(model):
        parameters = {f"state_dict/{name}": parameter for name, parameter in sharded_parameters(model).items()}
        parameters.update((f"optimizer/{index}", parameter) for index, parameter in enumerate(trained))
    if BESIDE not in content and not parameters:
        return dict(content)

    def like(key: str, shape: Sequence[int]) -> Any:
        """The parameter whose sharding a tensor gets; None: the tensor stays whole."""
        found = parameters.get(key, parameters.get(key.rpartition("/")[0]))
        if found is not None and tuple(shape) != tuple(found.shape):
            raise CheckpointError(
                f"a tensor of shape {tuple(shape)} where the model has {tuple(found.shape)}: it is of another model, "
                "or of an optimizer whose state has other shapes than the weights, which cannot be resharded"
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
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"cannot read {folder}: {_reason(error)}") from error
        for key, value in found.items():
            prefix = "state_dict" if key.startswith("state_dict/") else key.rpartition("/")[0]
            holders[prefix][key[len(prefix) + 1 :]] = value
    return done


def _load_shards(folder: Path, like: Callable[[str, Sequence[int]], Any], prefix: str) -> dict[str, Any]:
    """Read the tensors whose keys begin with ``prefix``; each rank reads by itself, without collectives."""
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


# -- writing in the background -----------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes checkpoints in the background, one after another, from a copy of the state in host memory.

    Rank 0 writes. If the model is sharded, each rank writes its part with ``torch.distributed.checkpoint``; then the
    constructor is a collective. The writing threads have their own process group, since in the group of the training
    threads a collective of a writing thread could be matched with one of a training step.

    Call the methods from one thread only. They are not collectives.

    Args:
        backend: knows whether there is page-locked memory, and waits for the device after the copy.
        group: rank and world size.
        sharded: whether the model is sharded.
        run_id: of the run that writes.
    """

    def __init__(self, backend: Backend, group: Distributed, sharded: bool = False, run_id: str = NO_RUN) -> None:
        self._backend, self._is_main, self._run_id = backend, group.is_main, run_id
        # Kept from one checkpoint to the next, because allocating memory takes longer than the copy.
        self._buffers: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
        self._pool, self._group = ThreadPoolExecutor(1, "checkpoint"), None
        self._saving: Future[None] | None = None
        if sharded:
            from torch.distributed.device_mesh import DeviceMesh

            self._group = dist.new_group(backend="gloo")
            self._mesh = DeviceMesh.from_group(self._group, "cpu")

    def start(self, files: Mapping[Path, Mapping[str, Any]], then: Callable[[], object] | None = None) -> None:
        """Copy the content of files, and write them in the background. Waits for the previous checkpoint first.

        Args:
            files: the content of each file (see :func:`plain`).
            then: called on rank 0, in the background, when all files are on the disk.

        Raises:
            TypeError: a content is not plain data.
            Exception: the error of the previous checkpoint. If a rank could not write its part of a sharded model, that
                is a RunError with the rank.
        """
        if not self._is_main and self._group is None:
            return
        self.wait()
        report_stage(Stage.CHECKPOINT)
        pinned = self._backend.capabilities.pinned_memory
        used: defaultdict[Any, int] = defaultdict(int)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            kind = tensor.dtype, tensor.shape
            if used[kind] == len(self._buffers[kind]):
                self._buffers[kind].append(torch.empty_like(tensor, device="cpu", pin_memory=pinned))
            used[kind] += 1
            return self._buffers[kind][used[kind] - 1].copy_(tensor, non_blocking=pinned)

        copies = {}
        for path, content in files.items():
            rest, holders = sharded_holders(content) if self._group is not None else (content, {})
            parts = {}
            for prefix, holder in holders.items():
                for name in [name for name, value in holder.items() if hasattr(value, "full_tensor")]:
                    value = holder.pop(name)
                    parts[f"{prefix}/{name}"] = sharded_like(copied(value.to_local()), value, self._mesh)
            copies[path] = plain(rest, copied) if self._is_main else {}, parts
        self._backend.synchronize()
        self._saving = self._pool.submit(self._write, copies, then)

    def _write(self, files: Mapping[Path, Any], then: Callable[[], object] | None) -> None:
        for path, (content, parts) in files.items():
            try:
                beside = {} if self._group is None else {BESIDE: self._write_parts(path, parts)}
                if self._is_main:
                    write(path, {**content, **beside}, self._run_id)
            except OSError as error:
                error.filename = error.filename or str(path)  # raised later, in a step that does not know the path
                raise
        if then is not None and self._is_main:
            then()

    def _write_parts(self, path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Write DTensors into a new folder, since the former one is still in use. A collective of the writing threads.

        Returns:
            What the checkpoint keeps of the folder (:data:`BESIDE`).
        """
        import torch.distributed.checkpoint as dcp

        free = (path.with_name(f"{path.stem}.shards{number}") for number in itertools.count())
        names = [next(each for each in free if not each.exists()).name if self._is_main else ""]
        dist.broadcast_object_list(names, src=0, group=self._group)
        folder = path.with_name(names[0])
        try:
            dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(str(folder)), process_group=self._group)
        except dcp.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise RunError(f"rank {rank}: cannot write {folder}: {_reason(cause)}") from error
        return {"name": folder.name, "digests": digests(folder)} if self._is_main else {}

    def check(self) -> None:
        """Raise the error of the background thread, if there is one; does not wait."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            Exception: the error of the background thread; raised once.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            report_stage(Stage.CHECKPOINT)
            saving.result()

    def close(self) -> None:
        """Wait for the last checkpoint, also after a failed training, since it is valid; errors are only logged."""
        try:
            self.wait()
        except Exception:
            logger.exception("the last checkpoint is not saved")
        self._pool.shutdown()
        self._buffers.clear()


# -- the folder --------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """The files ``step_*.pth`` in ``folder``, with the newest (largest step) first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if CHECKPOINT_NAME.match(path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in the name of a file of :func:`list_checkpoints`."""
    found = CHECKPOINT_NAME.match(path.name)
    assert found is not None
    return int(found.group(1))


def _companions(path: Path) -> list[Path]:
    """The folders of shards beside a checkpoint: its own, and those of an interrupted save."""
    return list(path.parent.glob(f"{path.stem}.shards*"))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` files ``step_*.pth``, with their shards; at least one stays."""
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink()
        for each in _companions(path):
            shutil.rmtree(each)


def set_aside(paths: Sequence[Path]) -> None:
    """Move checkpoints into the folder :data:`SET_ASIDE` beside them, in which no run looks for checkpoints."""
    for path in paths:
        place = path.parent / SET_ASIDE
        place.mkdir(exist_ok=True)
        for each in [*_companions(path), path]:  # the file last: remove_leftovers deletes shards without a file
            if (place / each.name).is_dir():
                shutil.rmtree(place / each.name)  # from an earlier call, with the same step
            each.replace(place / each.name)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and incomplete shards of a killed process. Call it only while no rank writes."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
    for path in folder.glob("*.shards*"):
        if not path.with_suffix(".pth").is_file():
            shutil.rmtree(path)


# -- weights of any tool -----------------------------------------------------------------------------------------------


def weights_of(content: Any, source: Path | None = None) -> OrderedDict[str, torch.Tensor]:
    """Find the model's state dict in ``content``, and remove the prefixes that wrappers add to its names.

    Args:
        content: a state dict, or a dict that has one under ``state_dict`` (exp, MMEngine, Lightning), ``model``,
            ``teacher`` (self-distillation, such as DINO; preferred to the student) or ``student``.
        source: the file, for messages.

    Raises:
        CheckpointError: there is no state dict.
    """
    state = content
    for _ in range(4):  # such as {"model": {"teacher": {...}}}
        if not isinstance(state, Mapping):
            break
        if state and all(isinstance(value, torch.Tensor) for value in state.values()):
            names = OrderedDict((_WRAPPER.sub("", key), value) for key, value in state.items())
            while all(key.startswith("module.") for key in names):  # from DDP and DataParallel, which wrap the model
                names = OrderedDict((key[len("module.") :], value) for key, value in names.items())
            return names
        inner = next((state[key] for key in _HOLDERS if isinstance(state.get(key), Mapping)), None)
        if inner is None:
            break
        state = inner
    raise CheckpointError(f"{source or 'the file'} has no tensors by name, nor any under {', '.join(_HOLDERS)}")


def not_finite(state: Mapping[str, Any], parameters: Container[str]) -> list[str]:
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
    odd = {
        name: ((value - value).ne(0) if name in parameters else value.ne(value)).any()
        for name, value in candidates.items()
        if not math.isfinite(sums[name])
    }
    return [name for name, value in _read_values(odd).items() if value]


def _read_values(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Read 0-dim tensors by name; waits for the device once."""
    if not values:
        return {}
    device = next(iter(values.values())).device  # usually that of all tensors; others are moved there
    return dict(zip(values, torch.stack([value.float().to(device) for value in values.values()]).cpu().tolist()))
