"""Checkpoint files: written atomically, with a digest; read as plain data.

A checkpoint is plain data (dicts, lists, numbers, strings, CPU tensors). The tensors of a sharded model are in a folder
beside the file, ``<name>.shards<k>`` (:mod:`exp.engine.checkpoint.shards`). The file contains the name of the folder
and the digests of its files, and is written last.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.engine.checkpoint.pickles import load_torch
from exp.engine.checkpoint.shards import SHARDS, folder_digests, load_shards, shard_folders, short_reason
from exp.errors import CheckpointError
from exp.hub import shards_of
from exp.runs.files import NO_COMMENT, NO_RUN_ID, SEAL_BYTES, Seal, file_digest, read_seal, write_atomically
from exp.runs.folder import CHECKPOINT_NAME, RunFolder

if TYPE_CHECKING:
    pass

BEST_NAME = "best.pth"
"""File name of the weights of the best validation."""
NO_DIGEST = "it has no digest, so damage cannot be detected"
QUARANTINE = "quarantine"
"""Folder below ``checkpoints/`` for checkpoints from which no run resumes: of another training, or of later
steps than the one from which a run has resumed, for example because they are damaged."""


def plain_copy(
    value: Any, on_cpu: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor.detach().cpu(), key: str = ""
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
        return {name: plain_copy(item, on_cpu, f"{key}.{name}" if key else str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain_copy(item, on_cpu, key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(f"a {kind} cannot be saved in a checkpoint: it is not plain data (key {key or 'without name'})")


def write_checkpoint(path: Path, checkpoint: Mapping[str, Any], run_id: str = NO_RUN_ID) -> None:
    """Write a checkpoint under a temporary name, flush it to the disk, and rename it.

    The file ends with the SHA-256 of the output of ``torch.save`` and of the run's id, and with this id, as the comment
    of the zip archive. Every version of torch can read such a file, and copies of it keep the comment. Former folders
    of shards are removed.

    Args:
        path: the file.
        checkpoint: its content; see :func:`plain_copy`.
        run_id: of the run that writes it.

    Raises:
        TypeError: the content is not plain data.
        OSError: the file system reports an error.
    """
    content = plain_copy(checkpoint)

    def save(file: BinaryIO) -> None:
        stream: Any = _Stream(file)
        torch.save(content, stream)
        if stream.error is not None:
            raise stream.error
        file.seek(-len(NO_COMMENT), os.SEEK_CUR)
        stream.sha256.update(run_id.encode())
        file.write(Seal(stream.sha256.hexdigest(), run_id).encoded())

    old_shards = shard_folders(path)
    write_atomically(path, save)
    for shards in old_shards:
        if shards.name != content.get(SHARDS, {}).get("name"):
            shutil.rmtree(shards)


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


def read_checkpoint(
    path: Path, mapped: bool = False, with_shards: bool = True, check: bool = True, trusted: bool = False
) -> Any:
    """Read a ``.pth`` of plain data, or the tensors of a ``.safetensors``, into CPU memory.

    Args:
        path: the file.
        mapped: map the file into memory, so that each tensor is read when it is used (torch 2.5 and later); the
            processes of a machine share the memory. For callers that copy what they need, and soon.
        with_shards: also read the shards beside the file; if false,
            :func:`exp.engine.checkpoint.shards.load_shards` reads them later.
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


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` files ``step_*.pth``, with their shards; at least one stays."""
    for path in list_checkpoints(folder)[max(keep, 1) :]:
        path.unlink()
        for shards in shard_folders(path):
            shutil.rmtree(shards)


def quarantine(paths: Sequence[Path]) -> None:
    """Move checkpoints into the folder :data:`QUARANTINE` beside them, in which no run looks for checkpoints."""
    for path in paths:
        folder = path.parent / QUARANTINE
        folder.mkdir(exist_ok=True)
        for source in [*shard_folders(path), path]:  # the file last: remove_leftovers deletes shards without a file
            if (folder / source.name).is_dir():
                shutil.rmtree(folder / source.name)  # from an earlier call, with the same step
            source.replace(folder / source.name)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and incomplete shards of a killed process. Call it only while no rank writes."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
    for path in folder.glob("*.shards*"):
        if not path.with_suffix(".pth").is_file():
            shutil.rmtree(path)
