"""docs/add-a-task.md, done to the letter: a module and a YAML file each, outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.docs.reader import write_files

PAGE = Path(__file__).parents[1] / "docs" / "add-a-task.md"


@pytest.fixture
def page(exp):
    write_files(PAGE, exp.folder, python=["my_task.py", "my_launcher.py"],
                yaml=["my_conf/task/noise.yaml", "my_conf/launcher/nice.yaml"])  # fmt: skip

    def run(*arguments, code=0):
        done = exp("--config-dir", "my_conf", *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_a_task_and_a_launcher_of_ones_own(page, exp):
    page(*TINY, "launcher=nice", "launcher.niceness=3", "nproc=2", "output_dir=run")
    assert exp.result("run")["world_size"] == 2
    assert "niceness: 3" in (exp.path("run") / "config.yaml").read_text()
    noise = [
        "task=noise",
        "init_from=run",
        "task.levels=[0.0,5.0]",
        "task.key=x",
    ]  # backend=auto, which composes once more
    page(*noise, "output_dir=one")
    page(*noise, "output_dir=two", "nproc=2")
    one, two, plain = (exp.result(name)["metrics"] for name in ("one", "two", "run"))
    assert one["mse_at_0"] == pytest.approx(plain["mse"], rel=1e-6)
    assert two["mse_at_0"] == pytest.approx(plain["mse"], rel=1e-6)
    assert one["mse_at_5"] > one["mse_at_0"]
    assert exp.result("one")["metric"] == one["mse_at_0"]
    assert two["mse_at_5"] == pytest.approx(one["mse_at_5"], rel=1e-6)


@pytest.mark.slow
def test_their_keys_are_typed_and_checked_before_anything_is_written(page, exp):
    exp.path("weights.pth").touch()
    for words, says in (
        (["launcher=nice", "launcher.nicenes=3"], "'launcher.niceness'"),
        (["launcher=nice", "launcher.niceness=much"], "launcher.niceness"),
        (["task=noise", "init_from=weights.pth", "task.levels=[-1.0]"], "task.levels=[-1.0]"),
        (["task=noise", "init_from=weights.pth", "task.key=[1]"], "task.key"),  # a field that the file does not list
        (["task=noise", "init_from=weights.pth", "task.kay=x"], "'task.key'"),
    ):
        done = page(*words, "output_dir=run", code=2)
        assert says in done.stderr.splitlines()[0], done.stderr
    assert not exp.path("run").exists()
