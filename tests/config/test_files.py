"""The files of conf/."""

from __future__ import annotations

import re
from pathlib import Path

from exp.config.command_line import help_text
from exp.config.sources import register

CONF = Path(__file__).parents[2] / "conf"


def test_each_choice_that_the_help_lists_has_a_file():
    register()
    listing = help_text().partition("Choices (GROUP=CHOICE)\n")[2].partition("\n\n")[0]
    groups = re.findall(r"^  (\w+)((?:\s+\w+)+?)(?=\n  \w|\Z)", listing, re.MULTILINE)
    listed = {f"{group}/{choice}.yaml" for group, choices in groups for choice in choices.split()}
    assert len(listed) > 80
    assert {name for name in listed if not (CONF / name).is_file()} == set()
