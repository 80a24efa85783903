"""Commands of the pages on forecasting run as they are written. A file of its own: it takes minutes."""

from __future__ import annotations

import pytest

from tests.docs.reader import try_pages


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_runs_as_it_is_written(tmp_path):
    try_pages(tmp_path, "series")


@pytest.mark.slow
def test_every_command_about_intervals_runs_as_it_is_written(tmp_path):
    try_pages(tmp_path, "intervals")
