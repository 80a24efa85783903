"""Classes of MMEngine's registries: hooks and the logger of a run; and what such classes find in their runner.

MMEngine's registries import any dotted path, and, for a plain name that is not registered, any module of that name. So
names are checked here before MMEngine gets them. Most of MMEngine's hooks run unchanged. The hooks below replace those
of the same name that support one vendor's devices only, lose their state on resume, or write outside the run folder.
docs/extend/hooks.md has the whole table.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import mmengine.hooks
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger
from mmengine.registry import HOOKS, MODEL_WRAPPERS, MODELS, DefaultScope, Registry
from mmengine.runner import get_priority
from mmengine.utils import ManagerMixin
from mmengine.visualization import BaseVisBackend, Visualizer
from omegaconf import OmegaConf
from torch import nn

from exp.config.check import UNSUPPORTED_HOOKS, unsupported_hook_message
from exp.config.resolve import check_arguments, instantiate, resolve, without_scope
from exp.engine.checkpoint.writer import plain_copy
from exp.engine.result import write_picture
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError, UnavailableError, nearest, qualified_name
from exp.models.base import has_user_part

if TYPE_CHECKING:
    from exp.engine.loops import TrainLoop
    from exp.session import Session


logger = logging.getLogger(__name__)

_HISTORY_LENGTH = 1000  # values of a scalar that the message hub keeps, since it copies them all at each update
# Keys of the message hub that RuntimeInfoHook and IterTimerHook write again; all others are state of the user's hooks.
_RUNTIME_INFO = {"cfg", "seed", "experiment_name", "mmengine_version", "dataset_meta", "loop_stage", "epoch", "iter",
                 "max_epochs", "max_iters", "eta"}  # fmt: skip


def rank_logger(name: str) -> MMLogger:
    """MMEngine's logger of a run, set up to write to the log of the rank instead of the terminal."""
    logger: MMLogger = MMLogger.get_instance(name)
    logger.setLevel("INFO")
    logger.handlers[:] = list(logging.getLogger().handlers)
    return logger


def lookup_class(key: str, name: str, registry: Registry, base: type | tuple[type, ...]) -> Any:
    """The class that ``type`` names, from a registry or by its dotted path.

    Args:
        key: the key of the name, for messages.
        name: a registered name, also with the scope ``mmengine.`` or ``mmcv.``, or ``package.module.Class``.
        registry: MMEngine's registry for this key.
        base: the interface of a class that is named by its path.

    Raises:
        ConfigError: the class does not exist, or does not inherit ``base``.
        UnavailableError: its module cannot be imported.
    """
    registry.import_from_location()
    classes = registry.module_dict
    cls = classes.get(without_scope(name))
    if cls is not None:
        return cls
    if "." not in name:
        public = sorted(registered_name for registered_name in classes if not registered_name.startswith("_"))
        raise ConfigError(f"{key}={name} is not known{nearest(name, public)}; known are {', '.join(public)}")
    return resolve(key, name, base)


def check_monitor(owner: str, monitor: str, names: Sequence[str]) -> None:
    """Refuse to monitor a metric that is not measured.

    Args:
        owner: the hook or schedule, for the message.
        monitor: name of the metric.
        names: names of all metrics that are measured.

    Raises:
        ConfigError: ``monitor`` is not in ``names``.
    """
    if monitor not in names:
        raise ConfigError(
            f"{owner} has monitor={monitor}{nearest(monitor, list(names))}, but the metrics are {', '.join(names)}"
        )


class _ToTrackers(BaseVisBackend):
    """The only backend of the visualizer: scalars go to the trackers, pictures to ``plots/``, as those of the run do.

    Args:
        session: the session of rank 0.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def experiment(self) -> Session:
        """The session."""
        return self.session

    def _init_env(self) -> None:
        """There is nothing to prepare."""

    def add_scalar(self, name: str, value: Any, step: int = 0, **_: Any) -> None:
        """Pass a scalar to the trackers."""
        self.add_scalars({name: value}, step)

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, *_: Any, **__: Any) -> None:
        """Pass scalars to the trackers."""
        self.session.log_scalars({name: float(value) for name, value in scalar_dict.items()}, step)

    def add_image(self, name: str, image: Any, step: int = 0, **_: Any) -> None:
        """Write a picture (H, W, 3), RGB, to ``plots/<name>_<step>.png``; trackers get it at the end of the run."""
        write_picture(self.session, f"plots/{re.sub('[^A-Za-z0-9_.-]+', '-', name)}_{step}.png", image)


class _Visualizer(Visualizer):
    """MMEngine's visualizer, made at its first use: it makes a figure, so it imports matplotlib."""

    def __init__(self, name: str, **options: Any) -> None:
        ManagerMixin.__init__(self, name)
        self._options = options

    def __getattr__(self, name: str) -> Any:
        """Make the visualizer when an attribute is missing that it has then."""
        options = self.__dict__.pop("_options", None)
        if options is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        super().__init__(self.instance_name, **options)
        return getattr(self, name)


class CountersHook(mmengine.hooks.RuntimeInfoHook):
    """Updates ``runner.message_hub``: counters at each step, metrics after each evaluation.

    MMEngine's RuntimeInfoHook also reads the losses from the device at every step; here
    :class:`exp.engine.hooks.MetricsHook` adds them every ``log_every`` steps. If the user names RuntimeInfoHook, it is
    used instead of this hook.
    """

    def before_run(self, runner: Any) -> None:
        """Add seed, name and configuration of the run."""
        self.last_loop_stage = None
        runner.message_hub.update_info_dict(
            {
                "cfg": OmegaConf.to_yaml(runner.session.config),
                "seed": runner.seed,
                "experiment_name": runner.experiment_name,
                "mmengine_version": mmengine.__version__,
            }
        )

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Update the number of steps."""
        runner.message_hub.update_info("iter", runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Do nothing, in particular do not read the losses."""


class RunnerInterface:
    """What hooks of MMEngine find in their ``runner``: its attributes, and how it calls them.

    The Trainer does not inherit MMEngine's Runner. Hooks use about twenty public names of a runner, and the Trainer has
    these (docs/extend/hooks.md). The rest of the Runner supports one vendor's devices only, or reads from the device at
    every step.

    Attributes:
        shares_state: whether message hub, visualizer, scope and configuration are kept for classes of MMEngine's: if
            there are hooks, plugins or a model of the user's. Nobody else reads them.
    """

    launcher = "none"
    timestamp = "logs"  # as in MMEngine, log_dir is work_dir/<timestamp>
    _resume = False  # the name that MMEngine's EMAHook reads

    session: Session
    model: nn.Module
    work_dir: str
    experiment_name: str
    train_loop: TrainLoop

    def share_with_mmengine(self, hooks: Sequence[Hook]) -> None:
        """Make what MMEngine's classes share, if a class of the user's may ask for it.

        Args:
            hooks: the user's hooks.
        """
        bare = unwrapped(self.model)
        self.hooks: list[Hook] = []
        self._dispatch: dict[str, list[Any]] = {}
        self.shares_state = bool(hooks or self.session.config.plugins) or has_user_part(bare)
        if not self.shares_state:
            return
        # Made now, since MMEngine's classes ask for the current instance.
        assert None not in (self.default_scope, self.message_hub, self.visualizer)
        if bare is not self.model:  # MMEngine's hooks unwrap models of registered classes only
            wrapper = type(self.model)
            MODEL_WRAPPERS.register_module(name=qualified_name(self.model), module=wrapper, force=True)
        self._user_info_hook = any(type(hook) is mmengine.hooks.RuntimeInfoHook for hook in hooks)
        if not self._user_info_hook:
            self.register_hook(CountersHook())

    @functools.cached_property
    def cfg(self) -> Config:
        """A copy of the configuration."""
        return Config(OmegaConf.to_container(self.session.config, resolve=True))

    @functools.cached_property
    def default_scope(self) -> DefaultScope:
        """The scope of registered names."""
        return DefaultScope.get_instance(self.experiment_name, scope_name="mmengine")

    @functools.cached_property
    def message_hub(self) -> MessageHub:
        """Counters, losses and metrics, and the state of the user's hooks."""
        return MessageHub.get_instance(self.experiment_name)

    @functools.cached_property
    def visualizer(self) -> Visualizer:
        """Takes scalars and pictures of hooks; those of rank 0 are kept."""
        backends = [_ToTrackers(self.session)] if self.session.distributed.is_main else None
        visualizer: Visualizer = _Visualizer.get_instance(self.experiment_name, vis_backends=backends)
        return visualizer

    def share_scalars(self, split: str, scalars: Mapping[str, float]) -> None:
        """Pass the values of a log line of training to the message hub.

        If the user names MMEngine's RuntimeInfoHook, that updates the message hub at every step.
        """
        if self.shares_state and split == "train" and not self._user_info_hook:
            for name, value in scalars.items():
                self.message_hub.log_scalars.setdefault(name, HistoryBuffer(max_length=_HISTORY_LENGTH))
                self.message_hub.update_scalar(name, value, resumed=False)

    def message_hub_state(self) -> dict[str, Any]:
        """The state of the user's hooks in the message hub, as far as it is plain data, for checkpoints."""
        state: dict[str, Any] = {}
        for key, value in self.message_hub.state_dict()["runtime_info"].items() if self.shares_state else ():
            try:
                state.update({} if key in _RUNTIME_INFO else {key: plain_copy(value)})
            except TypeError as error:
                logger.warning("message hub: %s is not resumed: %s", key, error)
        return state

    @property
    def iter(self) -> int:
        """Optimizer steps completed. A property, because hooks ask for it several times a step."""
        return self.train_loop.iter

    def __getattr__(self, name: str) -> Any:
        """Further attributes of the loops: ``epoch``, ``max_iters``, ``val_dataloader`` and so on.

        Raises:
            AttributeError: there is no such attribute.
        """
        split, _, last = name.partition("_")
        if name in ("epoch", "max_epochs", "max_iters", "val_interval", "val_begin"):
            return getattr(self.train_loop, name)
        if split in ("train", "val", "test") and last in ("dataloader", "evaluator"):
            return getattr(getattr(self, f"{split}_loop"), last, None)
        raise AttributeError(f"{type(self).__name__} has no {name}; see docs/extend/hooks.md")

    def register_hook(self, hook: Hook, priority: Any = None) -> None:
        """Add a hook, after those of the same priority."""
        if priority is not None:
            hook.priority = priority
        rank = get_priority(hook.priority)
        position = next(
            (index for index, registered in enumerate(self.hooks) if get_priority(registered.priority) > rank), None
        )
        self.hooks.insert(len(self.hooks) if position is None else position, hook)
        self._dispatch.clear()

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        """Call the hooks that override the method ``fn_name``; most hooks override few.

        Args:
            fn_name: name of the method, such as ``before_train``.
            **kwargs: arguments of the method besides the runner.
        """
        calls = self._dispatch.get(fn_name)
        if calls is None:
            having_method = [hook for hook in self.hooks if hasattr(hook, fn_name)]
            stages = (fn_name,) if fn_name in Hook.stages else ()
            calls = [
                getattr(hook, fn_name) for hook in having_method if set(hook.get_triggered_stages()).issuperset(stages)
            ]
            self._dispatch[fn_name] = calls
        for call in calls:
            call(self, **kwargs)

    def user_hooks_overriding(self, *stages: str) -> list[str]:
        """Class names of the hooks that override one of the stages and are not the engine's own.

        At ``before_save_checkpoint`` a hook may change the weights in the checkpoint; at ``before_val`` it may replace
        those of the model.
        """
        user_hooks = [hook for hook in self.hooks if not type(hook).__module__.startswith("exp.engine.")]
        return [type(hook).__name__ for hook in user_hooks if not set(stages).isdisjoint(hook.get_triggered_stages())]


class SyncBuffersHook(Hook):
    """Averages buffers over ranks after each epoch; the engine always does so before validations and checkpoints.

    MMEngine's hook of this name needs a process group that the collectives of some devices do not have, and averages
    again at each validation.
    """

    def after_train_epoch(self, runner: Any) -> None:
        """Average them."""
        runner.average_buffers()


class EarlyStoppingHook(mmengine.hooks.EarlyStoppingHook):
    """MMEngine's EarlyStoppingHook, with its count in the checkpoint, so that it continues on resume."""

    priority = "LOW"  # runs before the checkpoint of this validation is written

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Save the count and the best value."""
        states = checkpoint.setdefault("early_stopping", {})
        states[self.monitor] = {"wait_count": self.wait_count, "best_score": float(self.best_score)}

    def after_load_checkpoint(self, runner: Any, checkpoint: Mapping[str, Any]) -> None:
        """Restore the count and the best value, if the run is resumed."""
        state = checkpoint.get("early_stopping", {}).get(self.monitor) if runner._resume else None
        if state is not None:
            self.wait_count, self.best_score = state["wait_count"], state["best_score"]


class ProfilerHook(mmengine.hooks.ProfilerHook):
    """MMEngine's ProfilerHook, which writes into the run folder, one file per rank, also without a complete epoch."""

    def before_run(self, runner: Any) -> None:
        """Start the profiler at the first call, the training; the test of the same run is not profiled."""
        if hasattr(self, "profiler"):
            return
        name: Any = self.json_trace_path
        if name is None and self.on_trace_ready is None:
            name = "profile.json"
        if name is not None:
            path = Path(runner.work_dir, name)
            if runner.world_size > 1:
                path = path.with_name(f"{path.stem}.rank{runner.rank}{path.suffix}")
            path.parent.mkdir(parents=True, exist_ok=True)
            self.json_trace_path: str | None = str(path)
        super().before_run(runner)

    def after_train(self, runner: Any) -> None:
        """Write the profile, if training has ended within the first epoch."""
        self.after_train_epoch(runner)


_REPLACED_HOOKS = (SyncBuffersHook, EarlyStoppingHook, ProfilerHook)


def build_hooks(
    configs: Sequence[Mapping[str, Any]], metric: str, greater_is_better: bool, names: Sequence[str] = ()
) -> list[Hook]:
    """Make the hooks of a configuration.

    Args:
        configs: each has ``type`` (a registered name or a dotted path), optionally ``priority``, and arguments.
        metric: name of the main metric, which an EarlyStoppingHook monitors by default.
        greater_is_better: whether larger values of it are better, for an EarlyStoppingHook without ``rule``.
        names: names of all metrics that are measured; empty: not known.

    Raises:
        ConfigError: a hook is unknown, refused, does not take its arguments, or monitors an unknown metric.
        UnavailableError: a hook needs a package that is not installed.
    """
    hooks: list[Hook] = []
    for number, hook_config in enumerate(configs):
        key, config = f"hooks[{number}]", dict(hook_config)
        name, priority = config.pop("type"), config.pop("priority", None)
        cls = lookup_class(f"{key}.type", name, HOOKS, Hook)
        for base in cls.__mro__:
            if base is not Hook and base.__module__.startswith("mmengine.") and base.__name__ in UNSUPPORTED_HOOKS:
                raise ConfigError(unsupported_hook_message(base.__name__))
        if cls is mmengine.hooks.EarlyStoppingHook and config.setdefault("monitor", metric) == metric:
            config.setdefault("rule", "greater" if greater_is_better else "less")
        replacements = (
            replacement
            for replacement in _REPLACED_HOOKS
            if cls.__module__.startswith("mmengine.") and replacement.__name__ == cls.__name__
        )
        try:
            hook: Hook = instantiate(next(replacements, cls), key, config)
            hook.priority = hook.priority if priority is None else priority
            get_priority(hook.priority)
            if isinstance(
                hook, mmengine.hooks.EMAHook
            ):  # makes the average of the weights later, of its other arguments
                options = [name for name in hook.ema_cfg if name != "type"]
                check_arguments(key, MODELS.get(hook.ema_cfg["type"]), options, {"model": "exp sets it"})
        except ImportError as error:
            raise UnavailableError(f"hooks: {name} needs a package that is not installed: {error}") from error
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"hooks: {name} does not take these settings: {error}") from error
        if isinstance(hook, mmengine.hooks.EarlyStoppingHook) and names:
            check_monitor(f"hooks: {type(hook).__name__}", hook.monitor, names)
        hooks.append(hook)
    return hooks
