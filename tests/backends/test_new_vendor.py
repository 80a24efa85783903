"""docs/add-a-backend.md, done to the letter: one file and one YAML outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from exp.backends_registry import create_backend
from tests.conftest import TINY
from tests.docs.reader import write_files

DOC = Path(__file__).parents[2] / "docs" / "add-a-backend.md"
RUN = [setting for setting in TINY if not setting.startswith("backend=")]


@pytest.fixture
def acme(tmp_path):
    """The two files of the page, written where it says."""
    write_files(DOC, tmp_path, python=["lib/acme_backend.py", "lib/my_vendors.py"], yaml=["my_conf/backend/acme.yaml"])
    return tmp_path


def test_by_entry_point(exp, acme):
    info = acme / "lib" / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[exp.backends]\nacme = acme_backend:AcmeBackend\naa_broken = acme_nowhere:Backend\n"
    )
    (acme / "my_conf" / "backend" / "acme.yaml").write_text("_target_: acme\nname: acme\n")
    done = exp("--config-dir", "my_conf", "backend=auto", *RUN, "output_dir=run", PYTHONPATH=str(acme / "lib"))
    assert done.returncode == 0, done.stderr
    assert exp.result("run")["backend"] == "acme"
    assert "'aa_broken'" in done.stderr.splitlines()[0]
    # And without a YAML file of its own: the class's defaults.
    done = exp("backend=auto", *RUN, "output_dir=second", PYTHONPATH=str(acme / "lib"))
    assert done.returncode == 0, done.stderr
    assert exp.result("second")["backend"] == "acme"


def test_six_vendors_by_way_of_torchs_accelerator(acme, monkeypatch):
    monkeypatch.syspath_prepend(str(acme / "lib"))
    for vendor in ("Npu", "Mlu", "Musa", "Xpu", "Mps", "Hpu"):
        backend = create_backend({"_target_": f"my_vendors.{vendor}Backend", "name": vendor.lower()})
        assert backend.why_unavailable() is not None
        assert backend.device_count() == 0
        for variable in backend.visible_variables:
            monkeypatch.setenv(variable, "4,5,6,7")
            assert backend.only([3, 1], 2) == {variable: "5,7" if vendor == "Npu" else "7,5"}


def test_a_lazy_card_runs_what_is_recorded_before_and_after_the_step(acme, monkeypatch):
    core = acme / "lib" / "habana_frameworks" / "torch" / "core.py"
    core.parent.mkdir(parents=True)
    core.write_text("marks = []\ndef mark_step():\n    marks.append('mark')\n")
    monkeypatch.syspath_prepend(str(acme / "lib"))
    backend = create_backend({"_target_": "my_vendors.HpuBackend", "name": "hpu"})
    from habana_frameworks.torch.core import marks

    class Optimizer:
        def step(self, **kwargs):
            marks.append(kwargs)

    backend.end_step(Optimizer(), scale=2)
    assert marks == ["mark", {"scale": 2}, "mark"]
