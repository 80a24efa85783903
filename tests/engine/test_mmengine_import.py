"""The first import of MMEngine on a machine, while another process makes its first, too: yapf's cache is half there."""

from __future__ import annotations

import subprocess
import sys
import threading


def test_half_a_cache_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subprocess.run([sys.executable, "-c", "import yapf"], check=True)
    whole = {path: path.read_bytes() for path in tmp_path.rglob("*.pickle") if path.stat().st_size}
    assert len(whole) == 2
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
    importing = subprocess.Popen([sys.executable, "-c", "import exp.engine; print('imported')"], stdout=subprocess.PIPE)
    writer = threading.Timer(3, lambda: [path.write_bytes(content) for path, content in whole.items()])
    writer.start()
    output, _ = importing.communicate(timeout=60)
    writer.join()
    assert (output, importing.returncode) == (b"imported\n", 0)
