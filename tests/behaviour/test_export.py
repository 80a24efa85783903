"""``task=export``: programs that run without exp, in the units of files, as docs/guide/export.md says."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exp as public
from exp import sample_data
from tests.behaviour.conftest import SCENES, SHORT, first_line, ran

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "export.md"
REFERENCE = Path(sys.prefix) / "reference"  # has the packages of ONNX (Makefile)
HAS_EXPORT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 5)
ONE_SAMPLE = """
import torch


class ByRow(torch.nn.Linear):
    def forward(self, x):
        return torch.stack([super(ByRow, self).forward(row.t()).t() for row in x])
"""


def exported(exp, *settings, **environment):
    """The folder ``export``, and ``export.json``."""
    ran(exp, "task=export", "backend=cpu", *settings, "output_dir=out", **environment)
    folder = exp.path("out") / "export"
    return folder, json.loads((folder / "export.json").read_text())


def test_programs_of_images_compute_what_the_model_does(exp, trained):
    formats = ["torchscript", *(["torch_export"] if HAS_EXPORT else [])]
    folder, about = exported(exp, f"init_from={trained('tiles')}", f"task.formats=[{','.join(formats)}]")
    assert about["inputs"]["image"]["shape"] == ["B", 3, 64, 64]
    assert about["inputs"]["image"]["range"] == [0, 255]
    assert set(about["differences"]) == {"merging", *formats}
    programs = [torch.jit.load(str(folder / "model.torchscript.pt"))]
    if HAS_EXPORT:
        programs.append(torch.export.load(str(folder / "model.pt2")).module())
    model = public.open_run(trained("tiles")).model()
    images = torch.randint(0, 256, (5, 3, 64, 64), generator=torch.Generator().manual_seed(3)).byte()
    with torch.no_grad():
        for batch in (images[:1] * 0.997, images * 0.997):  # fractions, as files of 16 bits give them
            expected = model(image=batch, mode="tensor")
            for program in programs:
                torch.testing.assert_close(program(image=batch), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(programs[0](images), model(image=images, mode="tensor"), rtol=1e-4, atol=1e-5)
    for wrong in (torch.zeros(2, 3, 60, 64), torch.zeros(2, 4, 64, 64), torch.zeros(2, 3, 64, 64).double()):
        for program in programs:
            with pytest.raises(Exception):  # noqa: B017 - of TorchScript
                program(image=wrong)
    for settings, key in (("task.formats=[onyx]", "task.formats"), ("nproc=2", "nproc")):
        done = exp("task=export", "backend=cpu", f"init_from={trained('tiles')}", settings, "output_dir=refused")
        assert done.returncode == 2
        assert key in done.stderr.splitlines()[0]


def test_the_script_of_the_page_forecasts_what_exp_does_from_the_rows_of_the_file(exp, trained):
    _, about = exported(
        exp, f"init_from={trained('forecast')}", *([] if HAS_EXPORT else ["task.formats=[torchscript]"])
    )
    assert list(about["inputs"]) == ["x", "marks"]
    assert set(about["batch_size"].values()) == {"any"}
    (script,) = re.findall("```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(script.splitlines()) <= 16
    script = script.replace("ETTh1.csv", str(Path(sample_data.__file__).parent / "ett" / "ETTh1.csv"))
    if not HAS_EXPORT:
        script = re.sub(r"= torch.export.*# or ", "= ", script)
    script = f"import sys; sys.modules['exp'] = None\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=exp.path("out"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ran(exp, "task=predict", f"init_from={trained('forecast')}", "backend=cpu", "plots=false", "output_dir=said")
    expected = list(csv.DictReader((exp.path("said") / "forecasts" / "future.csv").open()))
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert len(rows) == len(expected) > 0
    for row, other in zip(rows, expected):
        values = [float(other[name if name in other else f"{name}_forecast"]) for name in row]
        assert [float(value) for value in row.values()] == pytest.approx(values, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("backbone", ["segformer_b0", "dinov3_convnext_tiny"])
def test_formats_that_a_backbone_cannot_be_written_in_are_left_out_unless_they_are_named(exp, backbone):
    ran(exp, *SCENES[:2], *SHORT, f"model/backbone={backbone}", "data.size=32", "global_batch_size=8",
        "data.split_ratio=[0.4,0.3,0.3]", "max_steps=1", "schedule.warmup_steps=0", "output_dir=run")  # fmt: skip
    folder, about = exported(exp, "init_from=run")
    program = "model.pt2" if HAS_EXPORT else "model.torchscript.pt"
    assert {path.name for path in folder.iterdir()} >= {"export.json", program}
    assert "write_huggingface" in about["skipped"]["huggingface"]
    assert ("onnx" in about["skipped"]) != (folder / "model.onnx").exists()
    assert max(about["differences"].values()) <= 1e-4
    done = exp("task=export", "init_from=run", "backend=cpu", "task.formats=[huggingface]", "output_dir=refused")
    assert done.returncode == 2
    assert "write_huggingface" in done.stderr.splitlines()[0]


def test_a_model_that_depends_on_the_number_of_samples_is_written_for_one(exp):
    (exp.folder / "my_net.py").write_text(ONE_SAMPLE)
    ran(exp, "data=etth1", "model=plain", "plugins=[my_net]", "backend=cpu", "data.lookback=96", "global_batch_size=32",
        "max_steps=1", "plots=false", "model.module._target_=my_net.ByRow", "+model.module.in_features=96",
        "+model.module.out_features=96", "model.loss._target_=torch.nn.L1Loss", "output_dir=run")  # fmt: skip
    folder, about = exported(exp, "plugins=[my_net]", "init_from=run", "task.formats=[torchscript]")
    assert about["batch_size"] == {"torchscript": 1}
    program = torch.jit.load(str(folder / "model.torchscript.pt"))
    assert program(torch.zeros(1, 96, 7)).shape == (1, 96, 7)
    with pytest.raises(Exception, match=r"export\.json"):
        program(torch.zeros(2, 96, 7))


@pytest.mark.extended
@pytest.mark.skipif(not (REFERENCE / "onnx").exists(), reason="make test-all installs ONNX")
@pytest.mark.parametrize("name", ["forecast", "tiles"])
def test_onnx_files_compute_what_the_model_does_with_any_number_of_samples(exp, trained, name):
    settings = (f"init_from={trained(name)}", "task.formats=[onnx]")
    folder, about = exported(exp, *settings, fresh=True, PYTHONPATH=str(REFERENCE))
    assert about["differences"]["onnx"] <= 1e-4
    assert about["batch_size"] == {"onnx": "any"}
    assert (folder / "model.onnx").stat().st_size > 10_000
    assert "onnx" in first_line(exp("task=export", "backend=cpu", *settings, "output_dir=refused"))
