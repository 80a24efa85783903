"""Checkpoint files: written so that none is ever half there, read so that none can run code.

A checkpoint is plain data (dicts, lists, numbers, strings, CPU tensors), so it opens under torch's restricted
unpickler, and so do those of other tools (:mod:`exp.engine.unpickle`). A file that needs more is refused; nothing is
ever retried without the guard.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, Callable, Container, Mapping, Sequence

import numpy as np
import torch

from exp.engine import shards
from exp.engine.unpickle import load_plain
from exp.errors import CheckpointError
from exp.hub import shards_of
from exp.runs.files import digest_of, write_atomically
from exp.runs.folder import CHECKPOINT_NAME

__all__ = [
    "NO_DIGEST",
    "SET_ASIDE",
    "digest_in",
    "list_checkpoints",
    "plain",
    "prune",
    "read",
    "remove_stale_temporaries",
    "set_aside",
    "step_of",
    "weights_of",
    "write",
]

NO_DIGEST = "it has no digest: whether it is as it was written is not known"
SET_ASIDE = "set_aside"
"""Folder below ``checkpoints/`` of what no run goes on from: damaged, foreign, or of steps that one went back from."""

_COMMENT = b"sha256 "
_NO_COMMENT = b"\0\0"  # where a zip archive without one ends: the length of its comment
_SEAL = len(_NO_COMMENT) + len(_COMMENT) + 64  # bytes at the end of a file that are not digested
_HOLDERS = ("state_dict", "model", "teacher", "student")
# torch.compile, FSDP and activation checkpointing wrap any module of a model, not only the whole.
_WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


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

    former = shards.companions(path)
    write_atomically(path, save)
    for each in former:
        if each.name != content.get(shards.BESIDE, {}).get("name"):
            shutil.rmtree(each)


class _Stream:
    """A file as ``torch.save`` needs it, which digests and writes what it is given piece by piece.

    torch would turn an error of the file system into one of its own, which does not say which it was.
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
        end = file.read()
    comment = end[len(_NO_COMMENT) :]
    return comment[len(_COMMENT) :].decode("ascii", "replace") if comment.startswith(_COMMENT) else None


def _check_digest(path: Path) -> None:
    """Raise a CheckpointError where a file is not as :func:`write` has left it."""
    written = digest_in(path)
    if written is not None and digest_of(path, _SEAL, _NO_COMMENT) != written:
        raise CheckpointError(f"{path} is damaged: its digest is not that of what it holds; remove it, or use another")


def read(path: Path, mapped: bool = False, whole: bool = True, check: bool = True) -> Any:
    """Read a ``.pth`` of plain data, or the tensors of a ``.safetensors``, onto the CPU.

    Args:
        path: the file.
        mapped: read each tensor when it is used, where torch can (>= 2.5): for who needs the weights of a file alone,
            and does not need them for long. Processes of one machine share the memory.
        whole: with the tensors of a sharded training, which lie beside the file; else
            :func:`exp.engine.shards.complete` brings them.
        check: compare digests, also of what lies beside the file; not needed where another rank has done it.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it holds more than plain data.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}; check resume and init_from")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        if path.name.endswith(".safetensors.index.json"):
            return _of_shards(path)
        if check:
            _check_digest(path)
        content = shards.opened(path, load_plain(path, mapped), check)
        return shards.complete(content, state=not mapped) if whole and shards.BESIDE in content else content
    except CheckpointError:
        raise
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        lines = str(error).strip().splitlines()
        said = lines[0][:200] if lines else type(error).__name__
        raise CheckpointError(
            f"cannot read the checkpoint {path}: {said}\n"
            "Only plain tensors and containers are loaded; a file that needs more could run code. "
            "Save foreign weights as model.state_dict() or as .safetensors."
        ) from error


def _of_shards(index: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files that an index lists, which lie beside it."""
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for name in shards_of(index):
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} lists {name}, which is not beside it; fetch all files of the weights")
        state.update(load_file(str(index.parent / name)))
    return state


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


def prune(folder: Path, keep: int, known: Container[str]) -> None:
    """Remove all but ``keep`` of the ``step_*.pth``: the newest of those that are known to open, then the newest.

    Args:
        folder: ``checkpoints/``.
        keep: at least one stays.
        known: names of those that this attempt has written or read.
    """
    ranked = sorted(list_checkpoints(folder), key=lambda path: path.name in known, reverse=True)  # newest first in each
    for path in ranked[max(keep, 1) :]:
        shards.remove(path)


def set_aside(paths: Sequence[Path]) -> None:
    """Move files into the folder :data:`SET_ASIDE` beside them, where nothing takes them for checkpoints."""
    for path in paths:
        place = path.parent / SET_ASIDE
        place.mkdir(exist_ok=True)
        for each in [*shards.companions(path), path]:  # without the file what lies beside it counts for nothing
            if (place / each.name).is_dir():
                shutil.rmtree(place / each.name)  # set aside before, of the same step
            each.replace(place / each.name)


def remove_stale_temporaries(folder: Path) -> None:
    """Remove what a killed writer left behind. Only call it while no rank writes."""
    if folder.is_dir():
        for path in folder.glob(".*.tmp"):
            path.unlink()
        shards.remove_orphans(folder)


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
        if isinstance(state, Mapping) and state and all(isinstance(value, torch.Tensor) for value in state.values()):
            return _without_wrappers(state)
        holders = [key for key in _HOLDERS if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)]
        if not holders:
            break
        state = state[holders[0]]
    names = f"; it has the keys {', '.join(map(str, list(state)[:8]))}" if isinstance(state, Mapping) else ""
    raise CheckpointError(
        f"{source or 'the checkpoint'} holds no state dict: expected tensors by name, or under one of "
        f"{', '.join(_HOLDERS)}{names}"
    )


def _without_wrappers(state: Mapping[str, torch.Tensor]) -> OrderedDict[str, torch.Tensor]:
    plain_names = OrderedDict((_WRAPPER.sub("", key), value) for key, value in state.items())
    while all(key.startswith("module.") for key in plain_names):  # of DDP and DataParallel, round the whole model
        plain_names = OrderedDict((key[len("module.") :], value) for key, value in plain_names.items())
    return plain_names
