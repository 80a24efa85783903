"""What a sweep makes of what a sweeper, or a command line, asks for."""

from __future__ import annotations

import json
import signal
import sqlite3

import pytest

from tests.behaviour.conftest import has_steps, one_by_one, table, wait_for
from tests.conftest import TINY, Forked

SWEEP = ["-m", *TINY, "max_steps=2", "output_dir=sweep", "sweep.plots=false", "sweep.parallel_jobs=1"]


REFUSED = [
    (["-m", "output_dir=a,b"], "output_dir"),
    (["-m", "output_dir=x${seed}", "seed=1,2"], "output_dir"),
    (["-m", "output_dir=", "seed=1,2"], "output_dir"),
    (["-m", "--config-dir=my", "experiment=a,b"], "output_dir"),
    (["-m", "seed=range(5,5)"], "seed=range(5,5)"),
    (["-m", "seed=range(5,5)", "hydra.sweeper.max_batch_size=2"], "seed=range(5,5)"),
    (["-m", "task=eval", "init_from=glob(*)"], "glob()"),
    (["-m", "task=report", "run=a,b"], "task=report"),
    (["task=report", "run="], "run is empty"),
    (["task=report", "run=[a,'']"], "run is empty"),
    (["task=attach"], "needs run="),
    (["task=attach", "run=nowhere"], "run=nowhere"),
    (["task=attach", "run=[a,b]"], "needs run="),
    (["output_dir="], "output_dir"),
    (["init_from="], "init_from"),
    (["resume="], "resume"),
    (["task=qualify", 'task.checks=[doctor,"sped-*"]'], "sped-*"),
    (["task=qualify", "task.steps=5"], "task.steps=5"),
]


def test_what_can_only_be_a_mistake_is_refused_and_leaves_nothing(exp):
    exp.path("my/experiment").mkdir(parents=True)
    for name in ("a", "b"):
        text = f"# @package _global_\nname: {name}\noutput_dir: of_{name}\n"
        exp.path(f"my/experiment/{name}.yaml").write_text(text)
    answers = one_by_one(exp.folder, [["backend=cpu", *line] for line, _ in REFUSED])
    for (line, key), (code, said, _) in zip(REFUSED, answers):
        assert (code, len(said.splitlines()), said[:7], key in said) == (2, 1, "error: ", True), (line, said)
    assert [path.name for path in exp.folder.iterdir()] == ["my"]


def statuses(exp) -> list[str]:
    return [row["status"] for row in table(exp.path("sweep/sweep.csv"))]


@pytest.fixture
def optuna(exp):
    """Starts a search by Optuna's sweeper."""
    pytest.importorskip("optuna", reason="the extra 'optuna' is not installed")
    return lambda *words: exp(*SWEEP, "hydra/sweeper=optuna", *words)


def test_a_sweeper_that_raises_is_one_line(exp, optuna):
    """As Optuna's does where no trial has a value."""
    done = optuna("hydra.sweeper.n_trials=1", "optim.lr=choice(1e30)", "log_every=1")
    assert done.returncode == 1, done.stdout
    assert "error: the sweeper has ended the sweep: ValueError: No trials are completed yet" in done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(exp) == ["failed"]


COUNTING = """
import json, runpy, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
sys.argv = ["exp", *json.loads(sys.argv[1])]
try:
    runpy.run_module("exp", run_name="__main__")
finally:
    read = [sum(each.endswith(f"sweep/{job}/config.yaml") for each in opened) for job in range(3)]
    print(json.dumps([read, sum("/.sweep.csv." in each for each in opened)]))
"""


def test_a_job_is_read_once_however_many_batches_follow(exp):
    """A sweeper may ask for one job at a time, a thousand times."""
    words = [*SWEEP, "optim.type=SGD", "seed=1,2,3", "hydra.sweeper.max_batch_size=1"]
    process = Forked(exp.folder, json.dumps(words), script=COUNTING)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    (first, *others), written = json.loads(output.splitlines()[-1])
    assert others == [first, first]
    assert written == 3
    assert statuses(exp) == ["completed"] * 3
    assert {row["run"] for row in table(exp.path("sweep/sweep.csv"))} == {"0", "1", "2"}


def test_a_search_kept_in_a_database_goes_on_in_the_next(exp, optuna):
    version = pytest.importorskip("sqlalchemy").__version__
    if int(version.partition(".")[0]) > 1:
        pytest.skip(f"constraints/ pin SQLAlchemy 1, which Optuna 2.10 needs; installed is {version}")
    stored = ["hydra.sweeper.storage=sqlite:///trials.db", "hydra.sweeper.study_name=mine", "hydra.sweeper.n_jobs=1"]
    for number in (1, 2):
        words = [*stored, "hydra.sweeper.n_trials=1", "optim.lr=interval(1e-4,1e-3)", f"output_dir=sweep{number}"]
        done = optuna(*words)
        assert done.returncode == 0, done.stderr
    with sqlite3.connect(str(exp.path("trials.db"))) as trials:
        assert trials.execute("select count(*) from trials where state = 'COMPLETE'").fetchall() == [(2,)]


def test_a_search_for_the_worst_ends_with_its_first_batch(exp, optuna):
    search = ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "optim.lr=interval(1e-4,1e-3)"]
    done = optuna(*search, "hydra.sweeper.direction=maximize")
    assert (done.returncode, statuses(exp)) == (2, ["completed"]), done.stderr
    assert "looks for the worst mse, of which smaller is better; set hydra.sweeper.direction=minimize" in done.stderr


def test_after_a_notice_no_further_batch_is_begun(exp):
    long = ["max_steps=300", "max_epochs=10", "seed=1,2", "hydra.sweeper.max_batch_size=1"]
    process = Forked(exp.folder, *SWEEP, *long)
    wait_for(has_steps(exp.folder / "sweep" / "0"), process)
    process.send_signal(signal.SIGUSR2)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 75, output + errors
    assert exp.result("sweep/0")["status"] == "preempted"
    assert not (exp.folder / "sweep" / "1").exists()
    assert "sweep.resume=true" in output
