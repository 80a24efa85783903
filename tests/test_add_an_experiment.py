"""docs/add-an-experiment.md, done to the letter: one module and three YAML files outside the repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.docs.reader import write_files

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "add-an-experiment.md"
OIL = ["--config-dir", "my_conf", "experiment=oil", "backend=cpu", "max_steps=4", "log_every=1", "plots=false"]


@pytest.fixture
def oil(exp):
    yaml = [f"my_conf/{group}.yaml" for group in ("data/oil", "model/mlp", "experiment/oil")]
    write_files(PAGE, exp.folder, python=["my_experiment.py"], yaml=yaml)
    shutil.copy(str(ROOT / "data" / "ett" / "ETTh1.csv"), str(exp.folder))

    def run(*arguments, code=0):
        done = exp(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    run.code = exp.folder / "my_experiment.py"
    return run


def test_everything_works_with_it(oil, exp):
    assert "left out" not in oil(*OIL, "output_dir=one", "val_every=2").stdout
    log = (exp.path("one") / "logs" / "rank0.log").read_text()
    assert log.count("34 of 12194 training samples are left out in each epoch, others each time: global batch 64") == 1
    oil(*OIL, "output_dir=two", "nproc=2")
    for name, error in exp.result("one")["metrics"].items():
        assert exp.result("two")["metrics"][name] == pytest.approx(error, rel=0.2)  # dropout is a rank's own
    # Resumed in the middle, and not.
    oil(*OIL, "output_dir=half", "max_steps=2", "val_every=2")
    oil(*OIL, "output_dir=half", "val_every=2", "resume=auto")
    assert exp.result("half")["metrics"] == exp.result("one")["metrics"]
    oil("--config-dir", "my_conf", "task=eval", "init_from=one", "backend=cpu", "output_dir=tested", "nproc=2")
    # Other batches, which a matrix product may round otherwise.
    assert exp.result("tested")["metrics"] == pytest.approx(exp.result("one")["metrics"], rel=1e-6)
    assert list(exp.result("tested")["metrics"]) == ["error", "squared_error"]
    oil("--config-dir", "my_conf", "task=predict", "init_from=one", "backend=cpu", "output_dir=said", "nproc=2")
    shares = [np.load(exp.path("said") / "predictions" / f"rank{rank}.npz") for rank in (0, 1)]
    assert sorted(number for share in shares for number in share["index"]) == list(range(3484))
    oil("-m", *OIL, "model.hidden=4,8", "metric=squared_error", "output_dir=sweep")
    assert exp.result("sweep/0")["metric_name"] == "squared_error"
    oil(*OIL, "task=parity", "steps=2", "output_dir=parity")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("(Data):", ":", "data._target_=my_experiment.OilTemperature"),
        ("return AbsoluteError()", "return [AbsoluteError(), SquaredError()]", "squared_error"),
        ("def metrics(", "def metric(", "my_experiment.OilTemperature has no metrics(...)"),
        ("self.table[number]", "self.tables[number]", "OilTemperature.val[0] raises AttributeError"),
        ("inputs, hidden=32", "hidden=32", "my_experiment.Mlp takes no key 'inputs'"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_the_first_step(oil, exp, old, new, says):
    text = oil.code.read_text()
    assert old in text
    oil.code.write_text(text.replace(old, new))
    done = oil(*OIL, "output_dir=run", code=2)
    assert says in done.stderr.splitlines()[0]
    assert not exp.path("run").exists()


def test_one_batch_is_the_whole_way_of_a_run(oil, exp):
    short = ["experiment=oil", "backend=cpu", "debug=one_batch", "nproc=2", "output_dir=short"]
    assert "left out" not in oil("--config-dir", "my_conf", *short).stdout
    result, run = exp.result("short"), exp.path("short")
    assert result["resumed_from"] == str(run / "checkpoints" / "step_00000001.pth")
    assert (result["steps"], result["measured_on"]) == (2, "test (1 of its batches)")
    assert (run / "plots" / "curves.png").is_file()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(record["split"], record["step"]) for record in records] == [
        ("train", 1), ("val", 1), ("train", 2), ("val", 2), ("test", 2),
    ]  # fmt: skip


def test_overfit_tells_whether_the_model_can_learn(oil, exp):
    text = oil.code.read_text()
    for old, new in (('"y": row[-1]', '"y": row[0]'), ("nn.Dropout(0.1), ", "")):
        assert old in text
        text = text.replace(old, new)
    oil.code.write_text(text)
    overfit = ["--config-dir", "my_conf", "experiment=oil", "backend=cpu", "debug=overfit", "plots=false"]
    said = oil(*overfit, "optim.lr=1e-2", "output_dir=learned").stdout
    assert "the model can learn" in said
    assert "128 samples to train, 128 to validate, 128 to test" in said
    result = exp.result("learned")
    assert result["steps"] < 500
    assert result["measured_on"] == "test (training batches)"
    # The loss of the last two steps, before the second of which the weights were others still.
    assert result["metrics"]["squared_error"] == pytest.approx(exp.losses("learned")[result["steps"] // 10 * 10], rel=1)
    assert "that is not near zero" in oil(*overfit, "optim.lr=1e-9", "max_steps=4", "output_dir=not").stdout
