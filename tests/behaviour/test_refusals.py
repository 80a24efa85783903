"""What is refused before anything starts: exit code, the key in the first line, and no folder."""

from __future__ import annotations

import pytest

from tests.behaviour.conftest import FORECAST

REFUSED = {
    "+foo=1": "foo",
    "+model.foo=1": "model.foo",
    "+optim.foo=1": "optim.foo",
    "task=eval init_from=outputs/typo": "init_from=outputs/typo",
    "task=predict init_from=typo experiment=dinov3_loveda model.size=tiny": "init_from=typo",
    "task=eval init_from=.": "init_from=.",
    "resume=typo": "resume=typo",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_names_the_key_and_leaves_nothing(exp, command):
    settings = [each for each in FORECAST if "experiment=" not in command or not each.startswith(("data", "model"))]
    done = exp(*settings, *command.split())
    assert done.returncode == 2, done.stdout + done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("error: ")
    assert REFUSED[command] in first
    assert "Traceback" not in done.stderr
    assert not list(exp.folder.iterdir())
