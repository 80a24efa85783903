"""The first import of MMEngine on a machine, while another process makes its first, too: yapf's cache is half there."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, as yapf fills it; and its files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subprocess.run([sys.executable, "-c", "import yapf"], check=True)
    pickles = [path for path in (tmp_path / "cache").rglob("*.pickle") if path.stat().st_size]
    assert len(pickles) == 2
    return pickles


def test_half_a_cache_is_waited_for(cache):
    whole = {path: path.read_bytes() for path in cache}
    for path in cache:
        path.write_bytes(whole[path][: len(whole[path]) // 2])
    importing = subprocess.Popen([sys.executable, "-c", "import exp.engine; print('imported')"], stdout=subprocess.PIPE)

    def finish():
        for path in cache:
            path.write_bytes(whole[path])

    writer = threading.Timer(3, finish)
    writer.start()
    output, _ = importing.communicate(timeout=60)
    writer.join()
    assert (output, importing.returncode) == (b"imported\n", 0)
