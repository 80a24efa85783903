"""Numbers of a configuration that follow from others."""

from __future__ import annotations

import pytest

from exp.config.check import derive_batch_sizes
from exp.errors import ConfigError


def test_the_batch_size_that_is_not_given_is_derived_or_what_would_be_valid_is_named():
    for given, derived in {
        (16, None, 1, 1): (16, 16), (16, None, 2, 8): (16, 256), (None, 64, 4, 2): (8, 64), (8, 64, 4, 2): (8, 64),
    }.items():  # fmt: skip
        assert derive_batch_sizes(*given) == derived
    for given, valid in {
        (None, None, 1, 1): "batch_size", (None, 65, 1, 2): "64 or 66", (None, 3, 2, 2): "4", (16, 64, 1, 2): "32",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=valid):
            derive_batch_sizes(*given)
