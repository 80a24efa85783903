"""Settings of models that cannot be: refused when the model is made, by their key."""

from __future__ import annotations

import pytest

from exp.errors import ConfigError
from exp.vision.dinov3 import Distiller, SceneClassifier, Segmenter

SMALL = {"embed_dim": 32, "depth": 3, "num_heads": 2}
OF_SCENES = [
    ({"size": "vits61"}, "vits16"),  # the nearest
    ({"embed_dim": 32, "num_heads": 3}, "embed_dim=36"),
    ({"patch_size": 0}, "patch_size"),
    ({"freeze": "half"}, "freeze"),
    ({"drop_path": 1.0}, "drop_path"),
    ({"rope_rescale": 0.5}, "rope_rescale"),
    ({"normalization": "satellite", "pixel_mean": [1.0] * 3, "pixel_std": [1.0] * 3}, "normalization"),
    ({"blocks": [5]}, "blocks"),
    ({"band_init": "copy"}, "band_init"),
    ({"band_init": "zero"}, "data.band_names"),
    ({"lora": {"rank": -1}}, "rank"),
    ({"lora": {"rank": 4, "targets": ["w1"]}}, "targets"),
    ({"lora": {"rank": 4}, "freeze": "all"}, "freeze"),
    ({"class_weights": [1.0, -1.0, 1.0]}, "class_weights"),
    ({"cross_entropy_weight": 0.0}, "cross_entropy_weight"),
]
OF_SEGMENTERS = [
    ({"head": "uper"}, "upernet"),
    ({"head_norm": "layer"}, "head_norm"),
    ({"auxiliary_weight": 0.4, "auxiliary_block": 7}, "auxiliary_block"),
    ({"inference": "crop"}, "inference"),
    ({"overlap": 1.0}, "overlap"),
    ({"head": "upernet", "blocks": [1, 2]}, "blocks"),
]
OF_DISTILLERS = [
    ({"teacher": {"size": "vits61"}}, "teacher"),
    ({"cls_weight": 0.0, "patch_weight": 0.0}, "patch_weight"),
    ({"smooth_l1_share": 2.0}, "smooth_l1_share"),
    ({"blocks": [0]}, "blocks"),
]


def test_settings_that_cannot_be():
    for kind, cases in ((SceneClassifier, OF_SCENES), (Segmenter, OF_SEGMENTERS), (Distiller, OF_DISTILLERS)):
        for settings, key in cases:
            with pytest.raises(ConfigError, match=key):
                kind(3, **{**SMALL, **settings})
