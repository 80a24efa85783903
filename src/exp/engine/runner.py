"""MMEngine's Runner, with what it hard-wires to one vendor handed over to the backend.

Overridden: environment set-up (the process group exists already), model placement and wrapping, logging to the rank's
own file, and checkpoints (plain data, exact resume). Everything else - hooks, schedulers, visualisers - is MMEngine's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Mapping

import mmengine
import torch
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import BaseLoop
from mmengine.runner import Runner as MMEngineRunner

from exp.engine import rng, schedule
from exp.engine.batchnorm import fit_batchnorm
from exp.engine.losses import LossMeter
from exp.engine.placement import check_optimizer, check_placement, placement_report
from exp.engine.wrapper import unwrapped, wrap
from exp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

# Ours take their place: they read a loss from the device at every step, pickle objects, or print at length.
_DISABLED_HOOKS = dict.fromkeys(["runtime_info", "timer", "sampler_seed", "logger", "checkpoint"])


class Runner(MMEngineRunner):
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
        self._hook_calls: dict[str, list[Any]] = {}
        self._resume_point: tuple[Mapping[str, Any], str, Any] | None = None
        super().__init__(
            model=model,
            work_dir=str(session.folder.path),
            default_hooks={**_DISABLED_HOOKS, "param_scheduler": {"type": "ParamSchedulerHook"}},
            default_scope="mmengine",
            randomness={"seed": session.config.seed},
            experiment_name=session.unique_name,
            **kwargs,
        )

    # -- what MMEngine ties to one vendor ---------------------------------------------------------------------------

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        """Take rank and world size from the session; MMEngine would call its vendor's set_device here."""
        del env_cfg
        self._rank, self._world_size = self.distributed_group.rank, self.distributed_group.world_size
        self._distributed = self._world_size > 1
        self._timestamp = "logs"  # MMEngine makes the folder work_dir/<timestamp>; ours is called logs

    def set_randomness(self, seed: int, diff_rank_seed: bool = False, deterministic: bool = False) -> None:
        """Note the seed; the session has seeded everything before the data and the model were built."""
        self._seed, self._deterministic = seed, deterministic

    def wrap_model(self, model_wrapper_cfg: dict[str, Any] | None, model: torch.nn.Module) -> torch.nn.Module:
        """Place the model on the rank's device, check that it is there wholly, and wrap it."""
        config = self.session.config
        model, warning = fit_batchnorm(model, self.backend, config.wrapper.sync_batchnorm and self._distributed)
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
        if not self._distributed or self._train_loop is None:
            return model  # evaluation runs the bare module: its ranks may have different numbers of batches
        options = {key: value for key, value in config.wrapper.items() if key not in ("kind", "sync_batchnorm")}
        return wrap(model, config.wrapper.kind, options, self.backend, self.device)

    # -- less noise -------------------------------------------------------------------------------------------------

    def build_logger(self, log_level: int | str = "INFO", log_file: str | None = None, **kwargs: Any) -> MMLogger:
        """MMEngine's logger, writing to the log of the rank instead of the terminal."""
        del log_file, kwargs
        mm_logger = MMLogger.get_instance(self._experiment_name, log_level=log_level)
        mm_logger.handlers[:] = list(logging.getLogger().handlers)
        mm_logger.setLevel(log_level)
        return mm_logger

    def _log_env(self, env_cfg: dict[str, Any]) -> None:
        """``env.json`` has it."""

    def dump_config(self) -> None:
        """``config.yaml`` has it."""

    def _init_model_weights(self) -> None:
        """Models initialise themselves when they are built; only an MMEngine ``init_cfg`` is left to do here."""
        if getattr(unwrapped(self.model), "init_cfg", None):
            super()._init_model_weights()

    def build_param_scheduler(self, scheduler: Any) -> Any:
        """Build the schedulers; an epoch is its optimizer steps, however many micro-batches those take."""
        reached = []
        for config in scheduler:
            if isinstance(config, dict):
                schedule.check_groups(config, self.optim_wrapper.optimizer)
                config.setdefault("epoch_length", self.train_loop.steps_per_epoch)
                end = self.max_epochs if config.get("by_epoch", True) else self.max_iters
                if config.get("begin", 0) >= min(end, config.get("end", end)):
                    continue  # MMEngine refuses one that begins after the end of a short run, and a warm-up of 0 steps
            reached.append(config)
        return super().build_param_scheduler(reached)

    def close(self) -> None:
        """Let go of the data loaders, so that their worker processes end now.

        Left to the garbage collector they are waited for, five seconds each: it takes their queues apart before torch
        can tell them to end.
        """
        for loop in (self._train_loop, self._val_loop, self._test_loop):
            if isinstance(loop, BaseLoop):
                del loop.dataloader
        self._train_dataloader = self._val_dataloader = self._test_dataloader = None

    # -- less work per step -----------------------------------------------------------------------------------------

    def register_hook(self, hook: Hook | dict[str, Any], priority: Any = None) -> None:
        """Register, and forget which hooks answer to which stage."""
        super().register_hook(hook, priority)
        self._hook_calls.clear()

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks that do something at this stage; most do nothing at most stages."""
        calls = self._hook_calls.get(fn_name)
        if calls is None:
            calls = [
                getattr(hook, fn_name)
                for hook in self._hooks
                if hasattr(hook, fn_name) and (fn_name not in Hook.stages or fn_name in hook.get_triggered_stages())
            ]
            self._hook_calls[fn_name] = calls
        for call in calls:
            call(self, **kwargs)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def resume_from(self, content: Mapping[str, Any], source: str, checkpoint_hook: Any) -> None:
        """Have :meth:`train` continue from a training checkpoint, once loops and schedulers are built."""
        self._resume_point = (content, source, checkpoint_hook)

    def load_or_resume(self) -> None:
        """Continue from what :meth:`resume_from` was given; weights to start from are loaded before wrapping."""
        if self._resume_point is not None:
            content, source, checkpoint_hook = self._resume_point
            checkpoint_hook.load_state_dict(self.restore(content, source))
            self._resume_point = None

    def weights_checkpoint(self) -> dict[str, Any]:
        """The model's weights and where they come from."""
        return {"meta": self._meta(self.iter), "state_dict": unwrapped(self.model).state_dict()}

    def training_checkpoint(self, step: int, best: Mapping[str, Any], validation_due: bool = False) -> dict[str, Any]:
        """All that an exact continuation needs. A collective: every rank's random state is in it.

        Args:
            step: optimizer steps completed.
            best: what the checkpoint hook knows of the epochs so far.
            validation_due: whether a validation is to be made before training goes on.
        """
        content = self.weights_checkpoint()
        content["meta"] = {**self._meta(step), "validation_due": validation_due}
        content["optimizer"] = self.optim_wrapper.state_dict()
        content["param_schedulers"] = [scheduler.state_dict() for scheduler in self.param_schedulers or []]
        content["rng"] = self.distributed_group.gather(rng.rng_state(self.backend))
        content["best"] = dict(best)
        self.call_hook("before_save_checkpoint", checkpoint=content)
        return content

    def _meta(self, step: int) -> dict[str, Any]:
        trains = self._train_loop is not None
        return {
            "format": 1,
            "experiment": self.session.config.name,
            "step": step,
            "epoch": self.epoch if trains else 0,
            "samples": self.train_loop.sampler.samples if trains else 0,
            "global_batch_size": self.session.config.global_batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
        }

    def restore(self, content: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Continue from a training checkpoint.

        Args:
            content: what :meth:`training_checkpoint` gave.
            source: where it was read, for messages.

        Returns:
            What the checkpoint hook knew.

        Raises:
            CheckpointError: it does not fit this model, or is no training checkpoint.
            ConfigError: it was trained with another global batch size or seed: the data order would not continue.
        """
        missing = {"meta", "state_dict", "optimizer", "rng", "best"} - set(content)
        if missing:
            raise CheckpointError(
                f"{source} is no training checkpoint (no {', '.join(sorted(missing))}); to start from its weights, "
                "use init_from instead of resume"
            )
        meta = content["meta"]
        for key, mine in (("global_batch_size", self.session.config.global_batch_size), ("seed", self.seed)):
            if meta[key] != mine:
                raise ConfigError(
                    f"resume: {source} was trained with {key}={meta[key]}, this run has {mine}; set {key}={meta[key]}"
                )
        self.call_hook("after_load_checkpoint", checkpoint=content)
        try:
            unwrapped(self.model).load_state_dict(content["state_dict"])
        except RuntimeError as error:
            raise CheckpointError(f"{source} does not fit the model of this run: {error}") from error
        self.optim_wrapper.load_state_dict(content["optimizer"])
        for scheduler, state in zip(self.param_schedulers or [], content["param_schedulers"]):
            scheduler.load_state_dict(state)
        self.train_loop.restore(meta["epoch"], meta["step"], meta["samples"], meta.get("validation_due", False))
        states = content["rng"]
        if self.world_size == len(states):
            rng.set_rng_state(states[self.rank], self.backend)
        else:
            rng.seed_everything(self.session.config.seed + self.rank + 1000003 * meta["step"], self.backend)
            logger.warning("resumed at world size %d, not %d: random states start anew", self.world_size, len(states))
        return dict(content["best"])
