"""Hydra's own options and keys, and files of configurations: each is used, or is refused with what to write instead."""

from __future__ import annotations

from hydra._internal.utils import get_args_parser

from tests.behaviour.conftest import one_by_one

FILES = {
    "my/experiment/mine.yaml": "# Mine.\n\n# @package _global_\noutput_dir: from_file\nmax_steps: 3\n",
    "my/experiment/bare.yaml": "defaults:\n  - override /model: timebridge_small\nmax_steps: 2\n",
    "my/experiment/runs.yaml": "# @package _global_\nhydra:\n  run:\n    dir: elsewhere\n",
    "my/experiment/logs.yaml": "# @package _global_\ndefaults:\n  - override /hydra/job_logging: default\nname: x\n",
    "my/experiment/word.yaml": "# @package _global_\ndata: mine\n",
    "my/experiment/hook.yaml": "# @package _global_\nhooks: {type: EMAHook}\n",
    "my/experiment/items.yaml": "# @package _global_\noptim: [1]\n",
    "my/experiment/inside.yaml": "# @package _global_\nlogger:\n  requires: {a: b}\n",
    "my/experiment/number.yaml": "# @package _global_\nhydra: 5\n",
    "my/experiment/record.yaml": "# @package _global_\nrecord:\n  trained_in: elsewhere\n",
    "my/data/mine.yaml": "_target_: mine.Mine\n",
    "my/data/none.yaml": "name: mine\nchannels: 1\nhorizon: 1\n",
    "my/model/mine.yaml": "_target_: mine.Mine\noptions:\n  a: 1\n",
    "other/experiment/other.yaml": "# @package _global_\nlog_every: 7\n",
}
MINE = ["--config-dir", "my"]
OPTIONS = {
    "help": [([*MINE, "-h"], 0, "mine")],
    "hydra_help": [(["--hydra-help"], 0, "--config-dir")],
    "cfg": [
        (["--cfg", "job"], 0, "max_steps: null"),
        (["seed=7", "-c", "hydra"], 0, "sweeper"),
        (["--cfg"], 2, "--cfg"), (["-m", "seed=1,2", "--cfg", "job"], 2, "--cfg"),
        (["--cfg", "everything"], 2, "everything"),
    ],
    "resolve": [
        (["--resolve", "--cfg=job", "output_dir=x/${name}"], 0, "output_dir: x/timebridge_small"),
        (["--resolve"], 2, "--cfg job"),
    ],
    "package": [(["-c", "job", "-p", "optim"], 0, "weight_decay"), (["--package=optim"], 2, "--cfg job")],
    "run": [(["-r", "nprox=2"], 2, "'nproc'"), (["--run", "-m"], 2, "--run and --multirun")],
    "multirun": [(["seed=1,2", "-m", "task=report", "run=x"], 2, "task=report"), (["--multi", "seed=1"], 2, "--multi")],
    "shell_completion": [(["-sc", "install=bash"], 0, "complete"), (["-sc"], 2, "install=bash")],
    "config_path": [(["--config-path", "my"], 2, "--config-dir"), (["-cp=my"], 2, "--config-dir")],
    "config_name": [(["--config-name=mine"], 2, "experiment=")],
    "config_dir": [
        ([*MINE, "experiment=mine", "-c", "job"], 0, "output_dir: from_file"),
        ([*MINE, "-cd=other", "experiment=other", "-c", "job"], 0, "log_every: 7"),
        (["-cd", "other", *MINE, "experiment=other", "-c", "job"], 0, "log_every: 7"),
        (["hydra.searchpath=[other,'my']", "experiment=mine", "-c", "job"], 0, "max_steps: 3"),
        (["--config-dir", "myy"], 2, "'my'"),
        (["hydra.searchpath=[pkg://nonesuch]"], 2, "nonesuch"),
        (["hydra.searchpath=3"], 2, "hydra.searchpath=3"),
    ],
    "experimental_rerun": [(["--experimental-rerun", "run.pickle"], 2, "resume="), (["--exp", "x"], 2, "--exp")],
    "info": [(["--info"], 0, "Config search path"), (["--info", "defaults-tree"], 0, "experiment"),
             (["--info=all", "--cfg=job"], 2, "--info")],
    "overrides": [
        (["hydra.run.dir=x"], 2, "output_dir="),
        (["-m", "hydra.sweep.dir=x", "seed=1,2"], 2, "output_dir="),
        (["-m", "hydra.sweep.subdir=a_${seed}", "seed=1,2"], 2, "hydra.sweep.subdir"),
        (["hydra.output_subdir=x"], 2, "output_dir="),
        (["hydra.job.chdir=true"], 2, "hydra.job.chdir"),
        (["hydra.job.name=x"], 2, "hydra.job.name"),
        (["+hydra.job.env_set.A=1"], 2, "backend.env"),
        (["hydra.mode=MULTIRUN"], 2, "-m"),
        (["hydra.verbose=true"], 2, "hydra.verbose"),
        (["hydra/launcher=basic", "-m"], 2, "launcher="),
        (["hydra/job_logging=default"], 2, "hydra/job_logging"),
        (["++hydra.callbacks.x._target_=os.system"], 2, "hydra.callbacks"),
        (["~hydra.help"], 2, "hydra.help"),
        (["record.trained_in=x"], 2, "record.trained_in"),
        ([f"hooks={'[' * 600}{']' * 600}"], 2, "hooks"),
        ([*MINE, "experiment=bare"], 2, "# @package _global_"),
        ([*MINE, "experiment=word"], 2, "data must be a dictionary, not 'mine'; a choice belongs into"),
        ([*MINE, "experiment=hook"], 2, "hooks must be a list"),
        ([*MINE, "experiment=items"], 2, "optim must be a dictionary"),
        ([*MINE, "experiment=inside"], 2, "inside.yaml: logger.requires must be a list"),
        ([*MINE, "experiment=number"], 2, "hydra must be a dictionary"),
        ([*MINE, "experiment=runs"], 2, "runs.yaml: hydra.run"),
        ([*MINE, "experiment=logs"], 2, "logs.yaml: hydra/job_logging"),
        ([*MINE, "experiment=record"], 2, "record.yaml: record"),
        ([*MINE, "data=none"], 2, "data._target_"),
        ([*MINE, "data=mine", "data.bands=4", "-c", "job", "-p", "data"], 0, "bands: 4"),
        ([*MINE, "model=mine", "model.options.b=5", "model.depth=2", "--cfg=job"], 0, "    b: 5\n  depth: 2"),
        ([*MINE, "data=etth1", "data.bands=4", "-c", "job"], 2, "data.bands"),
    ],
}  # fmt: skip
"""By the name of an option: command lines, each with its exit code, and a piece of its output or of its error."""


def test_every_option_and_key_of_hydra_is_used_or_refused_with_the_way_to_do_it(exp):
    assert set(OPTIONS) == {*vars(get_args_parser().parse_args([]))}
    for name, text in FILES.items():
        exp.path(name).parent.mkdir(parents=True, exist_ok=True)
        exp.path(name).write_text(text)
    before = sorted(exp.folder.rglob("*"))
    rows = [row for each in OPTIONS.values() for row in each]
    answers = one_by_one(exp.folder, [line for line, _, _ in rows])
    for (line, code, text), (ended, said, printed) in zip(rows, answers):
        assert ended == code, (line, said)
        assert (text in printed) if code == 0 else (said.startswith("error: ") and text in said.splitlines()[0]), (
            line, said, printed)  # fmt: skip
        assert "Traceback" not in said
    assert sorted(exp.folder.rglob("*")) == before
