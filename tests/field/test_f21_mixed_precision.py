"""F21: mixed precision crashed the driver (`free(): invalid pointer`), and was disabled by editing several files.

The crash of the driver cannot be reproduced without it. With exp `precision=fp32|bf16|fp16` is one key; the backend
knows what its device supports, and refuses the rest with the choices.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY
from tests.field.conftest import CARDS
from tests.simulators import needs_current_card, needs_legacy_card


def test_what_the_backend_cannot_do_is_refused_with_the_choices(exp):
    done = exp(*TINY, "precision=fp16")
    assert done.returncode == 2
    assert "precision=fp16 is not supported by backend=cpu; use one of fp32, bf16" in done.stderr.splitlines()[0]
    done = exp(*TINY, "precision=fp8")
    assert done.returncode == 2
    assert "precision=fp8 is not one of fp32, bf16, fp16" in done.stderr.splitlines()[0]


@needs_legacy_card
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_generation_whose_driver_crashed_trains_in_fp32_only(exp, precision):
    done = exp(*CARDS, f"precision={precision}")
    assert done.returncode == 2
    assert f"precision={precision} is not supported by backend=gcu; use one of fp32" in done.stderr.splitlines()[0]


@needs_current_card
def test_one_key_is_enough_where_the_card_can(exp):
    done = exp(*CARDS, "precision=bf16", "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["precision"] == "bf16"
