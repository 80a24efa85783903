"""Builds what a configuration names (data, model, metrics, hooks, loggers), loads weights, and makes a run's record.

A task that uses a trained model as it is (eval, predict, features) needs an exact match: every tensor of the model must
be in the file, and every tensor of the file in the model. Otherwise part of the model would be random, or the model
would differ from the trained one. A training may start with a new head, for example for other classes; ``init_partial``
allows more.

MMEngine's registries import any dotted path, and, for a plain name that is not registered, any module of that name. So
names are checked here before MMEngine gets them. Most of MMEngine's hooks run unchanged. The hooks below replace those
of the same name that support one vendor's devices only, lose their state on resume, or write outside the run folder.
docs/extend/hooks.md has the whole table.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Container, Mapping, NamedTuple, Sequence

import mmengine.hooks
import torch
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, MODELS, VISBACKENDS, Registry
from mmengine.runner import get_priority
from mmengine.visualization import BaseVisBackend
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from exp import hub
from exp.config.check import REFUSED, refused_hook
from exp.config.compose import is_of_hub
from exp.config.differences import text_of
from exp.config.resolve import check_arguments, create, find_own_module, make, resolve, without_scope
from exp.data.base import Data, Extras, split_of
from exp.data.places import content_of, shortened
from exp.data.sampler import preserved_generators
from exp.engine import checkpoint
from exp.errors import ConfigError, RunError, UnavailableError, nearest, qualified_name
from exp.metrics import Evaluator, Metric
from exp.models.base import Model
from exp.runs.files import digest_of, seal_of
from exp.runs.folder import blank_result
from exp.session import Weights
from exp.task import task_class

if TYPE_CHECKING:
    from torch import nn

    from exp.config.schema import ExpConfig
    from exp.session import Session


def build_data(session: Session) -> Data:
    """Build the data set of the configuration, read the weights of ``init_from``, and print the ``notes`` of the data.

    If the task needs weights, the data take the state that belongs to them, such as mean and standard deviation of a
    series or the names of classes (:meth:`exp.data.base.Data.state_dict`).

    Raises:
        ConfigError: the class of the data cannot be used, or the weights do not exist.
        TypeError: the state of the data is not plain data.
        DataError: the data do not match the weights.
        CheckpointError: the weights cannot be read.
        UnavailableError: weights of a hub cannot be fetched, or the class cannot be imported.
    """
    data: Data = create(session.config.data, Data, "data")
    if session.config.init_from:
        weights = Path(str(hub.pinned(session.config)))
        session.weights = read_weights(weights, session.config.checkpoint.trusted)
        if session.distributed.is_main and not session.config.record.weights:  # else a hub's, which are digested
            session.weights.files.update((file.name, digest_of(file)) for file in hub.files_of(session.weights.path))
        if session.weights.data is not None and task_class(session.config).needs_weights:
            data.load_state_dict(session.weights.data)
    session.extras = Extras()
    data.setup(session)
    session.data_state = data.state_dict()
    checkpoint.plain(session.data_state, key="data")  # says now what the first checkpoint would
    for note in data.notes:
        session.say(note)
    return data


def about_data(session: Session, data: Data) -> dict[str, Any]:
    """The entries about the data in ``result.json``. A collective."""
    record = session.extras.record
    if record is None:
        return {split: len(getattr(data, split)) for split in ("train", "val", "test")}
    return record(session.distributed.gather)


def build_model(session: Session, data: Data, to_place: bool = False) -> nn.Module:
    """Build the model of the configuration on the CPU, with the weights of ``init_from`` if it is set.

    With ``compile=true`` the model is marked for compilation, unless its wrapper compiles it.

    Args:
        session: the session.
        data: its ``model_arguments()`` are arguments of the model, such as the number of classes.
        to_place: whether the model is for training with :func:`exp.engine.wrapper.place_and_wrap`, where the wrapper
            may compile it.

    Raises:
        ConfigError: the class is not a model or does not take the arguments, weights are missing, or they do not match
            (:func:`fit_weights`).
    """
    model: nn.Module = create(session.config.model, (Model, BaseModel), "model", **data.model_arguments())
    if session.weights is not None:
        classes = None if task_class(session.config).needs_weights else _other_classes(session, data, model)
        session.say(fit_weights(model, session.weights, session.config, classes=classes))
        session.weights = replace(session.weights, state={}, data=None)  # the tensors are the model's now
    elif task_class(session.config).needs_weights and model.state_dict():
        raise ConfigError(
            f"task={session.config.task.name} needs weights: the model has {len(model.state_dict())} tensors, although "
            "its typed keys have has_weights = False; set init_from, or remove has_weights"
        )
    elif any(getattr(module, "init_cfg", None) for module in model.modules()):
        rank_logger(session)  # the logger to which MMEngine reports the initialization
        model.init_weights()  # type: ignore[operator]
    wraps = to_place and session.info.world_size > 1
    if session.config.compile and not (wraps and "compile" in session.config.wrapper.options):  # else it compiles
        model.compile()  # compiles at the first call; in place, so names and hooks stay, and it can still be wrapped
    session.built(model)
    return model


def read_weights(path: Path, trusted: bool = False) -> Weights:
    """Read the weights of exp's checkpoints, or of other projects.

    Args:
        path: a ``.pth``, ``.bin`` or ``.safetensors`` file, the index of several ``.safetensors`` files, a run folder
            (its best checkpoint, or else the newest), a folder of weights, a repository's folder in the cache of a hub
            (``models--<owner>--<name>``), or a name in a hub (:mod:`exp.hub`).
        trusted: see :func:`exp.engine.checkpoint.read`.

    Raises:
        CheckpointError: the file cannot be read, holds no state dict, or is not the one that its run wrote.
        ConfigError: the folder contains no weights.
        UnavailableError: the weights cannot be fetched from the hub.
    """
    if is_of_hub(str(path)):
        path = hub.local_file(str(path))
    elif path.is_dir():
        path = _file_in(path)
    content = checkpoint.read(path, mapped=True, trusted=trusted)
    state = checkpoint.weights_of(content, path)
    ours = isinstance(content, Mapping) and "state_dict" in content and isinstance(content.get("data"), dict)
    return Weights(path, state, content["data"] if ours else None)


def _file_in(folder: Path) -> Path:
    """The file of weights in a folder (:func:`read_weights`).

    Raises:
        ConfigError: there is none, or there are several.
    """
    place = hub.snapshot_in(folder)
    place = place / "checkpoints" if (place / "checkpoints").is_dir() else place
    candidates = [place / checkpoint.BEST, *checkpoint.list_checkpoints(place), place / "model.safetensors"]
    found = [each for each in [*candidates, place / hub.INDEX] if each.is_file()][:1]
    found = found or [each for each in place.iterdir() if each.suffix in (".safetensors", ".pth", ".pt", ".bin")]
    if len(found) != 1:
        raise ConfigError(
            f"init_from={folder} holds {'several weights, give one' if found else 'no checkpoint'}; looked for "
            f"best.pth, step_*.pth, model.safetensors and its index, and a single .safetensors, .pth, .pt or .bin\n"
            f"  {content_of(place)}"
        )
    return found[0]


class OtherClasses(NamedTuple):
    """How the classes of weights differ from those of the data.

    Attributes:
        old: names of the classes of the weights, in the order of their labels.
        new: those of the data.
        axes: for each tensor of the model whose shape depends on the number of classes, the axis of the classes; None:
            it is not clear which.
    """

    old: Sequence[str]
    new: Sequence[str]
    axes: Mapping[str, int | None]

    def fit(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
        """Sort the rows by class; if the classes are others, leave out the tensors, so that they start anew.

        Returns:
            The tensors, and a line for the user; empty if there is no such tensor.
        """
        rows = {name: axis for name, axis in self.axes.items() if name in state}
        names = shortened(list(rows), 4)
        if not rows:
            return dict(state), ""
        if sorted(self.old) == sorted(self.new) and None not in rows.values():
            order = torch.tensor([self.old.index(name) for name in self.new])
            found = {name: state[name].index_select(axis, order) for name, axis in rows.items() if axis is not None}
            line = f"the weights know the same {len(self.old)} classes in another order; {names} go by name"
            return {**state, **found}, line
        both = f"{shortened(self.old)}) than the data have ({shortened(self.new)}"
        kept = {name: value for name, value in state.items() if name not in rows}
        return kept, f"the weights know other classes ({both}); {names} are initialized anew"


def _other_classes(session: Session, data: Data, model: nn.Module) -> OtherClasses | None:
    """How the classes of the weights differ from those of the data; None: they are the same, or not known.

    Raises:
        ConfigError: ``class_rows`` of the model names a tensor that it does not have.
    """
    assert session.weights is not None
    old, new = (list((state or {}).get("classes") or ()) for state in (session.weights.data, session.data_state))
    if old == new or not old or not new or not all(isinstance(name, str) for name in (*old, *new)):
        return None
    own, arguments = model.state_dict(), data.model_arguments()
    axes: dict[str, int | None] = {}
    declared = getattr(model, "class_rows", None)
    if declared is not None:
        axes = dict.fromkeys(declared, 0)
        if not own.keys() >= axes.keys():
            raise ConfigError(
                f"model: {qualified_name(model)}.class_rows names {', '.join(axes.keys() - own.keys())}, which it lacks"
            )
    elif "num_classes" in arguments:
        count = arguments["num_classes"]
        with preserved_generators():
            larger: Any = create(
                session.config.model, (Model, BaseModel), "model", **{**arguments, "num_classes": count + 1}
            )
        for name, value in larger.state_dict().items():
            if name in own and value.shape != own[name].shape:
                pairs = enumerate(zip(own[name].shape, value.shape))
                changed = [axis for axis, (size, more) in pairs if size != more]
                fits = len(changed) == 1 and own[name].shape[changed[0]] == count
                axes[name] = changed[0] if fits and value.dim() == own[name].dim() else None
    return OtherClasses(old, new, axes)


def fit_weights(
    model: nn.Module,
    weights: Weights,
    config: ExpConfig,
    as_it_is: bool | None = None,
    classes: OtherClasses | None = None,
) -> str:
    """Load weights into a model, in place.

    Args:
        model: the model. If it has them, these methods of :class:`exp.models.base.Model` are used:
            ``adapt_state_dict(state, path)``, which renames tensors of other projects; for training
            ``fit_state_dict(state, path)``, which changes shapes; and ``may_start_anew(name)``, which tells the
            parameters that may be missing when a training starts.
        weights: of :func:`read_weights`.
        config: the frozen configuration.
        as_it_is: whether the model is used without training, which needs an exact match; None: if the task needs
            weights.
        classes: how the classes of the weights differ from those of the data, for a training; None: they do not.

    Returns:
        A report for the user: how many tensors match, and which do not.

    Raises:
        ConfigError: the weights do not match the model, or are not finite.
    """
    path, own, task = weights.path, model.state_dict(), str(config.task.name)
    if as_it_is is None:
        as_it_is = task_class(config).needs_weights
    foreign: Any = model
    state: Any = weights.state
    if hasattr(model, "adapt_state_dict"):
        state = foreign.adapt_state_dict(state, path)
    if not as_it_is and hasattr(model, "fit_state_dict"):
        state = foreign.fit_state_dict(state, path)
    line = ""
    if classes is not None:
        state, line = classes.fit(state)
    fitting = {key: value for key, value in state.items() if key in own and value.shape == own[key].shape}
    missing = [key for key in own if key not in state]
    others = [key for key in state if key in own and key not in fitting]
    unknown = [key for key in state if key not in own]
    shapes = [f"{key} {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the model" for key in others]
    listed = {"missing in the file": missing, "other shape": shapes, "unknown to the model": unknown}
    count = f"{len(fitting)} of {len(own)} tensors"
    misfits = [f"{title}: {shortened(names)}" for title, names in listed.items() if names]
    may_be_new: Any = getattr(model, "may_start_anew", lambda _: False)
    rows: Container[str] = classes.axes if classes is not None else ()
    head_alone = all(name in rows or may_be_new(name) for name in [*missing, *others])
    reason = ""
    if as_it_is and not (head_alone and all(map(may_be_new, unknown)) if task == "features" else not misfits):
        # Features are the output of the backbone, so the head may differ.
        reason = f"task={task} needs all weights of the model, and {path} does not fit it"
        differs = ", ".join(config.record.differs)
        cure = f"not as in the run: {differs}" if differs else "use the settings with which the weights were trained"
    elif not as_it_is and not (fitting and (head_alone or config.init_partial)):
        reason = f"init_from: {path} fits the model only in part: more than a new head is missing or differs"
        cure = "init_partial=true starts the rest from random weights" if fitting else "it holds another model"
    if reason:
        raise ConfigError("; ".join([f"{reason}: {count}", cure, *misfits]))
    odd = checkpoint.not_finite(fitting, {name for name, _ in model.named_parameters()})
    if odd:
        raise ConfigError(
            f"init_from: {path} has weights that are not finite: {shortened(odd, 1)}; their training has diverged, use "
            "other weights"
        )
    model.load_state_dict(fitting, strict=False)
    report = f"init_from: {count} from {path}"
    if path.is_file() and seal_of(path) is None:
        report += f" ({checkpoint.NO_DIGEST})"
    trusted = [f"model.{key}={text_of(config.model.get(key))}" for key in getattr(model, "taken_on_trust", ())]
    if trusted and config.record.trained_in is None:
        report += f"\n  taken on trust, since the weights cannot confirm them: {', '.join(trusted)}"
    return report if as_it_is else "\n  ".join([report, *misfits, *[line] * bool(line)])


def rank_logger(session: Session) -> MMLogger:
    """MMEngine's logger of this run, set up to write to the log of the rank instead of the terminal."""
    logger: MMLogger = MMLogger.get_instance(session.unique_name)
    logger.setLevel("INFO")
    logger.handlers[:] = list(logging.getLogger().handlers)
    return logger


def build_evaluator(session: Session, data: Data, detailed: bool = False) -> Evaluator:
    """Combine the metrics of the data and those of the configuration.

    Args:
        session: the session.
        data: of :func:`build_data`.
        detailed: compute tables, too, for ``task=eval``.

    Raises:
        ConfigError: an object is not a metric, two metrics have the same name, or none has the name in ``metric``.
    """
    own = data.metrics(detailed)
    further = [create(config, Metric, f"metrics[{number}]") for number, config in enumerate(session.config.metrics)]
    return Evaluator([*(own if isinstance(own, (list, tuple)) else [own]), *further], session.config.metric)


def make_result(
    session: Session,
    metrics: dict[str, float],
    evaluator: Evaluator | None,
    selected_by: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The content of ``result.json`` for a completed task.

    Args:
        session: the session.
        metrics: all metrics by name.
        evaluator: has the name of the main metric, which is reported; None: there is none.
        selected_by: the main metric on validation data, by which sweeps and reports rank runs. None: the task has not
            measured it, so its runs are not ranked.
        **extra: further keys, such as steps and epochs.

    Raises:
        RunError: the main metric is not finite. Other metrics may be NaN, for example the precision of a class that
            does not occur; they are null in the file.
    """
    config = session.config
    part = _measured_part(config)
    result = blank_result(config)
    metric_name = "" if evaluator is None else evaluator.metric_name
    value = metrics.get(metric_name)
    if value is not None and not math.isfinite(value):
        measured_on = extra.get("measured_on", result["measured_on"])
        raise RunError(
            f"{measured_on} {metric_name} is {value}: the model's outputs or the data are not finite, or no sample "
            "could be measured; check the data, and whether the training has diverged (lower optim.lr)"
        )
    result.update(
        status="completed",
        metrics=metrics,
        metric_name=metric_name,
        metric=value,
        metric_units={} if evaluator is None else evaluator.units,
        greater_is_better=evaluator is not None and evaluator.greater_is_better,
        published=None if part else _published(config),
        trained_in=config.record.trained_in,
        differs=list(config.record.differs),
        device_type=session.device.type,
        devices=[{key: device.get(key) for key in ("name", "index", "host")} for device in session.devices],
        process_group=session.distributed.process_group,
        fallback=session.distributed.fallback,
        wrapper=config.wrapper.kind if session.info.world_size > 1 else "none",
        wall_s=time.time() - session.started,
        restarts=session.info.restart_count,
    )
    if session.weights is not None and session.weights.files:
        result["weights"] = {"source": config.init_from, "files": session.weights.files}
    if session.weights is not None and task_class(config).needs_weights:
        result["checkpoint"] = str(session.weights.path)
        seal = seal_of(session.weights.path)
        result["checkpoint_digest"], result["checkpoint_run"] = (None, None) if seal is None else seal
    result.update(extra)
    if part:
        result["measured_on"] += f" ({part})"
    roles = {"selected_by": ("validation", selected_by), "reported": (result["measured_on"], result["metric"])}
    for role, (split, number) in roles.items():
        known = {"metric": result["metric_name"], "measured_on": split, "value": number}
        result[role] = None if number is None else known
    return result


def _published(config: Any) -> dict[str, Any] | None:
    """The published metrics for these data and this horizon; None: the experiment has none."""
    horizon = config.data.get("horizon")
    if horizon not in config.published or config.published_for != config.data.get("name"):
        return None
    figures: Any = OmegaConf.to_container(config.published[horizon])
    return {**figures, "source": config.published_source, "differs": list(config.record.published_differs)}


def split_in_use(session: Session, data: Data, split: str) -> Any:
    """A split as a dataset that is indexed by a whole batch; with ``debug`` only a part of the split.

    The samples of the part are spread evenly over the split, since files are often sorted by class or time.

    Args:
        session: the session.
        data: the data set.
        split: ``train``, ``val`` or ``test``; with ``debug.overfit`` always the training split.

    Raises:
        ConfigError: the split is missing, or is not a dataset.
        DataError: the split is empty.
    """
    config, debug = session.config, session.config.debug
    overfit = debug.overfit and config.global_batch_size is not None  # other tasks than training have no batch size
    dataset = split_of(data, "train" if overfit else split, config.seed)
    if overfit or split == "train":
        batches, size = debug.train_batches, config.global_batch_size or 1
    else:
        batches, size = debug.eval_batches, data.eval_batch_size * session.info.world_size
    if batches is None or (batches * size >= len(dataset) and not overfit):
        return dataset
    return _Part(dataset, min(batches * size, len(dataset)), same=overfit)


def _measured_part(config: Any) -> str | None:
    """The part of the split on which a run is tested; None: the whole split."""
    if config.debug.overfit and config.global_batch_size is not None:
        return "training batches"
    return None if config.debug.eval_batches is None else f"{config.debug.eval_batches} of its batches"


class _Part(Dataset[Any]):
    """``count`` samples of a dataset that is indexed by a whole batch, spread evenly over it.

    Args:
        dataset: the whole dataset.
        count: number of samples, at most the length of ``dataset``.
        same: return the samples of epoch 0, with the same augmentation, in every epoch and in evaluation.
    """

    takes_batches = True

    def __init__(self, dataset: Any, count: int, same: bool) -> None:
        self.dataset, self.count, self.same = dataset, count, same
        self.needs_epoch = getattr(dataset, "needs_epoch", False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, keys: torch.Tensor) -> Any:
        given = keys.reshape(len(keys), -1)  # (B, 1), or (B, 2) with the epoch
        numbers, epochs = given[:, 0] * len(self.dataset) // self.count, given[:, -1]
        if self.same:
            epochs = torch.zeros_like(epochs)
        with_epoch = keys.dim() == 2 or (self.same and self.needs_epoch)
        return self.dataset[torch.stack([numbers, epochs], dim=1) if with_epoch else numbers]


# -- of MMEngine's registries ------------------------------------------------------------------------------------------


def import_plugins(plugins: Sequence[str]) -> None:
    """Import the modules and packages in ``plugins``, so that their classes are in MMEngine's registries.

    Raises:
        ConfigError: a module does not exist.
        UnavailableError: importing a module fails.
    """
    for name in plugins:
        if find_own_module(name) is None:
            raise ConfigError(f"plugins: there is no module {name}; is its folder on PYTHONPATH?")
        try:
            importlib.import_module(name)
        except Exception as error:  # importing somebody's module may raise anything
            raise UnavailableError(
                f"plugins: the module {name} does not import ({type(error).__name__}: {error})"
            ) from error


def registered(key: str, name: str, registry: Registry, base: type | tuple[type, ...]) -> Any:
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
    known = registry.module_dict
    found = known.get(without_scope(name))
    if found is not None:
        return found
    if "." not in name:
        public = sorted(each for each in known if not each.startswith("_"))
        raise ConfigError(f"{key}={name} is not known{nearest(name, public)}; known are {', '.join(public)}")
    return resolve(key, name, base)


def check_monitor(place: str, monitor: str, names: Sequence[str]) -> None:
    """Refuse to monitor a metric that is not measured.

    Args:
        place: the hook or schedule, for the message.
        monitor: name of the metric.
        names: names of all metrics that are measured.

    Raises:
        ConfigError: ``monitor`` is not in ``names``.
    """
    if monitor not in names:
        raise ConfigError(
            f"{place} has monitor={monitor}{nearest(monitor, list(names))}, but the metrics are {', '.join(names)}"
        )


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


_OURS = (SyncBuffersHook, EarlyStoppingHook, ProfilerHook)


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
    for number, each in enumerate(configs):
        key, config = f"hooks[{number}]", dict(each)
        name, priority = config.pop("type"), config.pop("priority", None)
        cls = registered(f"{key}.type", name, HOOKS, Hook)
        for base in cls.__mro__:
            if base is not Hook and base.__module__.startswith("mmengine.") and base.__name__ in REFUSED:
                raise ConfigError(refused_hook(base.__name__))
        if cls is mmengine.hooks.EarlyStoppingHook and config.setdefault("monitor", metric) == metric:
            config.setdefault("rule", "greater" if greater_is_better else "less")
        ours = (own for own in _OURS if cls.__module__.startswith("mmengine.") and own.__name__ == cls.__name__)
        try:
            hook: Hook = make(next(ours, cls), key, config)
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


def build_loggers(session: Session) -> list[Any]:
    """Make the visualization backends in ``logger.vis_backends``, on rank 0; other ranks get an empty list.

    Raises:
        ConfigError: a class is not a visualization backend, does not take its arguments, or would write outside the run
            folder; the message has the key.
        UnavailableError: the module of a class cannot be imported.
    """
    if not session.distributed.is_main:
        return []
    folder = session.folder.path
    found: list[Any] = []
    for number, config in enumerate(session.config.logger.vis_backends):
        key = f"logger.vis_backends[{number}]"
        content: Any = OmegaConf.to_container(config, resolve=True)
        _check_paths(key, content, folder)
        if "_target_" in content:
            found.append(create(content, BaseVisBackend, key))
            continue
        content["save_dir"] = str(folder / (content.get("save_dir") or "vis_data"))
        name = str(content.pop("type", None))
        found.append(make(registered(f"{key}.type", name, VISBACKENDS, BaseVisBackend), key, content))
    return found


def _check_paths(key: str, value: Any, folder: Path) -> None:
    """Refuse a path outside the run folder, since somebody else may have written the configuration."""
    if isinstance(value, (dict, list)):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_paths(f"{key}.{name}" if isinstance(value, dict) else f"{key}[{name}]", item, folder)
    elif isinstance(value, str) and (value.startswith(("/", "~", "file:")) or ".." in Path(value).parts):
        path = folder / Path(value.partition("file:")[2] or value).expanduser()
        if folder not in Path(os.path.normpath(path)).parents:
            raise ConfigError(f"{key}={value} is outside the run folder; use a path below ${{output_dir}}")
