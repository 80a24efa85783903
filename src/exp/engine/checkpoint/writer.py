"""Writes checkpoints: plain data, atomically, with a digest, in the background while training continues.

Between two training steps the state is copied to host memory, page-locked if the backend supports it. A thread writes
the copy. How the files look is in :mod:`exp.engine.checkpoint.reader`.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import shutil
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from exp.engine.checkpoint.reader import SHARDS, copy_containers, folder_digests, shard_folders, short_reason
from exp.engine.fsdp import dtensor_like
from exp.errors import RunError
from exp.runs.files import NO_COMMENT, NO_RUN_ID, Seal, write_atomically
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from exp.distributed import Distributed
    from exp.hardware.backend import Backend

logger = logging.getLogger(__name__)


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

    def __init__(self, backend: Backend, group: Distributed, sharded: bool = False, run_id: str = NO_RUN_ID) -> None:
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
            files: the content of each file (see :func:`exp.engine.checkpoint.writer.plain_copy`).
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
            rest, holders = copy_containers(content) if self._group is not None else (content, {})
            parts = {}
            for prefix, holder in holders.items():
                for name in [name for name, value in holder.items() if hasattr(value, "full_tensor")]:
                    value = holder.pop(name)
                    parts[f"{prefix}/{name}"] = dtensor_like(copied(value.to_local()), value, self._mesh)
            copies[path] = plain_copy(rest, copied) if self._is_main else {}, parts
        self._backend.synchronize()
        self._saving = self._pool.submit(self._write, copies, then)

    def _write(self, files: Mapping[Path, Any], then: Callable[[], object] | None) -> None:
        for path, (content, parts) in files.items():
            try:
                shards = {} if self._group is None else {SHARDS: self._write_parts(path, parts)}
                if self._is_main:
                    write_checkpoint(path, {**content, **shards}, self._run_id)
            except OSError as error:
                error.filename = error.filename or str(path)  # raised later, in a step that does not know the path
                raise
        if then is not None and self._is_main:
            then()

    def _write_parts(self, path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Write DTensors into a new folder, since the former one is still in use. A collective of the writing threads.

        Returns:
            What the checkpoint keeps of the folder (:data:`exp.engine.checkpoint.reader.SHARDS`).
        """
        import torch.distributed.checkpoint as dcp

        free = (path.with_name(f"{path.stem}.shards{number}") for number in itertools.count())
        names = [next(candidate for candidate in free if not candidate.exists()).name if self._is_main else ""]
        dist.broadcast_object_list(names, src=0, group=self._group)
        folder = path.with_name(names[0])
        try:
            dcp.save(dict(parts), storage_writer=dcp.FileSystemWriter(str(folder)), process_group=self._group)
        except dcp.CheckpointException as error:
            rank, (cause, _) = min(error.failures.items())
            raise RunError(f"rank {rank}: cannot write {folder}: {short_reason(cause)}") from error
        return {"name": folder.name, "digests": folder_digests(folder)} if self._is_main else {}

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
