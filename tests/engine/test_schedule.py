"""Schedules in real runs of 16 steps per epoch, in which MMEngine's own hook steps the schedulers.

And other settings of optimizer and schedule in mid-training: as if they had been these from the beginning.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from exp.config.schema import OptimConfig
from exp.config.sources import register
from exp.engine.checkpoint.resume import checkpoint_param_order, restore_optimizer
from exp.engine.optim import build_optimizer
from exp.engine.schedules import build_schedulers, vanished_rate
from exp.errors import ConfigError
from tests.engine.conftest import Line, Mse, Spy

CONF = Path(__file__).parents[2] / "conf" / "schedule"
SCALES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
LR = 2e-3


def groups(scales):
    """An optimizer whose groups learn at parts of one rate, as layer_decay and backbone_lr_scale leave them."""
    parts = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": LR * float(scale)} for scale in scales]
    return torch.optim.Adam(parts, lr=LR)


@pytest.fixture
def rates(make_runner):
    """The rate of the first group at each optimizer step; the other groups keep their part of it."""

    def run(schedulers, scales=SCALES, max_epochs=3, **options):
        model, optimizer = Line(), groups(scales)
        spy = Spy(lambda _: [group["lr"] for group in optimizer.param_groups])
        model.others = torch.nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
        make_runner(model, hooks=[spy], schedulers=schedulers, optimizer=optimizer, max_epochs=max_epochs,
                    **options).train()  # fmt: skip
        seen = torch.tensor(spy.seen, dtype=torch.float64)
        torch.testing.assert_close(seen, seen[:, :1] * scales, rtol=1e-9, atol=1e-18)
        return seen[:, 0]

    return run


def configured(name, warmup=5, **length):
    """The schedulers of one of our files."""
    register()  # resolvers
    root = OmegaConf.create({"schedule": OmegaConf.load(CONF / f"{name}.yaml"), "optim": {"lr": LR}, **length})
    root.schedule.warmup_steps = warmup
    return OmegaConf.to_container(root.schedule, resolve=True)["param_scheduler"]


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_schedule_keeps_the_ratio_of_the_groups_rates(name, rates):
    seen = rates(configured(name, max_epochs=3, max_steps=48))
    assert len(seen) == 48
    assert name == "constant" or seen.max() > 1.5 * seen[-1]


@pytest.mark.parametrize(("epochs", "steps"), [(None, 20), (3, None), (3, 20), (1, 40)])
@pytest.mark.parametrize("name", ["cosine", "onecycle", "warmup_cosine", "warmup_poly"])
def test_a_schedule_reaches_the_rate_and_ends_with_the_training(name, epochs, steps, rates):
    length = {"max_epochs": epochs, "max_steps": steps}
    seen = rates(configured(name, **length), **length)
    assert len(seen) == min(16 * (epochs or 9), steps or 99)
    assert seen[-1] < LR / 10
    if name.startswith("warmup"):
        assert seen[0] <= LR / 1000
        assert seen[4:6].tolist() == pytest.approx([LR, LR])
        assert seen[6] < LR


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_a_short_warm_up_ends_at_the_learning_rate(warmup, rates):
    seen = rates(configured("warmup_cosine", warmup))
    assert seen[max(warmup - 1, 0)] == pytest.approx(LR)
    assert seen[0] == pytest.approx(LR / 1000 if warmup == 2 else LR)


def test_an_absolute_eta_min_is_that_of_the_full_rate_and_keeps_the_ratio(rates):
    scheduler = {"eta_min": 1e-4, "power": 0.9, "end": None, "by_epoch": False}
    stock = rates([{"type": "PolyLR", **scheduler}], scales=SCALES[:1])
    assert stock[-1] == pytest.approx(1e-4, rel=0.01)
    torch.testing.assert_close(rates([{"type": "PolyLRByGroup", **scheduler}]), stock, rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize(
    ("scheduler", "named"),
    [
        ({"type": "PolyLR", "eta_min": 1e-4, "by_epoch": False}, "eta_min=0.0001"),
        ({"type": "OneCycleLR", "eta_max": LR, "total_steps": 48, "by_epoch": False}, "eta_max=0.002"),
        ({"type": "SteppLR", "step_size": 1}, "'StepLR'"),
        ({"type": "ReduceOnPlateauLR", "monitor": "ac"}, "monitor=ac; did you mean 'acc'"),
    ],
)
def test_a_scheduler_that_would_do_something_else_is_refused(scheduler, named, rates):
    with pytest.raises(ConfigError, match=named):
        rates([scheduler], metrics=[Accuracy()])


class Accuracy(Mse):
    """Never becomes better."""

    names, greater_is_better = ("acc",), True

    def compute(self, distributed):
        return {"acc": 1.0}


def test_what_follows_the_validations_follows_the_metric_that_decides(make_runner):
    config = {"type": "ReduceOnPlateauLR", "factor": 0.1, "patience": 1}
    runner = make_runner(max_epochs=4, schedulers=[config], metrics=[Accuracy(), Mse()])
    runner.train()
    (found,) = runner.param_schedulers
    assert (found.monitor, found.rule) == ("acc", "greater")
    assert runner.optim_wrapper.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


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
        runner.param_schedulers = build_schedulers(schedules, runner)
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


def go_on(runner, content):
    """As with other settings of optimizer or schedule."""
    restore_optimizer(runner, content, checkpoint_param_order(runner.model, content), settings_changed=True)


@pytest.mark.parametrize("step", [2, 4, 7])
def test_rates_are_those_of_a_training_that_always_had_the_new_ones(trained, step):
    new = {"lr": 0.02, "weight_decay": 0.3}
    _, content = trained(SCHEDULES, step, lr=0.1)
    straight, _ = trained(SCHEDULES, step, **new)
    later, _ = trained(SCHEDULES, **new)
    later.train_loop.restore(step // PER_EPOCH, step, step % PER_EPOCH * 4)
    go_on(later, content)
    ours, theirs = (each.optim_wrapper.state_dict() for each in (later, straight))
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], content["optimizer"]["state"], rtol=0, atol=0)
    states = [[scheduler.state_dict() for scheduler in each.param_schedulers] for each in (later, straight)]
    assert states[0] == states[1]  # and so they go on


def test_moments_stay_with_their_parameters_where_groups_change(trained):
    first, content = trained(steps=3)
    later, _ = trained(backbone_lr_scale=0.1, decay_norm_and_bias=False, weight_decay=0.1)
    go_on(later, content)
    ours, theirs = (each.optim_wrapper.optimizer for each in (later, first))
    assert len(ours.param_groups) == 4
    for mine, other in zip(later.model.parameters(), first.model.parameters()):
        torch.testing.assert_close(ours.state[mine], theirs.state[other], rtol=0, atol=0)


def records_of(rates, values):
    """A training record, and a validation, every ten steps."""
    steps = range(10, 10 * len(rates) + 1, 10)
    trained = [{"split": "train", "step": step, "lr": rate} for step, rate in zip(steps, rates)]
    return trained + [{"split": "val", "step": step, "score": value} for step, value in zip(steps, values)]


HALVED = [0.5**epoch for epoch in range(20)]  # below 1 % from the eighth on


@pytest.mark.parametrize(
    ("rates", "values", "greater", "named"),
    [
        (HALVED, [20 - epoch for epoch in range(20)], False, "after step 70 of 200.*best at step 200"),
        (HALVED, [*range(20)], True, "after step 70 of 200.*best at step 200"),
        (HALVED, [5, 4, 3, 2, 1, *[3] * 15], False, None),  # no better since
        (HALVED[:9], [9 - epoch for epoch in range(9)], False, None),  # only at the end
        ([0.5 + math.cos(math.pi * part / 20) / 2 for part in range(20)], [*range(20)], True, None),  # as a cosine ends
        ([1.0] * 20, [*range(20)], True, None),
        ([], [], False, None),
    ],
)
def test_a_rate_that_vanishes_while_the_validation_improves_is_said(rates, values, greater, named):
    said = vanished_rate(records_of(rates, values), "score", greater)
    assert said is None if named is None else re.search(named, said)


def test_a_share_of_the_training_can_come_before_a_schedule_begins(rates):
    """Of 20 steps the first 14 have the whole rate; then a half cosine, as torch's, without its last value."""
    share = [{"type": "CosineAnnealingLR", "T_max": None, "begin": 0.7, "by_epoch": False}]
    seen = rates(share, max_steps=20)
    expected = [LR] * 14 + [LR / 2 * (1 + math.cos(math.pi * step / 6)) for step in range(6)]
    assert seen.tolist() == pytest.approx(expected, rel=1e-6)
