"""MMEngine's Runner, with what it hard-wires to one vendor handed over to the backend.

Overridden: environment set-up (the process group exists already), model placement and wrapping, logging to the rank's
own file, and checkpoints (plain data, exact resume). Everything else - hooks, schedulers, visualisers - is MMEngine's;
docs/mmengine.md draws the line. The loops go in as any custom loop does, by ``train_cfg``, ``val_cfg``, ``test_cfg``.
"""

from __future__ import annotations

import copy
import functools
import logging
from typing import TYPE_CHECKING, Any, Callable, Mapping

import mmengine
import torch
from mmengine.config import Config
from mmengine.hooks import Hook, ParamSchedulerHook
from mmengine.logging import MMLogger
from mmengine.runner import Runner as MMEngineRunner
from omegaconf import OmegaConf

from exp.config.differences import of_training
from exp.engine import checkpoint, rng, schedule
from exp.engine.batchnorm import average_buffers, fit_batchnorm
from exp.engine.checkpoint import plain
from exp.engine.fsdp import is_sharded
from exp.engine.losses import LossMeter
from exp.engine.placement import check_optimizer, check_placement, placement_report
from exp.engine.resume import restore
from exp.engine.saving import CheckpointHook, CheckpointWriter
from exp.engine.shards import ShardedSaver, complete
from exp.engine.stock_hooks import RuntimeInfoHook
from exp.engine.wrapper import unwrapped, wrap_as_configured
from exp.errors import ConfigError, RunError
from exp.raised import first_line

if TYPE_CHECKING:
    from pathlib import Path

    from exp.session import Session

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

# What RuntimeInfoHook and IterTimerHook write into the message hub anew; the rest is state of the user's hooks.
_RUNTIME_INFO = {"cfg", "seed", "experiment_name", "mmengine_version", "dataset_meta", "loop_stage", "epoch", "iter",
                 "max_epochs", "max_iters", "eta"}  # fmt: skip
# Ours take their place: they read a loss from the device at every step, pickle objects, or print at length.
_DISABLED_HOOKS = dict.fromkeys(["timer", "sampler_seed", "logger", "checkpoint"])


class _StartHook(Hook):
    """Says that the run has started, and is gone: it costs no step but the first."""

    priority = "HIGHEST"  # before anything is written of that step

    def _begin(self, runner: Any) -> None:
        runner.session.begin()
        runner.unregister_hook(self)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """The first step is done: what it needs of memory is there."""
        self._begin(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """A continued run may begin with a validation."""
        self._begin(runner)

    def after_train(self, runner: Any) -> None:
        """Or have no step left."""
        self._begin(runner)

    def before_test_epoch(self, runner: Any) -> None:
        """Or with the test; ranks may have different numbers of its batches, so before the first."""
        self._begin(runner)


class Runner(MMEngineRunner):
    """Runs one experiment on the session's device.

    Args:
        session: gives device, backend, group, config and run folder.
        model: on the CPU; placed and wrapped here.
        **kwargs: MMEngine's Runner's arguments.
    """

    sharded_saver: ShardedSaver | None = None
    """Writes this rank's part of a model that is sharded; None: rank 0 writes all."""

    _load: Callable[[], None] | None = None
    _before_validation: dict[str, Any] | None = None

    def __init__(self, session: Session, model: torch.nn.Module, **kwargs: Any) -> None:
        self.session = session
        self.device = session.device
        self.backend = session.backend
        self.distributed_group = session.distributed
        self.precision = session.config.precision
        self.losses = LossMeter()
        self._calls: dict[str, list[Any]] = {}
        self._built_loop: Any = None
        content: Any = OmegaConf.to_container(session.config, resolve=True)
        del content["compile"]  # MMEngine's key of that name compiles the train_step of a wrapped model
        kwargs["custom_hooks"] = [_StartHook(), *(kwargs.get("custom_hooks") or [])]
        super().__init__(
            model=model,
            work_dir=str(session.folder.path),
            default_hooks={
                **_DISABLED_HOOKS,
                "runtime_info": RuntimeInfoHook(),
                "param_scheduler": ParamSchedulerHook(),
            },
            default_scope="mmengine",
            randomness={"seed": session.config.seed},
            experiment_name=session.unique_name,
            cfg=Config(content),
            **kwargs,
        )

    # -- what MMEngine ties to one vendor ---------------------------------------------------------------------------

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        """The session has set all up; MMEngine would call its vendor's set_device here."""
        del env_cfg
        self._timestamp = "logs"  # MMEngine makes the folder work_dir/<timestamp>; ours is called logs

    def set_randomness(self, seed: int, diff_rank_seed: bool = False, deterministic: bool = False) -> None:
        """The session has seeded everything before the data and the model were built."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.distributed_group.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.distributed_group.world_size

    @property
    def distributed(self) -> bool:
        """Whether there are several."""
        return self.world_size > 1

    @property
    def seed(self) -> int:
        """``seed`` of the configuration; generators of rank n began with seed + n."""
        return int(self.session.config.seed)

    @property
    def deterministic(self) -> bool:
        """Whether torch was told to use deterministic algorithms alone."""
        return torch.are_deterministic_algorithms_enabled()

    def wrap_model(self, model_wrapper_cfg: dict[str, Any] | None, model: torch.nn.Module) -> torch.nn.Module:
        """Place the model on the rank's device, check that it is there wholly, and wrap it."""
        config = self.session.config
        if not is_sharded(model):
            model, warning = fit_batchnorm(model, self.backend, config.wrapper.sync_batchnorm and self.distributed)
            if warning and self.session.console is not None:
                self.session.console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
            model = model.to(self.device)
        check_placement(model, self.device, self.rank)
        if isinstance(self.optim_wrapper, mmengine.optim.OptimWrapper):
            check_optimizer(model, self.optim_wrapper.optimizer, self.rank)
        if config.report_placement:
            info = self.session.info
            logger.info(
                placement_report(
                    model, self.device, self.rank, info.local_rank, self.world_size, self.session.process_group
                )
            )
        if not self.distributed or self.optim_wrapper is None:
            return model  # evaluation runs the bare module: its ranks may have different numbers of batches
        return wrap_as_configured(model, config.wrapper, self.backend, self.device)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @functools.cached_property
    def checkpoint_writer(self) -> CheckpointWriter:
        """Writes checkpoints in the background; in use on ranks that write."""
        return CheckpointWriter(self.backend)

    def prepare_saving(self) -> None:
        """Called before training. A collective."""
        if is_sharded(unwrapped(self.model)):
            self.sharded_saver = ShardedSaver(self.distributed_group, checkpoint.write)

    @property
    def writes(self) -> bool:
        """Whether this rank writes something of a checkpoint."""
        return self.distributed_group.is_main or self.sharded_saver is not None

    def _foreign_hooks(self, *stages: str) -> list[Hook]:
        """The hooks that are not the engine's own and do something at one of the stages."""
        return [
            hook
            for hook in self.hooks
            if not type(hook).__module__.startswith("exp.engine.")
            and not set(stages).isdisjoint(hook.get_triggered_stages())
        ]

    def hooks_that_save(self) -> list[str]:
        """The classes of the user's hooks that may change a checkpoint, its weights included."""
        return [type(hook).__name__ for hook in self._foreign_hooks("before_save_checkpoint")]

    @functools.cached_property
    def weights_wait_for_update(self) -> bool:
        """Whether trained parameters remain as they are between two updates: neither model nor hooks change them."""
        steady = getattr(unwrapped(self.model), "changed_by_optimizer_alone", False)
        return steady and all(isinstance(hook, ParamSchedulerHook) for hook in self._foreign_hooks(*Hook.stages))

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
        if self._foreign_hooks("before_val", "before_val_epoch", "before_val_iter"):
            # A checkpoint of a validation that is cut short has to hold the weights of the training.
            content = self.training_checkpoint(self.iter, {})
            if self.writes:
                changed = {key: content[key] for key in content if key not in ("optimizer", "param_schedulers", "rng")}
                content.update(copy.deepcopy(plain(changed)))
            self._before_validation = content

    def end_validation(self) -> None:
        """Called after the hooks of a validation."""
        self._before_validation = None

    def resume_from(self, content: Mapping[str, Any], source: Path, checkpoint_hook: CheckpointHook) -> None:
        """Have :meth:`train` continue from a training checkpoint, once loops and schedulers are built."""

        def load() -> None:
            checkpoint_hook.load_state_dict(restore(self, content, source))
            checkpoint_hook.take_over_best(self, source)

        self._load, self._resume = load, True  # MMEngine's hooks ask for the latter by this name

    def test_with(self, content: Mapping[str, Any] | None) -> dict[str, float]:
        """Test the weights of a checkpoint, or those that the model has; the hooks' stages as in MMEngine."""

        def load() -> None:
            model = unwrapped(self.model)
            whole = complete(content or {}, model)
            self.call_hook("after_load_checkpoint", checkpoint=whole)
            model.load_state_dict(whole["state_dict"])

        self._load, self._resume = None if content is None else load, False
        metrics: dict[str, float] = self.test()
        return metrics

    def load_or_resume(self) -> None:
        """Load what :meth:`resume_from` or :meth:`test_with` was given, between ``before_run`` and the loop.

        Weights to start from are loaded before wrapping.
        """
        if self._load is not None:
            self._load()
            self._load = None

    def weights_checkpoint(self) -> dict[str, Any]:
        """The model's weights as the hooks want them kept, where they come from, and what of the data belongs to them.

        For ranks that write.
        """
        content = self._weights(self.iter)
        self._let_hooks_change(content)
        return content

    def _weights(self, step: int) -> dict[str, Any]:
        session = self.session
        content: dict[str, Any] = {"meta": self._meta(step), "state_dict": unwrapped(self.model).state_dict()}
        found = {"data": session.data_state, "data_files": session.data_files}
        content.update((key, value) for key, value in found.items() if value is not None)
        content["config"] = of_training(session.config)
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

    def _meta(self, step: int) -> dict[str, Any]:
        loop = self.train_loop
        return {
            "format": 1,
            "experiment": self.session.config.name,
            "step": step,
            "iter": step,  # as MMEngine's hooks call it
            "epoch": self.epoch,
            "samples": loop.sampler.samples,
            "steps_per_epoch": loop.steps_per_epoch,
            "stopped": loop.stop_training,
            "global_batch_size": self.session.config.global_batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
        }

    # -- less noise -------------------------------------------------------------------------------------------------

    def build_logger(self, log_level: int | str = "INFO", log_file: str | None = None, **kwargs: Any) -> MMLogger:
        """MMEngine's logger, writing to the log of the rank instead of the terminal."""
        del log_file, kwargs
        mm_logger = MMLogger.get_instance(self.experiment_name, log_level=log_level)
        mm_logger.handlers[:] = list(logging.getLogger().handlers)
        mm_logger.setLevel(log_level)
        return mm_logger

    def _log_env(self, env_cfg: dict[str, Any]) -> None:
        """``env.json`` has it."""

    def dump_config(self) -> None:
        """``config.yaml`` has it."""

    def _init_model_weights(self) -> None:
        """Models initialise themselves when they are built; only MMEngine's ``init_cfg`` is left to do here.

        Weights of ``init_from`` are in the model already, and stay.
        """
        modules = unwrapped(self.model).modules()
        if self.session.weights is None and any(getattr(module, "init_cfg", None) for module in modules):
            if is_sharded(unwrapped(self.model)):
                raise ConfigError(
                    "model: init_cfg draws weights once the model is wrapped, and with wrapper=fsdp no rank has them "
                    "whole then; initialise them in its constructor, or use wrapper=ddp"
                )
            super()._init_model_weights()

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build the schedulers; an epoch is its optimizer steps, however many micro-batches those take.

        Raises:
            ConfigError: one is unknown, does not take its settings, or would do something else than it says.
        """
        evaluator = getattr(self.val_loop, "evaluator", None)
        built: list[Any] = []
        for config in scheduler:
            if isinstance(config, dict):
                config.setdefault("epoch_length", self.train_loop.steps_per_epoch)
                schedule.follow(config, evaluator)
                config = schedule.keep_ratio(config, self.optim_wrapper.optimizer)
                config = schedule.over_the_training(config, self.max_epochs, self.max_iters)
                if not schedule.is_reached(config, self.max_epochs, self.max_iters):
                    continue
                warning = schedule.unfinished(config, self.max_epochs, self.max_iters)
                if warning is not None:
                    self.session.say(warning)
            with schedule.settings_of(config):
                built += super().build_param_scheduler([config])
        return built

    def close(self) -> None:
        """Let go of the data loaders, so that their worker processes end now.

        Left to the garbage collector they are waited for, five seconds each: it takes their queues apart before torch
        can tell them to end.
        """
        for loop in (self.train_loop, self.val_loop, self.test_loop):
            if loop is not None:
                del loop.dataloader
        self._train_dataloader = self._val_dataloader = self._test_dataloader = None

    # -- less work per step -----------------------------------------------------------------------------------------

    def build_train_loop(self, loop: Any) -> Any:
        """Build it, and remember it: MMEngine asks at every access whether it has been."""
        self._built_loop = super().build_train_loop(loop)
        return self._built_loop

    @property
    def train_loop(self) -> Any:
        """The training loop; None where nothing is trained."""
        return super().train_loop if self._built_loop is None else self._built_loop

    @property
    def iter(self) -> int:
        """Optimizer steps completed."""
        loop = self.train_loop
        return 0 if loop is None else int(loop.iter)

    def register_hook(self, hook: Hook | dict[str, Any], priority: Any = None) -> None:
        """Register, and forget which hooks answer to which stage."""
        super().register_hook(hook, priority)
        self._calls.clear()

    def unregister_hook(self, hook: Hook) -> None:
        """Call it no more."""
        self.hooks.remove(hook)
        self._calls.clear()

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks that do something at this stage; most do nothing at most stages."""
        calls = self._calls.get(fn_name)
        if calls is None:
            calls = [
                getattr(hook, fn_name)
                for hook in self.hooks
                if hasattr(hook, fn_name) and (fn_name not in Hook.stages or fn_name in hook.get_triggered_stages())
            ]
            self._calls[fn_name] = calls
        for call in calls:
            try:
                call(self, **kwargs)
            except (AssertionError, ImportError, KeyError, TypeError, ValueError) as error:
                # Where MMEngine's hooks check their settings against the run, or build what these name.
                place = type(call.__self__).__module__
                of_its_settings = isinstance(error, (AssertionError, ImportError, ValueError)) or place.startswith(
                    "mmengine."
                )
                if fn_name not in ("before_run", "before_train") or place.startswith("exp.") or not of_its_settings:
                    raise
                raise ConfigError(f"hooks: {type(call.__self__).__name__}: {first_line(error)}") from error
