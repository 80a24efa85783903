"""Writes checkpoints in the background, while training continues.

Between two training steps the state is copied to host memory, page-locked if the backend supports it. A thread writes
the copy.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping

import torch
import torch.distributed as dist

from exp.engine.checkpoint.files import plain_copy, write_checkpoint
from exp.engine.checkpoint.shards import SHARDS, copy_containers, folder_digests, short_reason
from exp.engine.fsdp import dtensor_like
from exp.errors import RunError
from exp.runs.files import NO_RUN_ID
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from exp.distributed import Distributed
    from exp.hardware.backend import Backend


logger = logging.getLogger(__name__)


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
            files: the content of each file (see :func:`exp.engine.checkpoint.files.plain_copy`).
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
            What the checkpoint keeps of the folder (:data:`exp.engine.checkpoint.shards.SHARDS`).
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
