"""Every command of the pages on images runs as it is written."""

from __future__ import annotations

import pytest

from tests.docs.reader import IMAGE_GROUPS, try_pages


@pytest.mark.pages
@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", IMAGE_GROUPS)
def test_every_command_on_images_runs_as_it_is_written(tmp_path, group):
    try_pages(tmp_path, group)
