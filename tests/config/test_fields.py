"""Fields of a task or a launcher of the user's are keys, whether or not its file lists them."""

from __future__ import annotations

import pytest

from exp.config.fields import admit, fields_of_choices


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(
        "from dataclasses import dataclass\n"
        "from exp.config.schema import LauncherConfig\n"
        "from exp.launcher.torchrun import TorchrunLauncher\n"
        "from exp.task import Task\n"
        "@dataclass\n"
        "class Count(Task):\n"
        "    name: str = 'count'\n"
        "    scale: float = 1.0\n"
        "@dataclass\n"
        "class WaitConfig(LauncherConfig):\n"
        "    note: str = ''\n"
        "class Wait(TorchrunLauncher):\n"
        "    keys = WaitConfig\n"
    )
    for group, text in (("task", "_target_: counting.Count\nname: count\n"), ("launcher", "_target_: counting.Wait\n")):
        (tmp_path / "my_conf" / group).mkdir(parents=True)
        (tmp_path / "my_conf" / group / "own.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "given",
    [["--config-dir", "my_conf"], ["--config-dir=my_conf"], ["-cd", "my_conf"], ["hydra.searchpath=[file://my_conf]"]],
)
def test_fields_of_chosen_classes_are_admitted(folder, given):
    words = [*given, "task=own", "launcher=own", "task.scale=2", "launcher.note=a,b", "task.sale=1", "seed=1"]
    assert admit(words)[len(given) :] == [
        "task=own", "launcher=own", "++task.scale=2", "++launcher.note=a,b", "task.sale=1", "seed=1",
    ]  # fmt: skip
    assert set(fields_of_choices(words)) == {"task.scale", "launcher.note"}
