"""Other settings of optimizer and schedule in mid-training: as if they had been these from the beginning."""

from __future__ import annotations

import copy

import pytest
import torch
from omegaconf import OmegaConf

from exp.config.resuming import Change
from exp.config.schema import OptimConfig
from exp.engine.carry import carry_over, changes_course
from exp.engine.optim import build_optimizer
from exp.errors import ConfigError

PER_EPOCH = 4
SCHEDULES = [
    {"type": "LinearLR", "start_factor": 0.1, "end": 3, "by_epoch": False},
    {"type": "CosineAnnealingLR", "T_max": 3, "by_epoch": True, "convert_to_iter_based": True},
    {"type": "ExponentialLR", "gamma": 0.5, "begin": 1, "by_epoch": True},
]


class Two(torch.nn.Module):
    """A backbone of one layer and a head, with norms and biases."""

    num_layers = 1

    def __init__(self):
        super().__init__()
        self.layer, self.head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)

    def layer_of(self, name):
        return 0 if name.startswith("layer") else None


def parts(make_runner, schedules, **optim):
    """A runner with optimizer and schedulers at step 0."""
    config = OmegaConf.merge(OmegaConf.structured(OptimConfig), optim)
    torch.manual_seed(0)
    model = Two()
    runner = make_runner(model=model, optimizer=build_optimizer(model, config), max_epochs=3)
    runner.session.config.optim = config
    runner.train_loop.steps_per_epoch = PER_EPOCH
    runner.param_schedulers = runner.build_param_scheduler(copy.deepcopy(schedules))
    return runner


def train(runner, steps, first=0):
    for step in range(first + 1, first + steps + 1):
        for index, parameter in enumerate(runner.model.parameters()):
            parameter.grad = torch.full_like(parameter, (step + index) % 3 - 1.0)
        runner.optim_wrapper.optimizer.step()
        for scheduler in runner.param_schedulers:
            if not scheduler.by_epoch:
                scheduler.step()
        if step % PER_EPOCH == 0:
            for scheduler in runner.param_schedulers:
                if scheduler.by_epoch:
                    scheduler.step()


def saved(runner, step, **optim):
    config = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(OptimConfig), optim))
    return {
        "optimizer": copy.deepcopy(runner.optim_wrapper.state_dict()),
        "config": {"optim": config},
        "meta": {"step": step, "epoch": step // PER_EPOCH},
    }


@pytest.mark.parametrize("step", [2, 4, 7])
def test_rates_are_those_of_a_training_that_always_had_the_new_ones(make_runner, step):
    old, new = {"lr": 0.1}, {"lr": 0.02, "weight_decay": 0.3}
    first = parts(make_runner, SCHEDULES, **old)
    train(first, step)
    content = saved(first, step, **old)
    straight = parts(make_runner, SCHEDULES, **new)
    train(straight, step)
    later = parts(make_runner, SCHEDULES, **new)
    later.model.load_state_dict(first.model.state_dict())
    later.train_loop.restore(step // PER_EPOCH, step, step % PER_EPOCH * 4)
    carry_over(later, content)
    ours, theirs = (each.optim_wrapper.state_dict() for each in (later, straight))
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["param_groups"][0]["weight_decay"] == 0.3
    for index, value in content["optimizer"]["state"].items():
        assert torch.equal(ours["state"][index]["exp_avg"], value["exp_avg"])
    train(later, 3, first=step)
    train(straight, 3, first=step)
    rates = [each.optim_wrapper.optimizer.param_groups[0]["lr"] for each in (later, straight)]
    assert rates[0] == rates[1]


def test_moments_stay_with_their_parameters_where_groups_change(make_runner):
    first = parts(make_runner, [])
    train(first, 3)
    state = first.optim_wrapper.optimizer.state
    moments = {name: state[parameter]["exp_avg"].clone() for name, parameter in first.model.named_parameters()}
    new = {"backbone_lr_scale": 0.1, "decay_norm_and_bias": False, "weight_decay": 0.1}
    later = parts(make_runner, [], **new)
    carry_over(later, saved(first, 3))
    assert len(later.optim_wrapper.optimizer.param_groups) == 4
    state = later.optim_wrapper.optimizer.state
    for name, parameter in later.model.named_parameters():
        assert torch.equal(state[parameter]["exp_avg"], moments[name]), name


def test_an_option_that_needs_what_has_not_been_kept_is_refused(make_runner):
    first = parts(make_runner, [])
    train(first, 3)
    with pytest.raises(
        ConfigError, match=r"resume: optim.options=\{'amsgrad': True\} need state that Adam has not kept"
    ):
        carry_over(parts(make_runner, [], options={"amsgrad": True}), saved(first, 3))
    carry_over(parts(make_runner, [], options={"betas": [0.5, 0.9]}), saved(first, 3))
    sgd = {"type": "SGD", "options": {}}
    plain = parts(make_runner, [], **sgd)
    train(plain, 3)
    carry_over(parts(make_runner, [], type="SGD", options={"momentum": 0.9}), saved(plain, 3, **sgd))


def test_a_schedule_that_follows_validations_cannot_be_replayed(make_runner):
    runner = parts(make_runner, [{"type": "ReduceOnPlateauLR", "monitor": "mse"}])
    with pytest.raises(ConfigError, match="the schedule follows the validations so far"):
        carry_over(runner, saved(runner, 3))


def test_the_length_counts_only_where_there_are_schedules(make_runner):
    changed = [Change("max_steps", 3, 5), Change("nproc", 1, 2)]
    assert not changes_course(changed, [])
    assert changes_course(changed, parts(make_runner, SCHEDULES).param_schedulers)
    assert changes_course([Change("optim.lr", 1, 2)], [])
