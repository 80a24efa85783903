"""The Trainer: what MMEngine's hooks know as the runner, and what a checkpoint of it holds.

MMEngine's Runner is not its base: hooks ask a runner for some twenty public names, and the Trainer has these
(docs/extend/hooks.md). What else the Runner does knows one vendor's devices, or reads the device at every step.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch
from mmengine.config import Config
from mmengine.hooks import Hook, ParamSchedulerHook, RuntimeInfoHook
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.runner import get_priority
from mmengine.visualization import Visualizer
from omegaconf import OmegaConf

from exp.config.differences import of_training
from exp.engine import checkpoint, rng
from exp.engine.checkpoint import complete, plain
from exp.engine.fsdp import is_sharded
from exp.engine.hooks import LossMeter
from exp.engine.saving import CheckpointWriter, ShardedSaver
from exp.engine.schedule import build_schedulers
from exp.engine.stock_hooks import CountersHook
from exp.engine.wrapper import average_buffers, unwrapped
from exp.errors import ConfigError, RunError
from exp.user_code import first_line

if TYPE_CHECKING:
    from exp.engine.loops import EvalLoop, TrainLoop
    from exp.engine.optim import BackendOptimWrapper
    from exp.session import Session

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)

# What RuntimeInfoHook and IterTimerHook write into the message hub anew; the rest is state of the user's hooks.
_RUNTIME_INFO = {"cfg", "seed", "experiment_name", "mmengine_version", "dataset_meta", "loop_stage", "epoch", "iter",
                 "max_epochs", "max_iters", "eta"}  # fmt: skip


class Trainer:
    """Trains and evaluates one model on the session's device; hooks know it as the runner.

    Args:
        session: gives device, backend, group, configuration and run folder.
        model: on the device, wrapped or not (:func:`exp.engine.wrapper.place_and_wrap`).
        train_loop: None: nothing is trained.
        val_loop: None: nothing is validated.
        test_loop: None: nothing is tested.
        optim_wrapper: of the model's parameters.
        schedulers: configurations of parameter schedulers.
        hooks: called in the order of their priorities; MMEngine's ParamSchedulerHook, and counters in the message hub,
            are there anyway.
        vis_backends: where MMEngine's visualizer writes.

    Raises:
        ConfigError: a scheduler is unknown, does not take its settings, or would do something else than it says.
    """

    launcher = "none"
    timestamp = "logs"  # as in MMEngine, log_dir is work_dir/<timestamp>
    _resume = False  # EMAHook asks for it by this name
    _before_validation: dict[str, Any] | None = None

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        train_loop: TrainLoop | None = None,
        val_loop: EvalLoop | None = None,
        test_loop: EvalLoop | None = None,
        optim_wrapper: BackendOptimWrapper | None = None,
        schedulers: Sequence[dict[str, Any]] = (),
        hooks: Sequence[Hook] = (),
        vis_backends: Sequence[Any] = (),
    ) -> None:
        self.session, self.device, self.backend = session, session.device, session.backend
        self.distributed_group = session.distributed
        self.precision: str = session.config.precision
        self.model, self.model_name = model, type(unwrapped(model)).__name__
        self.train_loop, self.val_loop, self.test_loop = train_loop, val_loop, test_loop
        for loop in (train_loop, val_loop, test_loop):
            if loop is not None:
                loop.runner = self
        self.losses = LossMeter()
        self.cfg = Config(OmegaConf.to_container(session.config, resolve=True))
        self.work_dir, self.log_dir = str(session.folder.path), str(session.folder.logs)
        self.experiment_name = name = session.unique_name
        self.default_scope = DefaultScope.get_instance(name, scope_name="mmengine")
        self.logger = MMLogger.get_instance(name)
        self.logger.setLevel("INFO")
        self.logger.handlers[:] = list(logging.getLogger().handlers)  # the log of the rank, not the terminal
        self.message_hub = MessageHub.get_instance(name)
        backends = list(vis_backends) or None
        self.visualizer = Visualizer.get_instance(name, vis_backends=backends, save_dir=self.work_dir)
        self.visualizer.add_config(self.cfg)
        self.optim_wrapper: Any = optim_wrapper
        self.param_schedulers = build_schedulers(schedulers, self)
        self.hooks: list[Hook] = []
        self._calls: dict[str, list[Any]] = {}
        counted = any(type(hook) is RuntimeInfoHook for hook in hooks)  # MMEngine's counts, and reads every step
        for hook in (*([] if counted else [CountersHook()]), ParamSchedulerHook(), *hooks):
            self.register_hook(hook)
        self.checkpoint_writer = CheckpointWriter(self.backend)
        self.sharded_saver: ShardedSaver | None = None  # writes this rank's part of a sharded model

    # -- what hooks ask of a runner ---------------------------------------------------------------------------------

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
        """Whether torch is to use deterministic algorithms alone."""
        return torch.are_deterministic_algorithms_enabled()

    @property
    def iter(self) -> int:
        """Optimizer steps completed."""
        return 0 if self.train_loop is None else self.train_loop.iter

    def __getattr__(self, name: str) -> Any:
        """Of the loops: ``epoch``, ``max_iters``, ``val_dataloader``, ``test_evaluator``..."""
        place, _, last = name.partition("_")
        if name in ("epoch", "max_epochs", "max_iters", "val_interval", "val_begin"):
            return getattr(self.train_loop, name, 0)
        if place in ("train", "val", "test") and last in ("dataloader", "evaluator"):
            return getattr(getattr(self, f"{place}_loop"), last, None)
        raise AttributeError(f"{type(self).__name__} has no {name}; see docs/extend/hooks.md")

    def register_hook(self, hook: Hook, priority: Any = None) -> None:
        """Add a hook, after those of the same priority."""
        if priority is not None:
            hook.priority = priority
        rank = get_priority(hook.priority)
        place = next((index for index, each in enumerate(self.hooks) if get_priority(each.priority) > rank), None)
        self.hooks.insert(len(self.hooks) if place is None else place, hook)
        self._calls.clear()

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks that do something at this stage; most do nothing at most stages.

        Raises:
            ConfigError: before the first step a hook says that its settings do not go with the run.
        """
        calls = self._calls.get(fn_name)
        if calls is None:
            own = [hook for hook in self.hooks if hasattr(hook, fn_name)]
            stages = (fn_name,) if fn_name in Hook.stages else ()
            calls = [getattr(hook, fn_name) for hook in own if set(hook.get_triggered_stages()).issuperset(stages)]
            self._calls[fn_name] = calls
        for call in calls:
            try:
                call(self, **kwargs)
            except (AssertionError, ImportError, KeyError, TypeError, ValueError) as error:
                hook = type(call.__self__)
                ours = isinstance(error, (KeyError, TypeError)) and not hook.__module__.startswith("mmengine.")
                if fn_name not in ("before_run", "before_train") or hook.__module__.startswith("exp.") or ours:
                    raise
                raise ConfigError(f"hooks: {hook.__name__}: {first_line(error)}") from error

    def save_checkpoint(self, out_dir: str, filename: str, *_: Any, by_epoch: bool = True, **__: Any) -> None:
        """Write weights, optimizer and message hub beside the checkpoints of the run, as MMEngine's method does."""
        if self.distributed_group.is_main:
            content = self._weights(self.iter + (not by_epoch))
            content["meta"]["epoch"] += by_epoch
            content.update(self._state(), message_hub=self._infos_of_hooks())
            self._let_hooks_change(content)
            checkpoint.write(Path(out_dir, filename), content)

    # -- training and test ------------------------------------------------------------------------------------------

    def train(self, load: Callable[[], object] | None = None) -> None:
        """Train.

        Args:
            load: restores the state that the training continues from, between ``before_run`` and the loop.
        """
        assert self.train_loop is not None
        self._resume = load is not None
        self.call_hook("before_run")
        self._init_weights()
        if load is not None:
            load()
        self.optim_wrapper.initialize_count_status(self.model, 0, -1)
        self.train_loop.run()
        self.call_hook("after_run")

    def test(self, content: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Test the weights of a checkpoint, or those that the model has; returns the metrics by name."""
        assert self.test_loop is not None
        self._resume = False
        self.call_hook("before_run")
        if content is not None:
            model = unwrapped(self.model)
            whole = complete(content, model)
            self.call_hook("after_load_checkpoint", checkpoint=whole)
            model.load_state_dict(whole["state_dict"])
        metrics = self.test_loop.run()
        self.call_hook("after_run")
        return metrics

    def _init_weights(self) -> None:
        """Do what MMEngine's ``init_cfg`` says, unless a file has weights; else models initialize themselves."""
        model: Any = unwrapped(self.model)
        if self.session.weights is None and any(getattr(module, "init_cfg", None) for module in model.modules()):
            if is_sharded(model):
                raise ConfigError(
                    "model: init_cfg draws weights once the model is wrapped, and with wrapper=fsdp no rank has them "
                    "whole then; initialize them in its constructor, or use wrapper=ddp"
                )
            model.init_weights()
            for value in model.state_dict().values() if self.distributed else ():
                if value.is_floating_point():  # added up, which all collectives can
                    self.backend.collectives.all_reduce(value.mul_(self.rank == 0))

    def close(self) -> None:
        """Finish the checkpoint that is being written, and let go of the data loaders, so that their processes end now.

        If the garbage collector ends them, they take five seconds each: it takes their queues apart before torch can
        tell them to end.
        """
        self.checkpoint_writer.close()
        for loop in (self.train_loop, self.val_loop, self.test_loop):
            if loop is not None:
                del loop.dataloader

    # -- what a checkpoint holds ------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether this rank writes something of a checkpoint."""
        return self.distributed_group.is_main or self.sharded_saver is not None

    def prepare_saving(self) -> None:
        """Called before training. A collective."""
        if is_sharded(unwrapped(self.model)):
            self.sharded_saver = ShardedSaver(self.distributed_group)

    def _foreign_hooks(self, *stages: str) -> list[Hook]:
        """The hooks that are not the engine's own and do something at one of the stages."""
        foreign = [hook for hook in self.hooks if not type(hook).__module__.startswith("exp.engine.")]
        return [hook for hook in foreign if not set(stages).isdisjoint(hook.get_triggered_stages())]

    def hooks_that_save(self) -> list[str]:
        """The classes of the user's hooks that may change a checkpoint, its weights included."""
        return [type(hook).__name__ for hook in self._foreign_hooks("before_save_checkpoint")]

    def average_buffers(self) -> None:
        """Average running statistics over ranks: those of the model, and of copies that hooks keep. A collective."""
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

    def weights_checkpoint(self) -> dict[str, Any]:
        """The weights as the hooks want them kept, with what of the data belongs to them; on ranks that write."""
        content = self._weights(self.iter)
        self._let_hooks_change(content)
        return content

    def training_checkpoint(self, step: int, best: Mapping[str, Any], validation_due: bool = False) -> dict[str, Any]:
        """All that an exact continuation needs. A collective: every rank's random state is in it.

        Args:
            step: optimizer steps completed.
            best: the checkpoint hook's state: the best validation so far.
            validation_due: whether a validation is to be made before training continues.
        """
        if validation_due and self._before_validation is not None:
            content = dict(self._before_validation)
            content["meta"] = {**content["meta"], "validation_due": True}
            content["best"] = dict(best)
            return content
        self.average_buffers()
        content = self._weights(step)
        content["meta"]["validation_due"] = validation_due
        content.update(self._state())
        content["rng"] = self.distributed_group.gather(rng.rng_state(self.backend))
        content["best"] = dict(best)
        content["message_hub"] = self._infos_of_hooks()
        if self.distributed_group.is_main:  # as in MMEngine: they may write files
            self._let_hooks_change(content)
        return content

    def _weights(self, step: int) -> dict[str, Any]:
        session, loop = self.session, self.train_loop
        assert loop is not None
        meta = {
            "format": 1,
            "experiment": session.config.name,
            "step": step,
            "iter": step,  # as MMEngine's hooks call it
            "epoch": loop.epoch,
            "samples": loop.sampler.samples,
            "steps_per_epoch": loop.steps_per_epoch,
            "stopped": loop.stop_training,
            "global_batch_size": session.config.global_batch_size,
            "world_size": self.world_size,
            "seed": self.seed,
        }
        content: dict[str, Any] = {"meta": meta, "state_dict": unwrapped(self.model).state_dict()}
        found = {"data": session.data_state, "data_files": session.data_files}
        content.update((key, value) for key, value in found.items() if value is not None)
        content["config"] = of_training(session.config)
        return content

    def _state(self) -> dict[str, Any]:
        schedulers = [scheduler.state_dict() for scheduler in self.param_schedulers]
        return {"optimizer": self.optim_wrapper.state_dict(), "param_schedulers": schedulers}

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
                "and tensors; see docs/extend/hooks.md"
            ) from error
        after = content["state_dict"]
        if any(after.get(key) is not value for key, value in before.items()):
            content["meta"]["weights_of_hooks"] = hooks
