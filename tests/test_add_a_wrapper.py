"""docs/add-a-wrapper.md, done to the letter: a module and a YAML file each, outside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TINY
from tests.docs.reader import write_files

PAGE = Path(__file__).parents[1] / "docs" / "add-a-wrapper.md"


@pytest.fixture
def page(exp):
    write_files(PAGE, exp.folder, python=["my_wrapper.py", "my_logger.py"],
                yaml=["my_conf/wrapper/half.yaml", "my_conf/logger/table.yaml"])  # fmt: skip

    def run(*arguments, code=0):
        done = exp("--config-dir", "my_conf", *TINY, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return run


def test_a_wrapper_and_a_logger_of_ones_own(page, exp):
    page("wrapper=half", "wrapper.options.bucket_cap_mb=50", "logger=table", "nproc=2", "output_dir=half")
    page("nproc=2", "output_dir=whole")
    assert exp.result("half")["wrapper"] == "half"
    half, whole = exp.losses("half"), exp.losses("whole")
    assert half == pytest.approx(whole, rel=1e-2)
    assert half != whole  # gradients of 16 bits lead elsewhere
    lines = (exp.path("half") / "table" / "figures.txt").read_text().splitlines()
    assert [line.split()[:2] for line in lines if "loss" in line] == [["2", "train/loss"], ["4", "train/loss"]]
    assert {"val/mse", "test/mse"} <= {line.split()[1] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "old", "new", "words", "says"),
    [
        ("wrapper", "return ddp", "return None", [], "HalfGradients.wrap gives (NoneType)"),
        ("wrapper", "", "", ["+wrapper.options.bucket=3"], "my_wrapper.HalfGradients takes no key 'bucket'"),
        ("logger", "def log", "def logs", [], "my_logger.Table has no log(...)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_first_step(page, exp, module, old, new, words, says):
    file = exp.folder / f"my_{module}.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    done = page("wrapper=half", "nproc=2", *["logger=table"] * (module == "logger"), *words, "output_dir=run", code=2)
    assert says in done.stderr.splitlines()[0]
    assert not exp.path("run").exists()
