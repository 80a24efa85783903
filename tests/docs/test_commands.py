"""Every command of the pages runs as it is written; those on images are in a file of their own, for a worker beside."""

from __future__ import annotations

import pytest

from tests.docs.reader import GROUPS, IMAGE_GROUPS, try_pages


@pytest.mark.pages
@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", [group for group in GROUPS if group not in IMAGE_GROUPS])
def test_every_command_runs_as_it_is_written(tmp_path, group):
    try_pages(tmp_path, group)
