"""Saving, resuming and testing as part of the runner: plain data, exact continuation, MMEngine's order of hooks."""

from __future__ import annotations

import copy
import functools
import logging
from typing import TYPE_CHECKING, Any, Mapping

import torch
from mmengine.hooks import ParamSchedulerHook
from mmengine.runner import Runner as MMEngineRunner

from exp.config.resuming import of_training, trains_on
from exp.engine import rng
from exp.engine.batchnorm import average_buffers
from exp.engine.checkpoint import plain
from exp.engine.checkpoint_writer import CheckpointWriter
from exp.engine.fsdp import is_sharded
from exp.engine.resume import carry_over, changes_course, saved_order
from exp.engine.sharded import complete
from exp.engine.sharded_save import ShardedSaver
from exp.engine.wrapper import unwrapped
from exp.errors import CheckpointError, ConfigError, RunError

if TYPE_CHECKING:
    from pathlib import Path

    from exp.backend import Backend
    from exp.engine.distributed import Distributed
    from exp.session import Session

__all__ = ["CheckpointingRunner"]

logger = logging.getLogger(__name__)

# What RuntimeInfoHook and IterTimerHook write into the message hub anew; the rest is state of the user's hooks.
_RUNTIME_INFO = {"cfg", "seed", "experiment_name", "mmengine_version", "dataset_meta", "loop_stage", "epoch", "iter",
                 "max_epochs", "max_iters", "eta"}  # fmt: skip


class CheckpointingRunner(MMEngineRunner):
    """The part of :class:`exp.engine.runner.Runner` that has to do with checkpoints."""

    session: Session
    backend: Backend
    distributed_group: Distributed

    _resume_point: tuple[Mapping[str, Any], Path, Any] | None = None
    _to_test: Mapping[str, Any] | None = None
    _before_validation: dict[str, Any] | None = None

    @functools.cached_property
    def checkpoint_writer(self) -> CheckpointWriter:
        """Writes checkpoints in the background; in use on rank 0, and on all where the model is sharded."""
        return CheckpointWriter(self.backend)

    @functools.cached_property
    def sharded_saver(self) -> ShardedSaver | None:
        """Prepares what each rank writes; None: rank 0 writes all."""
        sharded = is_sharded(unwrapped(self.model))
        return ShardedSaver(self.distributed_group, self.checkpoint_writer.closing) if sharded else None

    def _has_hooks_at(self, *stages: str) -> bool:
        """Whether hooks that are not the engine's own do something at one of the stages."""
        return any(
            not type(hook).__module__.startswith("exp.engine.")
            and not set(stages).isdisjoint(hook.get_triggered_stages())
            for hook in self.hooks
        )

    # -- the same model on every rank -------------------------------------------------------------------------------

    def average_buffers(self) -> None:
        """Average running statistics over ranks: those of the model, and of copies that hooks keep. A collective."""
        if self.world_size > 1:
            held = [value for hook in self.hooks for value in vars(hook).values() if isinstance(value, torch.nn.Module)]
            average_buffers([unwrapped(self.model), *held], self.distributed_group)

    def prepare_validation(self) -> None:
        """Called before the hooks of a validation, some of which replace the weights until its end. A collective."""
        if self.train_loop is None:
            return
        self.average_buffers()
        if self._has_hooks_at("before_val", "before_val_epoch", "before_val_iter"):
            # A checkpoint of a validation that is cut short has to hold the weights of the training.
            content = self.training_checkpoint(self.iter, {})
            if self.distributed_group.is_main or self.sharded_saver is not None:
                unchanged = ("optimizer", "param_schedulers", "rng")
                content = {
                    key: value if key in unchanged else copy.deepcopy(plain(value)) for key, value in content.items()
                }
            self._before_validation = content

    def end_validation(self) -> None:
        """Called after the hooks of a validation."""
        self._before_validation = None

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def resume_from(self, content: Mapping[str, Any], source: Path, checkpoint_hook: Any) -> None:
        """Have :meth:`train` continue from a training checkpoint, once loops and schedulers are built."""
        self._resume_point = (content, source, checkpoint_hook)
        self._resume = True  # MMEngine's hooks ask for it by this name

    def test_with(self, content: Mapping[str, Any] | None) -> dict[str, float]:
        """Test the weights of a checkpoint, or those that the model has; the hooks' stages as in MMEngine."""
        self._to_test, self._resume = content, False
        metrics: dict[str, float] = self.test()
        return metrics

    def load_or_resume(self) -> None:
        """Load what :meth:`resume_from` or :meth:`test_with` was given, between ``before_run`` and the loop.

        Weights to start from are loaded before wrapping.
        """
        if self._resume_point is not None:
            content, source, checkpoint_hook = self._resume_point
            checkpoint_hook.load_state_dict(self.restore(content, str(source)))
            checkpoint_hook.take_over_best(self, source)
            self._resume_point = None
        elif self._to_test is not None:
            content = complete(self._to_test, unwrapped(self.model))
            self.call_hook("after_load_checkpoint", checkpoint=content)
            unwrapped(self.model).load_state_dict(content["state_dict"])
            self._to_test = None

    @functools.cached_property
    def weights_wait_for_update(self) -> bool:
        """Whether trained parameters remain as they are between two updates: neither model nor hooks change them."""
        foreign = [hook for hook in self.hooks if not type(hook).__module__.startswith("exp.engine.")]
        steady = getattr(unwrapped(self.model), "changed_by_optimizer_alone", False)
        return steady and all(isinstance(hook, ParamSchedulerHook) for hook in foreign)

    @property
    def changes_checkpoints(self) -> bool:
        """Whether checkpoints may hold other weights than the model: hooks have a say in them."""
        return self._has_hooks_at("before_save_checkpoint")

    def weights_checkpoint(self) -> dict[str, Any]:
        """The model's weights as the hooks want them kept, where they come from, and what of the data belongs to them.

        For rank 0.
        """
        content = self._weights(self.iter)
        self._let_hooks_change(content)
        return content

    def _weights(self, step: int) -> dict[str, Any]:
        content = {"meta": self._meta(step), "state_dict": unwrapped(self.model).state_dict()}
        if self.session.data_state is not None:
            content["data"] = self.session.data_state
        if self.session.data_files is not None:
            content["data_files"] = self.session.data_files
        content["config"] = of_training(self.session.config)
        return content

    def _infos_of_hooks(self) -> dict[str, Any]:
        """What hooks keep in the message hub and want resumed, as far as it is plain data."""
        infos = {}
        for key, value in self.message_hub.state_dict()["runtime_info"].items():
            if key not in _RUNTIME_INFO:
                try:
                    infos[key] = plain(value)
                except TypeError as error:
                    logger.warning("message hub: %s is not resumed: %s", key, error)
        return infos

    def _let_hooks_change(self, content: dict[str, Any]) -> None:
        """Call ``before_save_checkpoint``, and note which hooks have put weights of their own in the model's place.

        Raises:
            RunError: a hook has added what is not plain data.
        """
        before, hooks = dict(content["state_dict"]), self.hooks_that_save()
        self.call_hook("before_save_checkpoint", checkpoint=content)
        try:
            plain(content if hooks else {}, lambda tensor: tensor)
        except TypeError as error:
            raise RunError(
                f"hooks: before_save_checkpoint of {', '.join(hooks)}: {error}; give it numbers, strings, lists, dicts "
                "and tensors; see docs/hooks.md"
            ) from error
        after = content["state_dict"]
        if any(after.get(key) is not value for key, value in before.items()):
            content["meta"]["weights_of_hooks"] = hooks

    def hooks_that_save(self) -> list[str]:
        """The classes of the user's hooks that may change a checkpoint."""
        hooks = [hook for hook in self.hooks if "before_save_checkpoint" in hook.get_triggered_stages()]
        return [type(hook).__name__ for hook in hooks if not type(hook).__module__.startswith("exp.engine.")]

    def training_checkpoint(self, step: int, best: Mapping[str, Any], validation_due: bool = False) -> dict[str, Any]:
        """All that an exact continuation needs. A collective: every rank's random state is in it.

        Args:
            step: optimizer steps completed.
            best: what the checkpoint hook knows of the epochs so far.
            validation_due: whether a validation is to be made before training goes on.
        """
        if validation_due and self._before_validation is not None:
            content = dict(self._before_validation)
            content["meta"] = {**content["meta"], "validation_due": True}
            content["best"] = dict(best)
            return content
        self.average_buffers()
        content = self._weights(step)
        content["meta"]["validation_due"] = validation_due
        content["optimizer"] = self.optim_wrapper.state_dict()
        content["param_schedulers"] = [scheduler.state_dict() for scheduler in self.param_schedulers or []]
        content["rng"] = self.distributed_group.gather(rng.rng_state(self.backend))
        content["best"] = dict(best)
        content["message_hub"] = self._infos_of_hooks()
        if self.distributed_group.is_main:  # as in MMEngine: they may write files
            self._let_hooks_change(content)
        return content

    def _trained(self) -> list[torch.nn.Parameter]:
        """The parameters in the order in which the optimizer's state counts them."""
        return [parameter for group in self.optim_wrapper.optimizer.param_groups for parameter in group["params"]]

    def _meta(self, step: int) -> dict[str, Any]:
        trains = self.train_loop is not None
        return {
            "format": 1,
            "experiment": self.session.config.name,
            "step": step,
            "iter": step,  # as MMEngine's hooks call it
            "epoch": self.epoch if trains else 0,
            "samples": self.train_loop.sampler.samples if trains else 0,
            "steps_per_epoch": self.train_loop.steps_per_epoch if trains else 0,
            "stopped": self.train_loop.stop_training if trains else False,
            "global_batch_size": self.session.config.global_batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
        }

    def restore(self, content: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Continue from a training checkpoint.

        Args:
            content: what :meth:`training_checkpoint` gave; :func:`exp.engine.resume.find_checkpoint` has looked at it.
            source: where it was read, for messages.

        Returns:
            What the checkpoint hook knew.

        Raises:
            CheckpointError: it does not fit this model.
            ConfigError: it was trained with another global batch size or seed: the data order would not continue; or
                optimizer and schedule cannot go on with their new settings.
        """
        meta = content["meta"]
        for key, mine in (("global_batch_size", self.session.config.global_batch_size), ("seed", self.seed)):
            if meta[key] != mine:
                raise ConfigError(
                    f"resume: {source} was trained with {key}={meta[key]}, this run has {mine}; set {key}={meta[key]}"
                )
        lacking = sorted(set(meta.get("weights_of_hooks", ())) - set(self.hooks_that_save()))
        if lacking:
            raise ConfigError(
                f"resume: {source} was trained with the hooks {', '.join(lacking)}, which put weights of their own "
                "into the checkpoint; set hooks as it was, or start from its weights with init_from"
            )
        schedulers: Any = self.param_schedulers or []
        per_epoch = self.train_loop.steps_per_epoch
        other_epochs = meta.get("steps_per_epoch", per_epoch) != per_epoch
        changed = changes_course(self.session.changed, schedulers, other_epochs)
        content = complete(content, unwrapped(self.model), saved_order(self, content) if changed else self._trained())
        self.call_hook("after_load_checkpoint", checkpoint=content)
        for key, value in content.get("message_hub", {}).items():
            self.message_hub.update_info(key, value)
        try:
            unwrapped(self.model).load_state_dict(content["state_dict"])
        except RuntimeError as error:
            raise CheckpointError(f"{source} does not fit the model of this run: {error}") from error
        samples = min(meta["samples"], per_epoch * meta["global_batch_size"])  # an epoch of other data may be shorter
        self.train_loop.restore(meta["epoch"], meta["step"], samples, meta.get("validation_due", False))
        if changed:
            carry_over(self, content)
        else:
            self.optim_wrapper.load_state_dict(content["optimizer"])
            for scheduler, state in zip(schedulers, content["param_schedulers"]):
                scheduler.load_state_dict(state)
        if meta.get("stopped") and not trains_on(self.session.changed):
            self.train_loop.stop_training = True
            self.session.say("resume: this training was stopped early; with a larger patience it would go on")
        states = content["rng"]
        if self.world_size == len(states):
            rng.set_rng_state(states[self.rank], self.backend)
        else:
            rng.seed_everything(self.session.config.seed + self.rank + 1000003 * meta["step"], self.backend)
            logger.warning("resumed at world size %d, not %d: random states start anew", self.world_size, len(states))
        return dict(content["best"])
