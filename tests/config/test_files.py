"""The files of conf/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exp.config.command_line import help_text
from exp.config.sources import register
from exp.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"


def test_each_choice_that_the_help_lists_has_a_file():
    register()
    listing = help_text().partition("Choices (GROUP=CHOICE)\n")[2].partition("\n\n")[0]
    groups = re.findall(r"^  (\w+)((?:\s+\w+)+?)(?=\n  \w|\Z)", listing, re.MULTILINE)
    listed = {f"{group}/{choice}.yaml" for group, choices in groups for choice in choices.split()}
    assert len(listed) > 80
    assert {name for name in listed if not (CONF / name).is_file()} == set()


def test_a_file_that_a_choice_of_exp_hides_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "plain.yaml").write_text("_target_: mine.Net\n")
    with pytest.raises(ConfigError, match=r"plain\.yaml has the name of exp's own choice model=plain.*another name"):
        register([str(tmp_path)])
    (tmp_path / "model" / "plain.yaml").rename(tmp_path / "model" / "mine.yaml")
    register([str(tmp_path)])
    register([])
