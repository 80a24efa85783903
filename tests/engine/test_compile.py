"""compile=true: numbers, names and files are those of a run without; and who cannot have it is told why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exp import compat
from tests.conftest import clean_environment
from tests.docs.reader import write_files
from tests.simulators import needs_current_card

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "add-an-experiment.md"
OIL = ["--config-dir", "my_conf", "experiment=oil", "backend=cpu", "log_every=1", "plots=false", "rehearsal=false"]
CHECK = """
import sys
from exp.backends_registry import create_backend
from exp.engine.kernels import check_compilation
from exp.errors import ConfigError
import exp.launcher.preload  # as in a forked worker
name = sys.argv[1]
backend = create_backend({"_target_": name, "name": name, "simulate": name == "gcu"})
device = backend.set_device(0)
try:
    check_compilation(backend, device)
    from torch._inductor import config
    print(config.compile_threads)
except ConfigError as error:
    print(str(error).splitlines()[0])
"""

needs_compilation = pytest.mark.skipif(not compat.supports_compilation(), reason="torch 2.3 compiles in place")


def refusal(backend: str, **environment: str) -> str:
    """What is said against compiling; nothing is: how many processes of torch's compile."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK, backend],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


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
@pytest.mark.slow
def test_as_many_compile_as_there_are_threads():
    assert refusal("cpu", OMP_NUM_THREADS="3") == "3"


@needs_compilation
@pytest.mark.slow
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
@pytest.mark.slow
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
@pytest.mark.slow
def test_what_is_missing_here_is_said_before_the_data_are_read(tmp_path):
    said = refusal("cpu", CXX="/nowhere/c++", TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_COMPILE_THREADS="1")
    assert said.startswith("compile=true on cpu (cpu): torch cannot compile here: ")
    assert "/nowhere/c++" in said
    assert said.endswith("; set compile=false")


@pytest.mark.skipif(compat.supports_compilation(), reason="older torch")
def test_older_torch_is_refused():
    version = ".".join(map(str, compat.TORCH_VERSION))
    assert refusal("cpu").endswith(f"it needs torch 2.3 or later, and this is {version}; set compile=false")


@needs_current_card
@pytest.mark.slow
def test_a_card_whose_compiled_kernels_fail_is_refused():
    assert "architecture (3: S60); set compile=false" in refusal("gcu", SIM_GCU_PROFILE="s60")
