"""compile=true: numbers, names and files are those of a run without; and who cannot have it is told why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from exp import compat
from tests.conftest import TINY
from tests.docs.reader import write_files

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-an-experiment.md"
OIL = ["--config-dir", "my_conf", "experiment=oil", "backend=cpu", "log_every=1", "plots=false", "rehearsal=false"]

needs_compilation = pytest.mark.skipif(not compat.supports_compilation(), reason="torch 2.3 compiles in place")


@pytest.fixture
def oil(exp):
    """Trains the example's model; what torch compiles is kept in ``compiled``."""
    yaml = [f"my_conf/{group}.yaml" for group in ("data/oil", "model/mlp", "experiment/oil")]
    write_files(PAGE, exp.folder, python=["my_experiment.py"], yaml=yaml)
    shutil.copy(str(ROOT / "data" / "ett" / "ETTh1.csv"), str(exp.folder))
    code = exp.folder / "my_experiment.py"
    code.write_text(code.read_text().replace("nn.Dropout(0.1)", "nn.Dropout(0.0)"))  # masks are drawn otherwise
    cache = exp.folder / "compiled"

    def run(*arguments: str) -> None:
        done = exp(*OIL, *arguments, TORCHINDUCTOR_CACHE_DIR=str(cache), TORCHINDUCTOR_COMPILE_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr

    run.products = lambda: sum("addmm" in file.read_text() for file in cache.rglob("*.py"))
    return run


@needs_compilation
def test_a_compiled_run_is_as_another_and_goes_on_uncompiled(oil, exp):
    oil("max_steps=4", "output_dir=eager")
    assert oil.products() == 0
    oil("max_steps=2", "output_dir=run", "nproc=2", "compile=true")
    assert oil.products() > 0
    (file,) = (exp.folder / "run" / "checkpoints").glob("step_*.pth")
    saved = torch.load(str(file), map_location="cpu", weights_only=False)
    assert list(saved["state_dict"]) == [f"layers.{number}.{kind}" for number in (0, 3) for kind in ("weight", "bias")]
    oil("max_steps=4", "output_dir=run", "resume=auto")
    assert exp.losses("run") == pytest.approx(exp.losses("eager"), rel=1e-5)
    assert exp.result("run")["changed_on_resume"]["compile"] == {"old": True, "new": False}


@pytest.mark.skipif(not compat.supports_full_sharding(), reason="needs torch >= 2.7")
def test_of_a_sharded_model_the_blocks_are_compiled(oil, exp):
    oil("max_steps=3", "output_dir=eager", "nproc=2", "wrapper=fsdp")
    assert oil.products() == 0
    oil("max_steps=3", "output_dir=run", "nproc=2", "wrapper=fsdp", "compile=true")
    assert oil.products() > 0
    assert exp.losses("run") == pytest.approx(exp.losses("eager"), rel=1e-5)
    assert exp.result("run")["metric"] == pytest.approx(exp.result("eager")["metric"], rel=1e-4)
    oil("task=eval", "init_from=run", "output_dir=evaluated")
    assert exp.result("evaluated")["metric"] == pytest.approx(exp.result("run")["metric"], rel=1e-5)


@needs_compilation
def test_a_compiler_that_is_missing_is_named_before_the_data_are_read(exp):
    done = exp(*TINY, "compile=true", "output_dir=run", CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(exp.folder),
               TORCHINDUCTOR_COMPILE_THREADS="1", fresh=True)  # fmt: skip
    assert done.returncode in (2, 3)
    assert "compile=true" in done.stderr.splitlines()[0]
    assert "/nowhere/c++" in done.stderr.splitlines()[0]
