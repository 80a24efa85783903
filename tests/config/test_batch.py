from __future__ import annotations

import pytest

from exp.config.batch import derive_batch_sizes
from exp.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ((16, None, 1, 1), (16, 16)), ((16, None, 2, 8), (16, 256)),
        ((None, 64, 4, 2), (8, 64)), ((8, 64, 4, 2), (8, 64)),
        ((None, None, 1, 1), "batch_size"), ((None, 65, 1, 2), "64 or 66"), ((None, 3, 2, 2), "4"),
        ((16, 64, 1, 2), "32"), ((0, None, 1, 1), "batch_size=0"),
    ],
)  # fmt: skip
def test_the_missing_one_is_derived_or_valid_ones_are_named(given, derived):
    if isinstance(derived, tuple):
        assert derive_batch_sizes(*given) == derived
    else:
        with pytest.raises(ConfigError, match=derived):
            derive_batch_sizes(*given)
