"""Which parameters share a learning rate and a weight decay."""

from __future__ import annotations

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf

from exp.config.schema import OptimConfig
from exp.engine.optim import BackendOptimWrapper, build_optimizer
from exp.forecasting.timebridge.prior_model import TimeBridgePrior
from exp.vision.dinov3 import SceneClassifier
from tests.engine.conftest import Line

needs_cpu_scaler = pytest.mark.skipif(
    not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"), reason="this torch scales losses on cards only"
)
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def optimizer(model, **settings):
    return build_optimizer(model, OmegaConf.structured(OptimConfig(type="AdamW", lr=1.0, weight_decay=0.5, **settings)))


def rates(model, made):
    """Learning rate and weight decay of every parameter, by name."""
    of = {id(p): (group["lr"], group["weight_decay"]) for group in made.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


def test_learning_rates_fall_with_depth():
    model = SceneClassifier(3, **SMALL)
    made = optimizer(model, backbone_lr_scale=0.5, layer_decay=0.1)
    found = {name: rate for name, (rate, _) in rates(model, made).items()}
    assert found["head.weight"] == 1.0
    assert found["backbone.norm.weight"] == 0.5
    assert found["backbone.blocks.1.attn.qkv.weight"] == pytest.approx(0.05)
    assert found["backbone.blocks.0.mlp.fc1.bias"] == pytest.approx(0.005)
    assert found["backbone.patch_embed.proj.weight"] == found["backbone.cls_token"] == pytest.approx(0.0005)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_rate_that_is_logged_is_that_of_optim_lr(scale):
    made = optimizer(SceneClassifier(3, **SMALL), backbone_lr_scale=scale)
    wrapper = BackendOptimWrapper(made, CpuBackend(name="cpu"))
    assert wrapper.learning_rate == 1.0
    for group in made.param_groups:
        group["lr"] *= 0.5  # as a scheduler does
    assert wrapper.learning_rate == 0.5


def test_norms_biases_tokens_and_regimes_can_go_without_decay():
    model = SceneClassifier(3, **SMALL)
    for name, (_, decay) in rates(model, optimizer(model, decay_norm_and_bias=False)).items():
        plain = name.endswith(("bias", "gamma", "token", "tokens")) or "norm" in name
        assert decay == (0.0 if plain else 0.5), name
    model = TimeBridgePrior(horizon=4, channels=2, lookback=24, d_model=8, d_ff=8, num_heads=2, period=12)
    found = rates(model, optimizer(model, decay_norm_and_bias=False))
    without = {name for name, (_, decay) in found.items() if decay == 0.0}
    assert {name for name in found if name.startswith("regimes.")} <= without
    stacked = {name for name, p in model.named_parameters() if name.endswith("bias") and p.dim() > 1}
    assert stacked
    assert stacked <= without
    assert {name for name in found if name.endswith("weight") and "norm" not in name} - without


def test_a_step_moves_each_group_at_its_rate():
    model = SceneClassifier(3, **SMALL)
    made = build_optimizer(model, OmegaConf.structured(OptimConfig(type="SGD", lr=1.0, backbone_lr_scale=0.0)))
    before = {name: p.clone() for name, p in model.named_parameters()}
    image, label = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8), torch.tensor([0, 1])
    model(image=image, label=label, mode="loss")["loss"].backward()
    made.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"head.weight", "head.bias"}


class Lazy(CpuBackend):
    """Ends its graph with every step, as lazy devices do, and trains in fp16."""

    precisions = ("fp32", "fp16")

    def __init__(self):
        super().__init__(name="lazy")
        self.ended = []

    def grad_scaler(self, precision):
        return torch.amp.GradScaler("cpu", init_scale=1024.0) if precision == "fp16" else None

    def end_step(self, optimizer, **kwargs):
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1]
        before = optimizer.param_groups[0]["params"][0].clone()
        super().end_step(optimizer, **kwargs)
        self.ended.append(not torch.equal(before, optimizer.param_groups[0]["params"][0]))


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=needs_cpu_scaler)])
def test_the_backend_ends_every_step(precision, clip):
    model, backend = Line(), Lazy()
    wrapper = BackendOptimWrapper(
        torch.optim.SGD(model.parameters(), lr=0.1), backend, precision=precision, accumulate=2, clip_grad_norm=clip
    )
    gradients, norms = [], []
    wrapper.before_step = lambda: gradients.append(model.w.grad.item())
    x = torch.ones(4)
    for step in range(4):
        for _ in range(2):
            with wrapper.optim_context(model):
                loss = model(x, 3 * x)["loss"]
            overflow = step == 2 and precision == "fp16"
            wrapper.update_params(loss * float("inf") if overflow else loss)
        norms.append(None if wrapper.grad_norm is None else wrapper.grad_norm.item())
    skipped = [2] if precision == "fp16" else []
    assert backend.ended == [step not in skipped for step in range(4)]
    assert gradients[0] == pytest.approx(-6.0)  # as they are, not times the loss scale
    assert torch.isfinite(model.w).all()
    assert wrapper.optimizer.param_groups[0]["params"][0].grad is None
    if clip:
        assert norms[0] == pytest.approx(6.0)
        assert model.w.item() == pytest.approx(0.1 * clip * (4 - len(skipped)))
        assert [step for step, norm in enumerate(norms) if norm != norm or norm == float("inf")] == skipped
    if precision == "fp16":
        assert wrapper.scaler.get_scale() == 512.0
        state = wrapper.state_dict()
        other = BackendOptimWrapper(torch.optim.SGD(Line().parameters(), lr=0.1), backend, precision="fp16")
        other.load_state_dict(state)
        assert other.scaler.get_scale() == 512.0


@pytest.mark.skipif("fused" not in torch.optim.AdamW.__init__.__code__.co_varnames, reason="torch has no fused AdamW")
def test_the_form_of_a_step_is_that_of_the_device_at_hand():
    """A checkpoint of a card with a fused step goes on where there is none."""
    model = Line()
    state = torch.optim.AdamW(model.parameters(), fused=True).state_dict()
    here = BackendOptimWrapper(torch.optim.AdamW(model.parameters(), foreach=True), CpuBackend(name="cpu"))
    here.load_state_dict(state)
    (group,) = here.optimizer.param_groups
    assert group["foreach"]
    assert not group["fused"]
