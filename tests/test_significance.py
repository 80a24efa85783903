"""Tests over seeds and samples: textbook values, and how often each reports a difference where there is none."""

import numpy as np
import pytest

from exp.significance import (
    adjusted_p,
    automatic_block,
    compare_means,
    compare_pairs,
    compare_samples,
    pairs_needed,
)

# Two samples of screws of Wikipedia's page on Student's t-test, with its figures.
SCREWS = [30.02, 29.99, 30.11, 29.97, 30.01, 29.99], [29.89, 29.93, 29.72, 29.98, 30.02, 29.98]


def test_the_tests_over_seeds_give_the_figures_of_a_textbook():
    welch, paired = compare_means(*SCREWS), compare_pairs(*SCREWS)
    assert (welch.value, welch.p) == pytest.approx((0.095, 0.09077), abs=1e-5)
    # t = 0.095 / (s / sqrt(6)), with 2.57058 as the quantile of five degrees of freedom
    spread = np.std(np.subtract(*SCREWS), ddof=1) / 6**0.5
    assert paired.high - paired.value == pytest.approx(2.57058 * spread, rel=1e-5)
    assert paired.p == pytest.approx(0.19144, abs=1e-5)
    assert (compare_pairs([1.0], [2.0]), compare_means([1.0, 2.0], [1.0])) == (None, None)
    assert (compare_pairs([1.5, 2.5], [1.0, 2.0]).p, compare_pairs([1.0, 2.0], [1.0, 2.0]).p) == (0, 1)
    with pytest.raises(ValueError, match="paired"):
        compare_pairs([1.0], [1.0, 2.0])


def test_the_number_of_seeds_that_would_show_a_difference():
    # An effect of one standard deviation: ten pairs, in every table of the paired t-test with a power of 0.8.
    differences = np.array([-1.0, 0.0, 1.0]) + 1.0
    pilot = compare_pairs(list(differences), [0.0] * 3)
    assert pairs_needed(*pilot[:3], pilot.n) == 10
    assert (pairs_needed(0.0, -1.0, 1.0, 3), pairs_needed(1e-9, -1.0, 1.0, 3)) == (None, None)


def test_comparisons_are_corrected_for_their_number():
    assert adjusted_p([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize("overlap", [1, 24])
def test_windows_that_overlap_are_no_independent_samples(overlap):
    random, kernel = np.random.RandomState(0), np.ones(overlap) / overlap
    found, as_independent = 0, 0
    for _ in range(60):  # of mean zero: every finding is false
        values = np.convolve(random.randn(1000 + overlap), kernel, "valid")[:1000]
        found += compare_samples(values, draws=200).p < 0.05
        as_independent += compare_samples(values, block=1, draws=200).p < 0.05
    assert found <= 9
    assert as_independent <= 9 if overlap == 1 else as_independent > 30
    length = automatic_block(values)
    assert length <= 5 if overlap == 1 else length > 20


def test_samples_of_several_series_stay_together_and_may_lack_values():
    shared = np.random.RandomState(1).randn(200, 1)
    one, four = compare_samples(shared, block=1), compare_samples(np.repeat(shared, 4, axis=1), block=1)
    assert one == four  # copies are no further evidence
    with_holes = np.where(np.arange(800).reshape(200, 4) % 7 == 0, np.nan, 2.0)
    assert compare_samples(with_holes)[:4] == pytest.approx((2.0, 2.0, 2.0, 1 / 2001))
    with pytest.raises(ValueError, match="no sample"):
        compare_samples([np.nan, np.nan])
