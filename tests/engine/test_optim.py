"""Which parameters share a learning rate and a weight decay, and what a step is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from exp.backends.cpu import CpuBackend
from omegaconf import OmegaConf

from exp.config.schema import OptimConfig
from exp.engine.optim import BackendOptimWrapper, build_optimizer
from exp.forecasting.timebridge.prior import TimeBridgePrior
from exp.hardware import compat
from exp.vision.models import SceneClassifier
from tests.engine.conftest import Line
from tests.vision.parts import vit

needs_cpu_scaler = pytest.mark.skipif(
    not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"), reason="this torch scales losses on cards only"
)
needs_fused = pytest.mark.skipif(compat.TORCH_VERSION < (2, 4), reason="the CPU has no fused optimizer")


def optimizer(model, lacking=(), **settings):
    config = OptimConfig(**{"type": "AdamW", "lr": 1.0, "weight_decay": 0.5, **settings})
    return build_optimizer(model, OmegaConf.structured(config), lacking)


def groups_of(model, **settings):
    """Learning rate and weight decay of every parameter, by name."""
    groups = optimizer(model, **settings).param_groups
    of = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def scenes():
    return SceneClassifier(3, backbone=vit(embed_dim=32, depth=2, num_heads=2))


def test_learning_rates_fall_with_depth(scenes):
    found = groups_of(scenes, backbone_lr_scale=0.5, layer_decay=0.1)
    expected = {"head": 1.0, "backbone.norm": 0.5, "backbone.blocks.1.attn.qkv": 0.05,
                "backbone.blocks.0.mlp.fc1": 0.005, "backbone.patch_embed.proj": 0.0005}  # fmt: skip
    assert {name: found[f"{name}.weight"][0] for name in expected} == pytest.approx(expected)
    assert found["backbone.cls_token"][0] == pytest.approx(0.0005)


def test_norms_biases_tokens_and_regimes_can_go_without_decay(scenes):
    prior = TimeBridgePrior(horizon=4, channels=2, lookback=24, d_model=8, d_ff=8, num_heads=2, period=12)
    for model in (scenes, prior):
        for name, (_, decay) in groups_of(model, decay_norm_and_bias=False).items():
            plain = name.endswith(("bias", "gamma", "token", "tokens")) or "norm" in name
            plain = plain or name.startswith("regimes.")
            assert decay == (0.0 if plain else 0.5), name


class Scaling(CpuBackend):
    """Trains in fp16."""

    @property
    def torch_module(self):
        return SimpleNamespace(amp=SimpleNamespace(GradScaler=lambda: torch.amp.GradScaler("cpu", init_scale=1024.0)))


class Lazy(Scaling):
    """Ends its graph with every step, as lazy devices do."""

    def end_step(self, optimizer, **kwargs):
        (weight,) = optimizer.param_groups[0]["params"]
        before = weight.item()
        super().end_step(optimizer, **kwargs)
        self.moved.append(weight.item() != before)


@pytest.mark.parametrize(
    ("precision", "clip", "watched"),
    [("fp32", None, True), *(pytest.param("fp16", 0.01, each, marks=needs_cpu_scaler) for each in (True, False))],
)
def test_the_backend_ends_every_step_also_one_that_overflows(precision, clip, watched):
    def wrapped():
        sgd = torch.optim.SGD(Line().parameters(), lr=0.1)
        return BackendOptimWrapper(sgd, backend, precision, accumulate=2, clip_grad_norm=clip)

    backend, scaled = Lazy(name="lazy"), precision == "fp16"
    backend.moved = []
    wrapper, gradients, norms = wrapped(), [], []
    (weight,) = wrapper.optimizer.param_groups[0]["params"]
    if watched:
        wrapper.before_clipping.append(lambda: gradients.append(weight.grad.item()))
    for step in range(4):
        for _ in range(2):
            loss = (weight - 3).square().mean()
            wrapper.update_params(loss * float("inf") if scaled and step == 2 else loss)
        norms.append(wrapper.grad_norm)
    assert backend.moved == [True, True, not scaled, True]
    assert gradients[:1] == [pytest.approx(-6.0)] * watched  # as they are, not times the loss scale
    assert weight.grad is None
    if scaled:
        assert [float(norm) < float("inf") for norm in norms] == backend.moved
        assert norms[0].item() == pytest.approx(6.0)
        assert weight.item() == pytest.approx(0.1 * clip * 3)
        other = wrapped()
        other.load_state_dict(wrapper.state_dict())
        assert other.scaler.get_scale() == wrapper.scaler.get_scale() == 512.0


def test_the_norm_that_is_clipped_is_that_of_all_groups_together():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    sgd = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1.0)
    wrapper = BackendOptimWrapper(sgd, CpuBackend(name="cpu"), clip_grad_norm=1.0)
    wrapper.update_params((3 * weights[0] + 4 * weights[1]).sum())
    assert wrapper.grad_norm.item() == pytest.approx(5.0)
    assert [weight.item() for weight in weights] == pytest.approx([-0.6, -0.8], rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=needs_cpu_scaler)])
def test_gradients_before_and_after_clipping_and_a_change_there_is_what_the_optimizer_uses(precision):
    seen = []
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    wrapper = BackendOptimWrapper(torch.optim.SGD(weights, lr=1.0), Scaling(name="cpu"), precision, clip_grad_norm=1.0)

    def look():
        seen.append([round(weight.grad.item(), 4) for weight in weights])

    def double():
        for weight in weights:
            weight.grad.mul_(2)

    wrapper.before_clipping += [look, double, look]
    wrapper.after_clipping += [look, double, look]
    wrapper.update_params((3 * weights[0] + 4 * weights[1]).sum())
    assert seen == [[3, 4], [6, 8], [0.6, 0.8], [1.2, 1.6]]
    assert wrapper.grad_norm.item() == pytest.approx(10.0)
    assert [weight.item() for weight in weights] == pytest.approx([-1.2, -1.6], rel=1e-4)


@needs_fused
@pytest.mark.parametrize("lacking", [{"_fused_adam_"}, set()])
def test_a_fused_optimizer_is_a_foreach_one_where_its_step_would_leave_the_device(lacking):
    (group,) = optimizer(Line(), lacking, type="Adam", options={"fused": True}).param_groups
    assert (group["fused"], group["foreach"]) == ((False, True) if lacking else (True, None))


@needs_fused
def test_the_form_of_a_step_is_that_of_the_device_at_hand():
    """A checkpoint of a card with a fused step goes on where there is none."""
    fused, foreach = (torch.optim.AdamW(Line().parameters(), **{form: True}) for form in ("fused", "foreach"))
    BackendOptimWrapper(foreach, CpuBackend(name="cpu")).load_state_dict(fused.state_dict())
    (group,) = foreach.param_groups
    assert (group["fused"], group["foreach"]) == (None, True)
