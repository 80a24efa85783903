"""Parts of image models as configurations have them."""

from __future__ import annotations


def vit(**keys):
    """A vision transformer with these keys."""
    return {"_target_": "exp.vision.backbones.vit.VisionTransformer", **keys}


def head(name, **keys):
    """A head of exp's."""
    return {"_target_": f"exp.vision.heads.{name}", **keys}


def loss(name, **keys):
    """A loss of exp's."""
    return {"_target_": f"exp.vision.losses.{name}", **keys}


def term(name, **keys):
    """A term of exp's for distillation."""
    return {"_target_": f"exp.vision.distillation.{name}", **keys}
