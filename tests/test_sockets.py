"""Loader processes are reached by sockets, whose names are short."""

from __future__ import annotations


def test_a_long_temporary_folder_is_no_matter_and_nothing_is_left(exp):
    temporary = exp.folder / ("t" * 80)
    temporary.mkdir()
    settings = ("data.num_workers=1", "max_steps=1", "nproc=2", "launcher.fork=false")
    exp.train("run", *settings, fresh=True, timeout=150, TMPDIR=str(temporary))
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
