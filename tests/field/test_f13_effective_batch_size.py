"""F13: the effective batch size was worked out by hand for each number of cards.

With exp either `batch_size` (per device) or `global_batch_size` is given and the other derived; gradient accumulation
counts; what does not divide is refused with the nearest that do. The effective batch is printed and recorded, and the
losses do not depend on how it is split. There is nothing to reproduce: it was arithmetic.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY

pytestmark = pytest.mark.slow  # nothing in it depends on the version of torch

BARE = [setting for setting in TINY if not setting.startswith("global_batch_size")]
SAME = "model.attention_dropout=0"


def test_either_is_given_and_the_split_does_not_matter(exp):
    done = exp(*BARE, "global_batch_size=24", "nproc=2", "accumulate=3", SAME, "output_dir=split")
    assert done.returncode == 0, done.stderr
    assert "global batch 24 = 4 x 2 processes x 3 micro-batches" in done.stdout
    done = exp(*BARE, "batch_size=24", SAME, "output_dir=whole")
    assert done.returncode == 0, done.stderr
    for name, size in (("split", 4), ("whole", 24)):
        result = exp.result(name)
        assert (result["batch_size"], result["global_batch_size"]) == (size, 24)
    assert exp.losses("split") == pytest.approx(exp.losses("whole"), rel=1e-5)


def test_what_does_not_divide_is_refused_with_the_nearest(exp):
    done = exp(*BARE, "global_batch_size=30", "nproc=2", "accumulate=4")
    assert done.returncode == 2
    assert "global_batch_size=30 does not divide over 2 processes x accumulate=4; nearest: 24 or 32" in done.stderr
