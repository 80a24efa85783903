"""A device's plug-in that torch finds by itself, and that does not load: its vendor's runtime is not on the path."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TINY

pytestmark = [
    pytest.mark.skipif(not hasattr(torch, "_import_device_backends"), reason="torch >= 2.5 loads plug-ins by itself"),
]


def test_it_is_left_alone_unless_asked_for(exp, tmp_path):
    (tmp_path / "acme_card.py").write_text("raise ImportError('libacmert.so: cannot open shared object file')")
    about = tmp_path / "acme_card-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-card\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nacme = acme_card:load\n")
    settings = [*TINY, "max_steps=1", "output_dir=run"]
    done = exp(*settings, "nproc=2", fresh=True, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr  # agent, fork server and workers
    settings.append("overwrite=true")
    done = exp(*settings, fresh=True, PYTHONPATH=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode == 3, done.stderr
    first = done.stderr.splitlines()[0]
    assert "libacmert.so: cannot open shared object file" in first
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in first
