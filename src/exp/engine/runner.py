"""MMEngine's Runner, with what it hard-wires to one vendor handed over to the backend.

Overridden: environment set-up (the process group exists already), model placement and wrapping, logging to the rank's
own file, and checkpoints (plain data, exact resume). Everything else - hooks, schedulers, visualisers - is MMEngine's;
docs/mmengine.md draws the line. The loops go in as any custom loop does, by ``train_cfg``, ``val_cfg``, ``test_cfg``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import mmengine
import torch
from mmengine.config import Config
from mmengine.hooks import Hook, ParamSchedulerHook
from mmengine.logging import MMLogger
from omegaconf import OmegaConf

from exp.engine import schedule
from exp.engine.batchnorm import fit_batchnorm
from exp.engine.checkpointing import CheckpointingRunner
from exp.engine.fsdp import is_sharded
from exp.engine.losses import LossMeter
from exp.engine.placement import check_optimizer, check_placement, placement_report
from exp.engine.stock_hooks import RuntimeInfoHook
from exp.engine.wrapper import unwrapped, wrap_as_configured
from exp.errors import ConfigError
from exp.raised import first_line

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

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


class Runner(CheckpointingRunner):
    """Runs one experiment on the session's device.

    Args:
        session: gives device, backend, group, config and run folder.
        model: on the CPU; placed and wrapped here.
        **kwargs: MMEngine's Runner's arguments.
    """

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
