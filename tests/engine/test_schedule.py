import torch
from mmengine.registry import PARAM_SCHEDULERS

from exp.engine import schedule  # noqa: F401


def trajectory(scheduler, optimizer, steps):
    seen = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
    return seen


def make():
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=2e-4)


def test_one_cycle_is_torchs_and_continues_from_its_state():
    reference_optimizer = make()
    reference = torch.optim.lr_scheduler.OneCycleLR(reference_optimizer, max_lr=2e-4, total_steps=20, pct_start=0.2)
    expected = trajectory(reference, reference_optimizer, 20)
    config = {"type": "TorchOneCycle", "eta_max": 2e-4, "total_steps": 4, "pct_start": 0.2, "by_epoch": True,
              "convert_to_iter_based": True}  # fmt: skip

    def build(optimizer):
        arguments = {key: value for key, value in config.items() if key not in ("type", "convert_to_iter_based")}
        cls = PARAM_SCHEDULERS.get("TorchOneCycle")
        return cls.build_iter_from_epoch(optimizer=optimizer, epoch_length=5, **arguments)

    optimizer = make()
    first = build(optimizer)
    seen = trajectory(first, optimizer, 8)
    resumed_optimizer = make()
    resumed = build(resumed_optimizer)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(first.state_dict())
    seen += trajectory(resumed, resumed_optimizer, 12)
    assert seen == expected
    assert min(beta for _, beta in seen) < 0.86
