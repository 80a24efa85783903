"""Low-rank updates: what is trained, and merging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exp.vision.lora import is_lora
from exp.vision.models import SceneClassifier
from tests.vision.parts import vit

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2, "layer_scale_init": 0.5}


def model(seed=0, size="vits16", **settings):
    torch.manual_seed(seed)
    return SceneClassifier(3, backbone=vit(size=size, **SMALL), **{"lora": {"rank": 4, "alpha": 8.0}, **settings})


def moved(trained):
    """Updates as a training leaves them."""
    torch.manual_seed(7)
    for name, parameter in trained.named_parameters():
        if is_lora(name):
            parameter.data.normal_(std=0.1)
    return trained.eval()


IMAGE = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_updates_begin_as_nothing_and_add_what_the_paper_says():
    plain, adapted = model(lora=None).eval(), model().eval()
    adapted.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(adapted(image=IMAGE), plain(image=IMAGE))
    update, x = moved(adapted).backbone.blocks[0].mlp.fc1.lora["fc1"], torch.randn(5, 32)
    torch.testing.assert_close(update(x), x @ (8.0 / 4 * update.up @ update.down).t())


@pytest.mark.parametrize(("size", "targets"), [("vits16", ["q", "v"]), ("vits16plus", ["attention", "mlp"])])
def test_merged_weights_compute_the_same_whatever_updates_begin_then(size, targets):
    adapted = moved(model(size=size, lora={"rank": 4, "alpha": 8.0, "targets": targets}))
    expected = adapted(image=IMAGE)
    for other in (None, {"rank": 2, "alpha": 8.0}, {"rank": 4, "alpha": 1.0}, {"rank": 4, "targets": ["q"]}):
        second = model(seed=1, size=size, lora=other).eval()
        assert not torch.allclose(second(image=IMAGE), expected, atol=1e-3)
        state = second.adapt_state_dict(adapted.state_dict(), Path("best.pth"))
        left = second.load_state_dict(state, strict=False)
        assert bool(left.missing_keys) is (other is not None)
        torch.testing.assert_close(second(image=IMAGE), expected, rtol=1e-4, atol=1e-5)
    again = model(size=size, lora={"rank": 4, "alpha": 1.0, "targets": targets}).eval()
    again.load_state_dict(adapted.state_dict())  # as resuming does: the factor of the file counts
    torch.testing.assert_close(again(image=IMAGE), expected)
    adapted.merge_updates()
    assert not any(map(is_lora, adapted.state_dict()))
    torch.testing.assert_close(adapted(image=IMAGE), expected, rtol=1e-4, atol=1e-5)
