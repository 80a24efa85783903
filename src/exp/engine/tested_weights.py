"""Which weights are the best, and which are tested once training has ended."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Mapping

from mmengine.hooks import Hook

from exp.engine import checkpoint, sharded

__all__ = ["TestedWeights"]

logger = logging.getLogger(__name__)


class TestedWeights(Hook):
    """The part of :class:`exp.engine.checkpoint_hook.CheckpointHook` that looks after ``best.pth``."""

    folder: Path
    keep_best: bool
    metric: str
    best: float | None
    best_epoch: int
    best_step: int | None
    last: float | None
    last_step: int | None
    source: Path | None
    _known: set[str]

    @property
    def best_path(self) -> Path:
        """Where the best weights lie."""
        return self.folder / "best.pth"

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}.pth"

    def take_over_best(self, runner: Any, source: Path) -> None:
        """After resuming, have the best weights so far in this folder, or forget how good they were. A collective.

        What is tested in the end has to be what the reported validation belongs to.

        Args:
            runner: the runner.
            source: the checkpoint that the run goes on from; the best weights lie beside it.
        """
        self.source = source
        if source.resolve().parent == self.folder.resolve():
            self._known.add(source.name)
        if self.keep_best and self.best is not None:
            trouble = None
            if runner.distributed_group.is_main:
                path = source.parent / self.best_path.name
                content, trouble = self._read_best(path)
                if trouble is None and path.absolute() != self.best_path.absolute():
                    runner.session.when_started(lambda: self._adopt(content))
            self._forget_if(runner, trouble)
        judged = self.best is not None if self.keep_best else self.last_step == runner.iter
        if not judged and runner.train_loop.finished:
            runner.train_loop.validation_due = True  # no step will bring one

    def _adopt(self, content: Any) -> None:
        sharded.adopt_best(content, self.folder)
        checkpoint.write(self.best_path, content)

    def tested(self, runner: Any) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
        """What is to be tested once training has ended. A collective.

        Returns:
            The checkpoint to load (None: the weights that the model has), and for ``result.json``: the file, its epoch
            and step, and the validation that belongs to these very weights (None where they have not been validated).
        """
        group = runner.distributed_group
        runner.checkpoint_writer.wait()
        group.barrier()  # rank 0 has written it
        if self.keep_best and self.best is not None:
            content, trouble = self._read_best(self.best_path) if group.is_main else (None, None)
            if not self._forget_if(runner, trouble):
                content = checkpoint.read(self.best_path, mapped=True, whole=False) if content is None else content
                meta = content["meta"]
                return content, self._record(f"{self.folder.name}/best.pth", meta["epoch"], meta["step"], self.best)
        step, content = runner.iter, None
        if runner.changes_checkpoints and self._path(step).is_file():
            content = checkpoint.read(self._path(step), mapped=True)  # such as the weights that a hook has averaged
        value = self.last if self.last_step == step else None
        return content, self._record(f"last weights, step {step}", runner.epoch, step, value)

    def _record(self, name: str, epoch: int, step: int, value: float | None) -> dict[str, Any]:
        return {
            "tested_checkpoint": name,
            "tested_epoch": int(epoch),
            "tested_step": int(step),
            "best_epoch": int(epoch),
            "validation": {self.metric: value},
        }

    def _read_best(self, path: Path) -> tuple[Any, str | None]:
        """The best weights in ``path``, or why they are not those that are remembered.

        Raises:
            CheckpointError: they are damaged: what was judged would be lost without a need.
        """
        if not path.is_file():
            return None, f"no checkpoint at {path}"
        content = checkpoint.read(path, whole=False)
        try:
            meta = content["meta"]
            found = (meta["epoch"], meta["step"], meta.get("validation", {}).get(self.metric, self.best))
        except (AttributeError, KeyError, TypeError):
            return None, f"{path} is not one of exp's checkpoints"
        wanted = (self.best_epoch, found[1] if self.best_step is None else self.best_step, self.best)
        if found != wanted:
            return None, f"{path} has those of step {found[1]} ({self.metric} {found[2]})"
        return content, None

    def _forget_if(self, runner: Any, trouble: str | None) -> bool:
        """Forget the best where rank 0 found trouble with it, on all ranks alike."""
        trouble = runner.distributed_group.gather(trouble)[0]
        if trouble is None:
            return False
        text = (
            f"the best weights so far ({self.metric} {self.best:.6g} after epoch {self.best_epoch}) are lost and no "
            f"longer count: {trouble}"
        )
        logger.warning(text)
        if runner.session.console is not None:
            runner.session.console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)
        self.best, self.best_epoch, self.best_step = None, 0, None
        return True
