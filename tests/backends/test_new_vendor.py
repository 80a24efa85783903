"""docs/extend/add-a-backend.md, done to the letter: one file and one YAML outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from exp.hardware.cards import visible_devices_env
from tests.backends import made
from tests.conftest import TINY, write_files

DOC = Path(__file__).parents[2] / "docs" / "extend" / "add-a-backend.md"


@pytest.fixture
def lib(tmp_path, monkeypatch):
    """The page's modules, in a folder that Python looks in."""
    write_files(DOC, tmp_path, python=["lib/acme_backend.py", "lib/my_vendors.py"])
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    return tmp_path / "lib"


def test_an_installed_backend_is_found_by_auto_without_a_yaml_file_and_a_broken_one_passed_over(exp, lib):
    info = lib / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[exp.backends]\nacme = acme_backend:AcmeBackend\naa_broken = acme_nowhere:Backend\n"
    )
    done = exp("backend=auto", *TINY[1:], "output_dir=run", PYTHONPATH=str(lib))
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["backend"] == "acme"
    assert "'aa_broken'" in done.stderr.splitlines()[0]


def test_a_vendor_by_way_of_torchs_accelerator(lib, monkeypatch):
    backend = made("my_vendors.HpuBackend")
    reason = backend.unavailable_reason()
    assert "habana_frameworks" in reason or "torch 1.10" in reason
    assert backend.worker_env(0, 1, True)["PT_ENABLE_INT64_SUPPORT"] == "1"
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,5,6,7")
    assert visible_devices_env(backend, [3, 1]) == {"HABANA_VISIBLE_MODULES": "5,7"}
