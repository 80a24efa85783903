"""Saving a model that no rank has whole, while training goes on.

The ranks agree on who writes what; that is the only collective, and small. Then each trains on, and a thread of each
(:mod:`exp.engine.checkpoint_writer`) writes a copy of that rank's part and reports to rank 0, through the store of the
process group: a collective in a thread could meet one of the training. Rank 0's thread, when it has heard of all,
writes what makes the parts one, and last the plain file, without which they count for nothing.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

from exp.engine import checkpoint
from exp.engine import sharded_files as files
from exp.engine.distributed import Distributed
from exp.engine.sharded import BESIDE, key_of, sharded_tensors, without_sharded
from exp.errors import RunError

__all__ = ["ShardedSaver"]

_POLL = 0.02  # s
_GIVE_UP = 30.0  # s


class ShardedSaver:
    """Prepares checkpoints that each rank writes a part of.

    Args:
        group: of all ranks.
        closing: set once training has ended, for whatever reason: of ranks that are gone nobody hears any more.
    """

    def __init__(self, group: Distributed, closing: threading.Event) -> None:
        self._group = group
        self._closing = closing
        self._form: Any = None
        self._plan: Any = None
        self._count = 0

    def training(self, path: Path, content: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path, Any], None]]:
        """Agree on the files of a training checkpoint: torch's distributed checkpoint beside the plain file.

        A collective. The checkpoint before has to be on the disk.

        Args:
            path: where the plain file will be.
            content: of :meth:`exp.engine.checkpointing.CheckpointingRunner.training_checkpoint`.

        Returns:
            What this rank keeps of it, and what writes a copy of that; for :class:`CheckpointWriter`.
        """
        group = self._group
        tensors = {key_of(place): value for place, value in sharded_tensors(content)}
        form = [(key, tuple(value.shape), value.dtype) for key, value in tensors.items()]
        name = None
        if group.is_main:  # a new one: the former file of this step stays good until the new one is there
            taken = {each.name for each in path.parent.glob(f"{path.stem}.shards*")}
            name = next(name for name in (f"{path.stem}.shards{n}" for n in range(len(taken) + 1)) if name not in taken)
        answers = group.gather((name, form == self._form))
        folder = path.parent / answers[0][0]
        if not all(same for _, same in answers):
            self._plan, self._form = files.plan_shards(folder, tensors, group), form
        plan, reports = self._plan, self._reports()
        kept = {"part": {key: value.to_local() for key, value in tensors.items()}}
        if group.is_main:
            kept["plain"] = without_sharded(content)

        def write(path: Path, copied: Mapping[str, Any]) -> None:
            with reports.of_failure(folder):
                own = files.write_part(folder, plan, copied["part"])
            if not group.is_main:
                reports.send(own)
                return
            files.write_index(folder, plan, [own, *reports.received()])
            beside = {"name": folder.name, "digests": files.digests(folder)}
            checkpoint.write(path, {**copied["plain"], BESIDE: beside})

        return kept, write

    def best(self, path: Path, content: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Path, Any], None]]:
        """Prepare one plain ``.safetensors`` beside ``path``, which rank 0 puts together from files of all ranks.

        No rank ever has it whole in memory. No collective.

        Args:
            path: ``best.pth``.
            content: of :meth:`exp.engine.checkpointing.CheckpointingRunner.weights_checkpoint`, on every rank.

        Returns:
            As :meth:`training` does.

        Raises:
            RunError: a tensor has a dtype that the format lacks.
        """
        group, weights = self._group, content["state_dict"]
        file = path.with_name(f"{path.stem}_{content['meta']['step']:08d}.safetensors")
        header = files.header(file, weights)
        rows = {name: value.shape[0] for name, value in weights.items() if hasattr(value, "to_local")}
        part = {name: value.to_local() if name in rows else value for name, value in weights.items()}
        kept = {"part": {name: value for name, value in part.items() if group.is_main or name in rows}}
        if group.is_main:
            kept["plain"] = {**content, "state_dict": {}}
        reports = self._reports()
        of_rank = [file.with_name(f".{file.name}.rank{rank}.tmp") for rank in range(group.world_size)]

        def write(path: Path, copied: Mapping[str, Any]) -> None:
            if not group.is_main:
                own = of_rank[group.rank]
                with reports.of_failure(own):
                    files.write_rows(own, copied["part"])
                reports.send(None)
                return
            reports.received()
            files.put_together(file, header, copied["part"], rows, of_rank[1:])
            beside = {"name": file.name, "digests": files.digests(file)}
            checkpoint.write(path, {**copied["plain"], BESIDE: beside})

        return kept, write

    def _reports(self) -> _Reports:
        self._count += 1
        return _Reports(self._group, f"checkpoint/{self._count}", self._closing)


class _Reports:
    """What the other ranks' threads tell rank 0's of one checkpoint."""

    def __init__(self, group: Distributed, name: str, closing: threading.Event) -> None:
        self._group, self._name, self._closing = group, name, closing

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"

    def send(self, value: Any, trouble: str | None = None) -> None:
        """Report that this rank's part is on the disk, or why it is not."""
        store: Any = self._group.store
        store.set(self._key(self._group.rank), pickle.dumps((trouble, value)))

    @contextlib.contextmanager
    def of_failure(self, path: Path) -> Iterator[None]:
        """Report what goes wrong, so that rank 0 does not wait.

        Raises:
            RunError: in the place of what went wrong; it names ``path``.
        """
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            trouble = f"cannot write {path}: {lines[0][:200]}"
            if not self._group.is_main:
                self.send(None, trouble)
            raise RunError(trouble) from error

    def received(self) -> list[Any]:
        """Wait for the reports of all other ranks, and give them by rank.

        Raises:
            RunError: a rank could not write its part, or is gone.
        """
        found = []
        for rank in range(1, self._group.world_size):
            trouble, value = files.unpickled(self._wait_for(rank))
            if trouble is not None:
                raise RunError(f"rank {rank}: {trouble}")
            found.append(value)
        return found

    def _wait_for(self, rank: int) -> bytes:
        store: Any = self._group.store
        key, closed_for = self._key(rank), 0.0
        while not store.check([key]):
            closed_for += _POLL if self._closing.is_set() else 0.0
            if closed_for > _GIVE_UP:
                raise RunError(f"the last checkpoint is not saved: nothing is heard of the part of rank {rank}")
            time.sleep(_POLL)
        report: bytes = store.get(key)
        store.delete_key(key)
        return report
