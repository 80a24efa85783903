from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmengine.hooks import Hook
from omegaconf import OmegaConf

from exp.engine import schedule
from exp.errors import ConfigError
from tests.engine.conftest import Line, Mse

CONF = Path(__file__).parents[2] / "conf" / "schedule"
SCALES = (1.0, 0.1, 0.01)


def groups(make=torch.optim.Adam, lr=2e-3, **options):
    """An optimizer whose groups learn at parts of ``lr``, as layer_decay and backbone_lr_scale leave them."""
    parts = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr * scale} for scale in SCALES]
    return make(parts, lr=lr, **options)


def rates(optimizer, make_runner, schedulers, epochs=3, steps=None):
    """Rates of every group at each optimizer step of a real run, in which MMEngine's own hook steps the schedulers."""
    seen = []

    class Look(Hook):
        priority = "LOWEST"

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append([group["lr"] for group in optimizer.param_groups])

    model = Line()
    model.others = torch.nn.ParameterList([p for group in optimizer.param_groups for p in group["params"]])
    runner = make_runner(model, hooks=[Look()], max_epochs=epochs, schedulers=schedulers, optimizer=optimizer,
                         max_steps=steps)  # fmt: skip
    runner.session.config.max_epochs = epochs
    runner.train_loop._validate = lambda: None
    runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
    runner.train_loop.run()
    return torch.tensor(seen, dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml")))
def test_every_schedule_keeps_the_ratio_of_the_groups_rates(name, make_runner):
    content = OmegaConf.load(CONF / f"{name}.yaml")
    root = OmegaConf.create(
        {"schedule": {"warmup_steps": 5, **content}, "max_epochs": 3, "max_steps": 48, "optim": {"lr": 2e-3}}
    )
    schedulers = OmegaConf.to_container(root.schedule.param_scheduler, resolve=True)
    seen = rates(groups(), make_runner, schedulers)
    assert len(seen) == 48
    for number, scale in enumerate(SCALES):
        torch.testing.assert_close(seen[:, number], seen[:, 0] * scale, rtol=1e-9, atol=1e-18)
    if name != "constant":
        assert seen[:, 0].max() > 1.5 * seen[-1, 0]


@pytest.mark.parametrize(("epochs", "steps"), [(None, 20), (3, None), (3, 20), (1, 40)])
@pytest.mark.parametrize("name", ["cosine", "onecycle", "warmup_cosine", "warmup_poly"])
def test_a_schedule_reaches_the_rate_and_ends_with_the_training(name, epochs, steps, make_runner):
    """An epoch has 16 steps. The last value of all is that after the last step."""
    content = OmegaConf.load(CONF / f"{name}.yaml")
    root = OmegaConf.create(
        {"schedule": {"warmup_steps": 5, **content}, "max_epochs": epochs, "max_steps": steps, "optim": {"lr": 2e-3}}
    )
    schedulers = OmegaConf.to_container(root.schedule.param_scheduler, resolve=True)
    seen = rates(groups(), make_runner, schedulers, epochs, steps)[:, 0]
    assert len(seen) == min(16 * (epochs or 9), steps or 99)
    assert seen[-1] < 2e-3 / 10
    if name.startswith("warmup"):
        assert seen[0] <= 2e-6
        torch.testing.assert_close(seen[4:6], torch.full((2,), 2e-3, dtype=torch.float64))
        assert seen[6] < 2e-3


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_a_short_warm_up_ends_at_the_learning_rate(warmup, make_runner):
    content = OmegaConf.load(CONF / "warmup_cosine.yaml")
    root = OmegaConf.create({"schedule": {"warmup_steps": warmup, **content}})
    seen = rates(groups(), make_runner, OmegaConf.to_container(root.schedule.param_scheduler, resolve=True))[:, 0]
    assert seen[max(warmup - 1, 0)] == pytest.approx(2e-3)
    assert seen[0] == pytest.approx(2e-6 if warmup == 2 else 2e-3)


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "PolyLR", "eta_min": 1e-4, "power": 0.9, "end": None, "by_epoch": False},
        {"type": "CosineAnnealingLR", "eta_min": 1e-4, "T_max": 47, "by_epoch": False},
    ],
)
def test_an_absolute_eta_min_is_that_of_the_full_rate_and_keeps_the_ratio(scheduler, make_runner):
    plain = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=2e-3)
    stock = rates(plain, make_runner, [dict(scheduler)])[:, 0]
    assert stock[-1] == pytest.approx(1e-4, rel=0.01)
    seen = rates(groups(), make_runner, [dict(scheduler)])
    for number, scale in enumerate(SCALES):
        torch.testing.assert_close(seen[:, number], stock * scale, rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize(
    ("schedulers", "text"),
    [
        ({"type": "LinearLR", "end": 1}, "begin=0 to end=1 takes one epoch, .* set end=2 or more, or convert_to_iter"),
        ({"type": "LinearLR", "by_epoch": False, "end": 5, "begin": 4, "end_factor": 0.1}, "takes one step, .* end=6"),
        ({"type": "OneCycleLR", "eta_max": 2e-3, "total_steps": 48, "by_epoch": False},
         "OneCycleLR gives all groups .* eta_max=0.002; .* type TorchOneCycle"),
        ({"type": "SteppLR", "step_size": 1}, "SteppLR.*'StepLR'"),
        ({"type": "StepLR", "stepsize": 1}, "StepLR does not take these settings: .*stepsize"),
        ({"type": "TorchOneCycle", "eta_max": 1e-3, "total_steps": 3, "by_epoch": True},
         "goes by step; set its convert"),
    ],
)  # fmt: skip
def test_a_scheduler_that_would_do_something_else_is_refused(schedulers, text, make_runner):
    with pytest.raises(ConfigError, match=text):
        rates(groups(), make_runner, [schedulers])


class Judge(Mse):
    """Metrics that tell their names, of which larger ones are better."""

    names, metric_name, greater_is_better = ("mse", "acc"), "acc", True

    def compute(self, distributed):
        return {**super().compute(distributed), "acc": 1.0}


def test_what_follows_the_validations_follows_the_metric_that_decides(make_runner):
    config = {"type": "ReduceOnPlateauLR", "factor": 0.1, "patience": 1}
    runner = make_runner(max_epochs=4, schedulers=[config], evaluator=Judge())
    runner.train()
    assert runner.param_schedulers[0].monitor == "acc"
    assert runner.param_schedulers[0].rule == "greater"
    assert runner.optim_wrapper.optimizer.param_groups[0]["lr"] == pytest.approx(0.01), "it never becomes better"
    runner = make_runner(max_epochs=2, schedulers=[{**config, "monitor": "ac"}], evaluator=Judge())
    with pytest.raises(ConfigError, match=r"monitor=ac; did you mean 'acc'\?, but what is measured is mse, acc"):
        runner.train()


@pytest.mark.parametrize(
    ("make_one", "momentum"),
    [
        (lambda **kw: groups(torch.optim.SGD, momentum=0.9, **kw), lambda group: group["momentum"]),
        (lambda **kw: groups(torch.optim.Adam, **kw), lambda group: group["betas"][0]),
    ],
    ids=["SGD", "Adam"],
)
def test_one_cycle_of_several_groups_continues_exactly(make_one, momentum):
    def run(optimizer, scheduler, steps):
        seen = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            seen.append([(group["lr"], momentum(group)) for group in optimizer.param_groups])
        return seen

    cycle = {"eta_max": 4e-3, "total_steps": 20, "pct_start": 0.2}
    optimizer = make_one()
    whole = run(optimizer, schedule.TorchOneCycle(optimizer, **cycle), 19)
    # Its largest rate stands for that of optim.lr: the other groups keep their part of it.
    assert [rate for rate, _ in whole[2]] == pytest.approx([4e-3 * scale for scale in SCALES])
    assert whole[2][0][1] == pytest.approx(0.85) != pytest.approx(whole[0][0][1])
    assert all(step[0][1] == step[1][1] == step[2][1] for step in whole)
    first = make_one()
    scheduler = schedule.TorchOneCycle(first, **cycle)
    seen = run(first, scheduler, 8)
    second = make_one()
    resumed = schedule.TorchOneCycle(second, **cycle)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert seen + run(second, resumed, 11) == whole
