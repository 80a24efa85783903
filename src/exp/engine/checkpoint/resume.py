"""Resumes a training: finds its checkpoint, compares the settings, and restores the state.

If the configuration or the data of a resumed training differ from those in the checkpoint, the differences are listed,
or refused.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Container, Mapping

import torch
from omegaconf import OmegaConf

from exp.config.diff import Change, continues_after_early_stop, resume_changes, resume_error
from exp.config.resolve import to_plain
from exp.config.schema import OptimConfig
from exp.data.fingerprint import differences, shortened
from exp.distributed import seed_everything, set_rng_state
from exp.engine.checkpoint.reader import NO_DIGEST, list_checkpoints, load_shards, nonfinite_tensors, read_checkpoint
from exp.engine.optim import parameter_groups
from exp.engine.trainer import Trainer
from exp.engine.wrapper import unwrapped
from exp.errors import CheckpointError, ConfigError, DataError
from exp.runs.files import read_seal

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session


logger = logging.getLogger(__name__)
_REQUIRED_KEYS = (
    "meta", "state_dict", "config", "optimizer", "param_schedulers", "rng", "losses", "best", "message_hub",
)  # fmt: skip
"""What :meth:`exp.engine.trainer.Trainer.training_checkpoint` always writes; :func:`_restore` reads it without a
default, so that a name that is changed on one side only is noticed."""


def find_resume(trainer: Trainer) -> tuple[str | None, Any]:
    """The checkpoint to resume from, and the function ``load`` for :meth:`Trainer.train`; (None, None) if none."""
    session = trainer.session
    # If this run was restarted before it began, it has saved nothing; checkpoints in the folder are of an earlier run.
    # A node that comes later is started for the first time, but not the run.
    may_restart = session.info.restart_count > 0 or session.config.launcher.min_nnodes is not None
    restarted = may_restart and not session.has_pending
    path: Path | None = None
    parameters = {name for name, _ in unwrapped(trainer.model).named_parameters()}
    # A restarted run first looks for its own checkpoints, then for the one in config.resume.
    for source_name in dict.fromkeys(["auto"] * restarted + [session.config.resume]):
        if source_name is not None and path is None:
            path, content = _find_checkpoint(session, source_name, parameters)
    if path is None:
        return None, None
    session.resumed_from, session.changed = path, _compare(session, content, path)
    unchecked = "" if read_seal(path) else f" ({NO_DIGEST})"
    session.print(f"resume: from {path}, after step {content['meta']['step']}{unchecked}")
    for change in session.changed:
        session.print(f"  changed: {change}")
    return str(path), functools.partial(_restore, trainer, content, path)


def _find_checkpoint(session: Session, source_name: str, parameters: Container[str]) -> tuple[Path | None, Any]:
    """Find the checkpoint to resume from. Rank 0 chooses, so that all ranks take the same. A collective.

    Args:
        session: the session.
        source_name: ``auto``, a checkpoint or a run folder.
        parameters: names of the model's parameters.

    Returns:
        Its path and content; both None if ``auto`` finds none.

    Raises:
        ConfigError: the checkpoint that the user has named cannot be read or resumed, or none of those in the folder
            can.
    """
    named = source_name != "auto" and Path(source_name).is_file()
    folder = session.folder.checkpoints if source_name == "auto" else Path(source_name) / "checkpoints"
    candidates = [Path(source_name)] if named else list_checkpoints(folder)
    path, content, problem = None, None, None
    for candidate in candidates if session.distributed.is_main else ():
        try:
            content = _read_training(candidate, session.config.checkpoint.trusted, parameters)
        except CheckpointError as error:
            problem = error
            if not named:
                session.print(f"resume: skipped: {error.headline}")
        else:
            path = candidate
            break
    path, problem = session.distributed.gather((path, problem))[0]
    if path is not None:
        is_main = session.distributed.is_main
        return path, content if is_main else read_checkpoint(path, True, with_shards=False, check=False)
    if named and problem is not None:
        advice = f"use an older one, or resume=auto, or start from its weights with init_from={source_name}"
        raise ConfigError(f"resume: {problem.headline}", advice, problem.details, key="resume", file=source_name)
    if problem is not None:
        raise ConfigError(
            f"resume={source_name}: none of the {len(candidates)} checkpoints in {folder} can be used: "
            f"{problem.headline}",
            "restore one, or begin anew with another output_dir or overwrite=true",
            key="resume",
            file=folder,
        )
    if source_name != "auto":
        raise ConfigError(f"resume={source_name} is neither a checkpoint nor a run folder with one", key="resume")
    session.print(f"resume=auto: no checkpoint in {folder}; starting a new training")
    return None, None


def _read_training(path: Path, trusted: bool, parameters: Container[str]) -> Any:
    """Read the checkpoint of a training.

    Raises:
        CheckpointError: it cannot be read, lacks a part, or has weights that are not finite.
    """
    content = read_checkpoint(path, mapped=True, with_shards=False, trusted=trusted)
    missing = [key for key in _REQUIRED_KEYS if not isinstance(content, Mapping) or key not in content]
    if missing:
        raise CheckpointError(f"{path} is not a training checkpoint of exp: it has no {', '.join(missing)}", file=path)
    nonfinite = nonfinite_tensors(content["state_dict"], parameters)
    if nonfinite:
        raise CheckpointError(f"{path} has weights that are not finite: {shortened(nonfinite, 1)}", file=path)
    return content


def _compare(session: Session, content: Mapping[str, Any], source: Path) -> tuple[Change, ...]:
    """Compare configuration and data of this run with those in a checkpoint. A collective.

    Args:
        session: the session.
        content: the checkpoint.
        source: its path, for messages.

    Returns:
        The changes that are allowed.

    Raises:
        ConfigError: a key has changed that must stay the same within one training.
        DataError: the data files have changed, and ``resume_changed_data`` is false.
    """
    config = session.config
    config_changes = resume_changes(content["config"], to_plain(config))
    if config_changes.refused:
        raise resume_error(config_changes.refused, source)
    saved, current = content.get("data_files"), session.data_files  # the latter is known on rank 0 only
    differing = [] if saved is None or current is None else differences(saved, current)
    differing = session.distributed.gather(differing)[0]
    if not differing:
        return config_changes.allowed
    text = shortened(differing, 3)
    if not config.resume_changed_data:
        raise DataError(
            f"resume: {source} was trained on other data: {text}",
            f"restore them, start a new training from its weights with init_from={source} and another output_dir, or "
            "continue with these data with resume_changed_data=true",
        )
    return (*config_changes.allowed, Change("contents of data", "as the training began", text))


def _restore(runner: Any, checkpoint: dict[str, Any], source: Path) -> None:
    """Restore the state of a training checkpoint.

    Args:
        runner: the trainer, with loops and schedulers.
        checkpoint: of :func:`_find_checkpoint`, after :func:`_compare`; is emptied, so that its memory is free.
        source: the path of the checkpoint, for messages.

    Raises:
        CheckpointError: the optimizer's state in it does not match this model.
        RuntimeError: the weights in it do not match this model.
        ConfigError: a hook that has changed weights in it is missing, or the schedule does not allow the new settings.
    """
    content: Mapping[str, Any] = dict(checkpoint)
    checkpoint.clear()
    meta, session, loop = content["meta"], runner.session, runner.train_loop
    missing = sorted(
        set(meta.get("weights_of_hooks", ())) - set(runner.user_hooks_overriding("before_save_checkpoint"))
    )
    if missing:
        raise ConfigError(
            f"resume: {source} was trained with the hooks {', '.join(missing)}, which have put their own weights into "
            "the checkpoint; set the same hooks, or start a new training from its weights with init_from"
        )
    model = unwrapped(runner.model)
    order = checkpoint_param_order(model, content)
    content = load_shards(content, model, order)
    runner.call_hook("after_load_checkpoint", checkpoint=content)
    for key, value in content["message_hub"].items() if runner.shares_state else ():
        runner.message_hub.update_info(key, value)
    model.load_state_dict(content["state_dict"])
    # With other data the epoch may be shorter.
    samples = min(meta["samples"], loop.steps_per_epoch * meta["global_batch_size"])
    loop.restore(meta["epoch"], meta["step"], samples, meta["validation_due"])
    restore_optimizer(runner, content, order, _schedule_changed(runner, meta))
    if meta["stopped"] and not continues_after_early_stop(session.changed):
        loop.stop_training = True
        session.print("resume: this training was stopped early; with a larger patience it would continue")
    states, parts = content["rng"], loop.sampler.parts
    saved_parts = meta.get("parts") or [sum(parts) // len(states)] * len(states)
    runner.losses.load(content["losses"], saved_parts, parts, runner.rank, runner.device)
    if runner.world_size == len(states):
        set_rng_state(states[runner.rank], runner.backend)
    else:
        seed_everything(session.config.seed + runner.rank + 1000003 * meta["step"], runner.backend)
        logger.warning("resumed at world size %d, not %d: random states are new", runner.world_size, len(states))
    runner.checkpoints.load_state_dict(content["best"])
    runner.checkpoints.restore_best(runner, source)


def checkpoint_param_order(model: nn.Module, content: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters of a model in the order of the optimizer's state in a checkpoint.

    The order depends on the parameter groups, and so on the settings of the optimizer in the checkpoint.

    Args:
        model: the model, not wrapped.
        content: the checkpoint.

    Raises:
        CheckpointError: the groups in the checkpoint do not match the model.
    """
    settings = OmegaConf.merge(OmegaConf.structured(OptimConfig), content["config"]["optim"])
    groups = [group["params"] for group in parameter_groups(model, settings)]
    if [len(group) for group in groups] != [len(group["params"]) for group in content["optimizer"]["param_groups"]]:
        raise CheckpointError(
            "resume: the optimizer's state is of another model; use init_from to start from the weights"
        )
    return [parameter for group in groups for parameter in group]


def _follows_validations(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "need_val_args", False))


def _schedule_changed(runner: Any, meta: Mapping[str, Any]) -> bool:
    """Whether optimizer or schedule have other settings than in the checkpoint.

    Another length of the training counts as another setting of the schedules, which may depend on it, unless all of
    them only follow validations.
    """
    keys = {change.key for change in runner.session.changed}
    if any(key.startswith(("optim.", "schedule.")) for key in keys):
        return True
    other_length = {"max_epochs", "max_steps"} & keys or meta["steps_per_epoch"] != runner.train_loop.steps_per_epoch
    return bool(other_length) and not all(map(_follows_validations, runner.param_schedulers))


def restore_optimizer(
    runner: Any, content: Mapping[str, Any], order: list[nn.Parameter], settings_changed: bool
) -> None:
    """Restore the optimizer's state from a checkpoint, and the learning rates and positions of the schedules.

    If settings have changed (``settings_changed``), the learning rates are those that the new settings give at this
    step.

    Args:
        runner: the trainer, with optimizer and schedulers at step 0, and the loop at the position to resume from.
        content: the checkpoint.
        order: of :func:`checkpoint_param_order`.
        settings_changed: whether optimizer or schedule have other settings than in the checkpoint.

    Raises:
        ConfigError: settings have changed, and a schedule depends on the validations so far.
    """
    wrapper, schedulers, saved = runner.optim_wrapper, runner.param_schedulers, content["optimizer"]
    if settings_changed and any(map(_follows_validations, schedulers)):
        raise ConfigError(
            "resume: the schedule depends on the validations so far (ReduceOnPlateau), so optim, schedule, max_epochs, "
            "max_steps and the number of samples must not change; set them as they were, or start a new training from "
            "the weights with init_from"
        )
    trained = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    index_of = {parameter: index for index, parameter in enumerate(trained)}
    groups = wrapper.optimizer.state_dict()["param_groups"] if settings_changed else saved["param_groups"]
    # Copies, since torch keeps the tensors as they are on the CPU, and these are mapped from a file.
    state = {
        index_of[order[index]]: {
            name: moment.clone() if isinstance(moment, torch.Tensor) and moment.device.type == "cpu" else moment
            for name, moment in value.items()
        }
        for index, value in saved["state"].items()
    }
    wrapper.load_state_dict({**saved, "state": state, "param_groups": groups})
    if settings_changed:
        _fast_forward_schedulers(schedulers, runner.train_loop)
    else:
        for scheduler, state in zip(schedulers, content["param_schedulers"]):
            scheduler.load_state_dict(state)


def _fast_forward_schedulers(schedulers: list[Any], loop: Any) -> None:
    """Step the schedulers like MMEngine's ParamSchedulerHook, up to the position from which the training resumes.

    With data of another size, the epochs so far would have had another number of steps. Schedules by step make this
    number of steps, so that they end with the last epoch; if ``max_steps`` ends the training, they make the number of
    steps taken.
    """
    length, steps = loop.steps_per_epoch, loop.iter + (0 if loop.ends_by_steps else loop.step_offset)
    for step in range(1, max(steps, loop.epoch * length) + 1 if schedulers else 0):
        epoch, rest = divmod(step, length)
        for scheduler in sorted(schedulers, key=lambda each: bool(each.by_epoch)):
            if (not rest and epoch <= loop.epoch) if scheduler.by_epoch else step <= steps:
                scheduler.step()
