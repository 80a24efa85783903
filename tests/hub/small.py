"""A backbone whose weights are served, and a run of seconds that begins from them."""

from __future__ import annotations

__all__ = ["SMALL", "backbone"]

SMALL = ["experiment=dinov3_eurosat", "backend=cpu", "plots=false", "model.embed_dim=32", "model.depth=2",
         "model.num_heads=2", "model.layer_scale=1.0", "max_steps=1", "max_epochs=null", "log_every=1",
         "schedule.warmup_steps=0", "data.size=32", "global_batch_size=8", "data.split=[0.4,0.3,0.3]",
         "rehearsal=false"]  # fmt: skip


def backbone():
    """Its state, of the size of :data:`SMALL`."""
    import torch

    from exp.vision.dinov3 import SceneClassifier

    torch.manual_seed(3)
    model = SceneClassifier(num_classes=10, size="tiny", patch_size=8, embed_dim=32, depth=2, num_heads=2)
    return {name: value.clone() for name, value in model.backbone.state_dict().items()}
