"""The state of an optimizer, carried over to one with other settings; schedules go on as if it had always had these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Mapping

import torch
from omegaconf import OmegaConf
from torch import nn

from exp.config.schema import OptimConfig
from exp.engine.optim import make_optimizer, parameter_groups
from exp.engine.wrapper import unwrapped
from exp.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from exp.config.resuming import Change

__all__ = ["carry_over", "changes_course", "saved_order"]

_COURSE = ("optim.", "schedule.")
_LENGTH = frozenset({"max_epochs", "max_steps"})


def changes_course(changed: Iterable[Change], schedulers: list[Any], other_epochs: bool = False) -> bool:
    """Whether optimizer or schedule have other settings than those that their state was saved with.

    The length of a training counts where there are schedules, which may end with it.

    Args:
        changed: keys.
        schedulers: of the run.
        other_epochs: whether an epoch has another number of steps now.
    """
    keys = [change.key for change in changed]
    planned = any(not _follows_validation(scheduler) for scheduler in schedulers)
    return any(key.startswith(_COURSE) for key in keys) or (planned and (other_epochs or not _LENGTH.isdisjoint(keys)))


def _follows_validation(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "need_val_args", False))


def carry_over(runner: Any, content: Mapping[str, Any]) -> None:
    """Give the optimizer its moments from a checkpoint, and its groups the rates that they would have by now.

    Args:
        runner: with optimizer and schedulers as they are at step 0, and the loop where the training goes on.
        content: of the checkpoint; it has the configuration that it was written with.

    Raises:
        ConfigError: an option needs state that has not been kept, or the course so far depended on validations.
        CheckpointError: the optimizer's state is not of this model.
    """
    wrapper, saved, config = runner.optim_wrapper, content["optimizer"], runner.session.config.optim
    old = _settings(content)
    if any(map(_follows_validation, runner.param_schedulers or [])):
        raise ConfigError(
            "resume: the schedule follows the validations so far (ReduceOnPlateau), so optim, schedule, max_epochs, "
            "max_steps and the number of samples cannot change with it; set them as they were, or begin anew from the "
            "weights with init_from"
        )
    _try_state(old, config)
    before = parameter_groups(unwrapped(runner.model), old)
    if [len(group["params"]) for group in before] != [len(group["params"]) for group in saved["param_groups"]]:
        raise CheckpointError("resume: the optimizer's state is not of this model; use init_from to start from weights")
    order = [parameter for group in before for parameter in group["params"]]
    groups = wrapper.optimizer.param_groups
    place = {id(each): index for index, each in enumerate(each for group in groups for each in group["params"])}
    state = {place[id(order[index])]: value for index, value in saved["state"].items()}
    wrapper.load_state_dict({**saved, "state": state, "param_groups": wrapper.optimizer.state_dict()["param_groups"]})
    loop = runner.train_loop
    _replay(runner, loop.iter + (0 if loop.ends_by_steps else loop.ahead), loop.epoch)


def saved_order(runner: Any, content: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters in the order in which the optimizer's state in a checkpoint counts them."""
    groups = parameter_groups(unwrapped(runner.model), _settings(content))
    return [parameter for group in groups for parameter in group["params"]]


def _settings(content: Mapping[str, Any]) -> Any:
    return OmegaConf.merge(OmegaConf.structured(OptimConfig), content["config"]["optim"])


def _replay(runner: Any, steps: int, epochs: int) -> None:
    """Step the schedulers as MMEngine's ParamSchedulerHook does, up to where the training goes on.

    Args:
        runner: the runner.
        steps: those that schedules by step have behind them. With data of another size these are those that the epochs
            would have had, as the schedule ends with the last one; or, where ``max_steps`` ends it, those taken.
        epochs: completed.
    """
    schedulers = runner.param_schedulers or []
    by_epoch = [each for each in schedulers if each.by_epoch]
    by_step = [each for each in schedulers if not each.by_epoch]
    if not schedulers:
        return
    per_epoch = runner.train_loop.steps_per_epoch
    ended = 0
    for step in range(1, steps + 1):
        for scheduler in by_step:
            scheduler.step()
        if step % per_epoch == 0 and ended < epochs:
            ended += 1
            for scheduler in by_epoch:
                scheduler.step()
    for _ in range(ended, epochs):
        for scheduler in by_epoch:
            scheduler.step()


def _try_state(old: Any, new: Any) -> None:
    """Find out with one number whether an optimizer with the new options can go on with the state of the old ones."""
    if old.options == new.options:
        return
    optimizers, parameters = [], []
    for config in (old, new):
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        parameters.append(parameter)
        optimizers.append(make_optimizer([{"params": [parameter]}], config))
    try:
        optimizers[0].step()
    except Exception:  # noqa: BLE001 - one of those that want more than gradients: nothing to be learnt here
        return
    try:
        kept = optimizers[0].state_dict()["state"]
        optimizers[1].load_state_dict({**optimizers[1].state_dict(), "state": kept})
        optimizers[1].step()
    except Exception as error:
        raise ConfigError(
            f"resume: optim.options={dict(new.options)} need state that {old.type} has not kept with "
            f"{dict(old.options)} ({type(error).__name__}: {error}); set them as they were, or begin anew from the "
            "weights with init_from"
        ) from error
