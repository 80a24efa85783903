"""Which checkpoint a training goes on from, and what is not as it was when that was written."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from exp.config.differences import Change, as_plain, changes, refusal, trains_on
from exp.config.schema import OptimConfig
from exp.data.fingerprint import differences
from exp.data.places import shortened
from exp.engine import checkpoint
from exp.engine.device import seed_everything, set_rng_state
from exp.engine.optim import parameter_groups
from exp.engine.wrapper import unwrapped
from exp.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session

__all__ = ["carry_over", "compare", "find_checkpoint", "restore", "saved_order"]

logger = logging.getLogger(__name__)

_PARTS = ("meta", "state_dict", "config", "optimizer", "param_schedulers", "rng", "best")


def find_checkpoint(session: Session, wanted: str, parameters: Container[str]) -> tuple[Path | None, Any]:
    """The checkpoint to continue from; rank 0 chooses, so that all ranks take the same. A collective.

    Args:
        session: the session.
        wanted: ``auto``, a checkpoint or a run folder.
        parameters: names of the model's parameters.

    Returns:
        Its path and content; both None where ``auto`` finds none.

    Raises:
        ConfigError: it was asked for by name, and does not open, or no training can go on from it.
    """
    named = wanted != "auto" and Path(wanted).is_file()
    folder = session.folder.checkpoints if wanted == "auto" else Path(wanted) / "checkpoints"
    candidates = [Path(wanted)] if named else checkpoint.list_checkpoints(folder)
    path, content, trouble = None, None, None
    for each in candidates if session.distributed.is_main else ():
        try:
            content, trouble = checkpoint.read(each, whole=False), None
            lacking = [key for key in _PARTS if not isinstance(content, Mapping) or key not in content]
            odd = [] if lacking else checkpoint.not_finite(content["state_dict"], parameters)
            if lacking:
                trouble = f"{each} is no training checkpoint of exp: it has no {', '.join(lacking)}"
            elif odd:
                trouble = f"{each} has weights that are not finite: {shortened(odd, 1)}"
        except CheckpointError as error:
            trouble = str(error)
        if trouble is None:
            path = each
            break
        if not named:
            session.say(f"resume: skipped: {trouble.splitlines()[0]}")
    path, trouble = session.distributed.gather((path, trouble))[0]
    if named and trouble is not None:
        raise ConfigError(f"resume: {trouble}; take an older one, or resume=auto; init_from={wanted} takes its weights")
    if path is None:
        if wanted != "auto":
            raise ConfigError(f"resume={wanted} is neither a checkpoint nor a run folder with one that opens")
        session.say(f"resume=auto: no checkpoint in {folder}; starting anew")
        return None, None
    return path, content if session.distributed.is_main else checkpoint.read(path, whole=False, check=False)


def compare(session: Session, content: Mapping[str, Any], source: Path) -> tuple[Change, ...]:
    """What this run does not do as the one that wrote a checkpoint. A collective.

    Args:
        session: the session.
        content: of the checkpoint.
        source: its path.

    Raises:
        ConfigError: a setting would make another training of it.
        DataError: the data files hold something else, and ``resume_changed_data`` does not allow it.
    """
    config = session.config
    found = changes(content["config"], as_plain(config))
    if found.refused:
        raise ConfigError(refusal(found.refused, source))
    files, own = content.get("data_files"), session.data_files  # its own on rank 0 alone
    others = [] if files is None or own is None else differences(files, own)
    others = session.distributed.gather(others)[0]
    if not others:
        return found.allowed
    shown = shortened(others, 3)
    if not config.resume_changed_data:
        raise DataError(
            f"resume: {source} was trained on other data: {shown}; bring them back, begin anew from its weights with "
            f"init_from={source} and another output_dir, or go on with these with resume_changed_data=true"
        )
    return (*found.allowed, Change("contents of data", "as the training began", shown))


def restore(runner: Any, content: Mapping[str, Any], source: Path) -> None:
    """Continue from a training checkpoint, once loops and schedulers are built.

    Args:
        runner: the runner.
        content: of :func:`find_checkpoint`; :func:`compare` has looked at it.
        source: where it was read, for messages.

    Raises:
        CheckpointError: it does not fit this model.
        ConfigError: a hook whose weights are in it is gone, or the schedule cannot go on with the new settings.
    """
    meta, session, loop = content["meta"], runner.session, runner.train_loop
    lacking = sorted(set(meta.get("weights_of_hooks", ())) - set(runner.hooks_at("before_save_checkpoint")))
    if lacking:
        raise ConfigError(
            f"resume: {source} was trained with the hooks {', '.join(lacking)}, which put weights of their own "
            "into the checkpoint; set hooks as it was, or start from its weights with init_from"
        )
    model = unwrapped(runner.model)
    order = saved_order(model, content)
    content = checkpoint.complete(content, model, order)
    runner.call_hook("after_load_checkpoint", checkpoint=content)
    for key, value in content.get("message_hub", {}).items():
        runner.message_hub.update_info(key, value)
    try:
        model.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        raise CheckpointError(f"{source} does not fit the model of this run: {error}") from error
    # An epoch of other data may be shorter.
    samples = min(meta["samples"], loop.steps_per_epoch * meta["global_batch_size"])
    loop.restore(meta["epoch"], meta["step"], samples, meta["validation_due"])
    carry_over(runner, content, order, _takes_another_course(runner, meta))
    if meta["stopped"] and not trains_on(session.changed):
        loop.stop_training = True
        session.say("resume: this training was stopped early; with a larger patience it would go on")
    states = content["rng"]
    if runner.world_size == len(states):
        set_rng_state(states[runner.rank], runner.backend)
    else:
        seed_everything(session.config.seed + runner.rank + 1000003 * meta["step"], runner.backend)
        logger.warning("resumed at world size %d, not %d: random states start anew", runner.world_size, len(states))
    runner.checkpoints.load_state_dict(content["best"])
    runner.checkpoints.take_over_best(runner, source)


# -- optimizer and schedules -------------------------------------------------------------------------------------------


def saved_order(model: nn.Module, content: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters in the order in which the optimizer's state in a checkpoint counts them.

    Raises:
        CheckpointError: its groups are not those of this model.
    """
    settings = OmegaConf.merge(OmegaConf.structured(OptimConfig), content["config"]["optim"])
    groups = [group["params"] for group in parameter_groups(model, settings)]
    if [len(group) for group in groups] != [len(group["params"]) for group in content["optimizer"]["param_groups"]]:
        raise CheckpointError("resume: the optimizer's state is not of this model; use init_from to start from weights")
    return [parameter for group in groups for parameter in group]


def _follows_validations(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "need_val_args", False))


def _takes_another_course(runner: Any, meta: Mapping[str, Any]) -> bool:
    """Whether rates, decay or the schedule are others than those that the state was saved with.

    The length of a training counts where there are schedules, which may end with it.
    """
    keys = {change.key for change in runner.session.changed}
    if any(key.startswith(("optim.", "schedule.")) for key in keys):
        return True
    other_length = {"max_epochs", "max_steps"} & keys or meta["steps_per_epoch"] != runner.train_loop.steps_per_epoch
    return bool(other_length) and not all(map(_follows_validations, runner.param_schedulers))


def carry_over(runner: Any, content: Mapping[str, Any], order: list[nn.Parameter], anew: bool) -> None:
    """Give the optimizer its moments from a checkpoint; its rates, and the place in the schedules, likewise, or
    those that they would have by now.

    Args:
        runner: with optimizer and schedulers as they are at step 0, and the loop where the training goes on.
        content: of the checkpoint.
        order: of :func:`saved_order`.
        anew: whether optimizer or schedule have other settings than those of the checkpoint.

    Raises:
        ConfigError: they have, and the rates so far depended on validations.
    """
    wrapper, schedulers, saved = runner.optim_wrapper, runner.param_schedulers, content["optimizer"]
    if anew and any(map(_follows_validations, schedulers)):
        raise ConfigError(
            "resume: the schedule follows the validations so far (ReduceOnPlateau), so optim, schedule, max_epochs, "
            "max_steps and the number of samples cannot change with it; set them as they were, or begin anew from the "
            "weights with init_from"
        )
    trained = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    place = {parameter: index for index, parameter in enumerate(trained)}
    groups = wrapper.optimizer.state_dict()["param_groups"] if anew else saved["param_groups"]
    state = {place[order[index]]: value for index, value in saved["state"].items()}
    wrapper.load_state_dict({**saved, "state": state, "param_groups": groups})
    if anew:
        _replay(schedulers, runner.train_loop)
    else:
        for scheduler, each in zip(schedulers, content["param_schedulers"]):
            scheduler.load_state_dict(each)


def _replay(schedulers: list[Any], loop: Any) -> None:
    """Step the schedulers as MMEngine's ParamSchedulerHook does, up to where the training goes on.

    With data of another size, schedules by step have those steps behind them that the epochs would have had, as the
    schedule ends with the last one; where ``max_steps`` ends it, those that were taken.
    """
    length, steps = loop.steps_per_epoch, loop.iter + (0 if loop.ends_by_steps else loop.ahead)
    for step in range(1, max(steps, loop.epoch * length) + 1 if schedulers else 0):
        epoch, rest = divmod(step, length)
        for scheduler in sorted(schedulers, key=lambda each: bool(each.by_epoch)):
            if (not rest and epoch <= loop.epoch) if scheduler.by_epoch else step <= steps:
                scheduler.step()
