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


@pytest.fixture
def trained(make_runner):
    """Makes a runner after ``steps`` with these settings, and the checkpoint that it would write."""

    def make(schedules=(), steps=0, **optim):
        config = OmegaConf.merge(OmegaConf.structured(OptimConfig), optim)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))  # a backbone of one layer, and a head
        model.num_layers, model.layer_of = 1, lambda name: 0 if name.startswith("0.") else None
        runner = make_runner(model=model, optimizer=build_optimizer(model, config), max_epochs=3)
        runner.session.config.optim = config
        runner.train_loop.steps_per_epoch = PER_EPOCH
        runner.param_schedulers = runner.build_param_scheduler(copy.deepcopy(list(schedules)))
        for step in range(1, steps + 1):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, (step + index) % 3 - 1.0)
            runner.optim_wrapper.optimizer.step()
            for scheduler in runner.param_schedulers:
                if not scheduler.by_epoch or step % PER_EPOCH == 0:
                    scheduler.step()
        content = {"optimizer": copy.deepcopy(runner.optim_wrapper.state_dict()),
                   "config": {"optim": OmegaConf.to_container(config)}}  # fmt: skip
        return runner, content

    return make


@pytest.mark.parametrize("step", [2, 4, 7])
def test_rates_are_those_of_a_training_that_always_had_the_new_ones(trained, step):
    new = {"lr": 0.02, "weight_decay": 0.3}
    _, content = trained(SCHEDULES, step, lr=0.1)
    straight, _ = trained(SCHEDULES, step, **new)
    later, _ = trained(SCHEDULES, **new)
    later.train_loop.restore(step // PER_EPOCH, step, step % PER_EPOCH * 4)
    carry_over(later, content)
    ours, theirs = (each.optim_wrapper.state_dict() for each in (later, straight))
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], content["optimizer"]["state"], rtol=0, atol=0)
    states = [[scheduler.state_dict() for scheduler in each.param_schedulers] for each in (later, straight)]
    assert states[0] == states[1]  # and so they go on


def test_moments_stay_with_their_parameters_where_groups_change(trained):
    first, content = trained(steps=3)
    later, _ = trained(backbone_lr_scale=0.1, decay_norm_and_bias=False, weight_decay=0.1)
    carry_over(later, content)
    ours, theirs = (each.optim_wrapper.optimizer for each in (later, first))
    assert len(ours.param_groups) == 4
    for mine, other in zip(later.model.parameters(), first.model.parameters()):
        torch.testing.assert_close(ours.state[mine], theirs.state[other], rtol=0, atol=0)


def test_an_option_that_needs_what_has_not_been_kept_is_refused(trained):
    _, adam = trained(steps=3)
    with pytest.raises(ConfigError, match=r"optim.options=\{'amsgrad': True\}"):
        carry_over(trained(options={"amsgrad": True})[0], adam)
    carry_over(trained(options={"betas": [0.5, 0.9]})[0], adam)
    _, sgd = trained(steps=3, type="SGD", options={})
    carry_over(trained(type="SGD", options={"momentum": 0.9})[0], sgd)


def test_a_schedule_that_follows_validations_cannot_be_replayed(trained):
    with pytest.raises(ConfigError, match="ReduceOnPlateau"):
        carry_over(*trained([{"type": "ReduceOnPlateauLR", "monitor": "mse"}]))


def test_the_length_counts_only_where_there_are_schedules(trained):
    length = [Change("max_steps", 3, 5), Change("nproc", 1, 2)]
    assert not changes_course(length, [])
    assert changes_course(length, trained(SCHEDULES)[0].param_schedulers)
    assert changes_course([Change("optim.lr", 1, 2)], [])
