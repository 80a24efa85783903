"""Somebody who reads the documentation and types its commands.

A command goes through a real bash, so that quotes, tildes and variables are bash's, with a home folder that has the
files that the pages talk about. What runs here is shrunk by overrides appended to it; what cannot run here is composed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from omegaconf import OmegaConf

from exp.config.compose import typed
from tests.conftest import clean_environment, run_exp, write_files
from tests.docs.home import make_home

__all__ = ["ELSEWHERE", "GROUPS", "IMAGE_GROUPS", "PAGES", "ROOT", "lines_of", "try_pages"]

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "build" / "pages"  # by group: how many commands ran, and which need what is not here
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

# Pages whose commands build on one another, in the order of a reader.
GROUPS = {
    "series": ["README", "first-run", "train", "sweep", "resume", "own-csv", "data", "timebridge-prior"],
    "intervals": ["intervals"],
    "machines": ["run", "launch", "hardware", "checks", "hooks", "add-a-backend"],
    "images": ["own-images", "map", "dinov3", "data-images", "probes"],
    "tuning": ["tuning", "export"],
}  # fmt: skip
IMAGE_GROUPS = ("images", "tuning")
# Pages whose commands have a test of their own, by that.
ELSEWHERE = {
    "examples/self_supervision/tests/test_self_supervision.py": ["self-supervision"],
    "tests/behaviour/test_regression.py": ["heights"],
    "tests/behaviour/test_distillation.py": ["distillation"],
    "tests/behaviour/test_mixed.py": ["mixed"],
    "tests/behaviour/test_own_code.py": ["add-an-experiment", "add-a-task"],
    "tests/behaviour/test_trackers.py": ["trackers"],
    "tests/config/test_published.py": ["results"],
    "tests/forecasting/test_backtest.py": ["backtest"],
    "tests/test_estimate.py": ["estimate"],  # what trains is in tests/engine/test_fsdp.py
    "tests/test_python.py": ["python"],
    "tests/wheel_check.sh": ["operate"],
}
# Commands that are composed here and not run, and what they need.
NOT_HERE = {
    r"backend=gcu(?!_simulated)(?!.*simulate=true)": "a card",
    r"backend=(accelerator|cuda|rocm)": "a card",
    r"launcher=submitit(?!.*dry_run)": "a cluster; tests/slurm starts one",
    r"task=(qualify|operators|collectives|speed)": "an hour; tests/checks/test_qualify.py has small ones",
    r"task=attach": "a job; tests/slurm submits one",
    r"task=watch": "a run that is going on; tests/behaviour/test_watch.py has one",
    r"launcher=external": "a launcher outside; tests/launcher/test_external.py has one",
    r"init_from=(timm|hf|ms):": "a network; tests/behaviour has a hub of its own",
    r"task\.store=outputs/m_eurosat": "features of weights that are not here",
    r"launcher\.nnodes=2": "two nodes; tests/behaviour/test_launch.py has them on one machine",
}
SERIES = [
    "data.lookback=96", "model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=null",
    "global_batch_size=32", "max_epochs=1", "max_steps=2", "log_every=1", "plots=false",
]  # fmt: skip
IMAGES = [
    "model.backbone.size=tiny", "data.size=64", "global_batch_size=4", "max_epochs=null", "max_steps=2", "val_every=2",
    "schedule.warmup_steps=1", "log_every=1", "data.num_workers=0",
]  # fmt: skip
PART = ["debug.eval_batches=1"]
SHRINK = {
    r"-m exp -m": ["sweep.plots=false"],
    r"optuna": ["hydra.sweeper.n_trials=1", "hydra.sweeper.n_jobs=1"],
    r"experiment=dinov3_(mmrs1m_segmentation|loveda_finetune)": ["model.auxiliary_out_index=3"],
    r"traffic": ["global_batch_size=2", "data.eval_batch_size=8", "model.cointegrated_layers=0", *PART],
    r"model/backbone=segformer": ["model.backbone.size=b0"],
    r"model/backbone=dinov3_convnext": ["model.backbone.size=atto"],
    r"experiment=dinov3_(dubai|loveda)": ["model.window=256"],
    r"experiment=dinov3_dubai(?!.*data=)": ["data.splits={train: ['tile1/*'], val: ['tile2/*_008.*']}"],
    r"^(?!.*dry_run).*nproc=8": ["nproc=2"],
    r"model\.teacher\.backbone=vitl16": ["model.teacher.backbone.size=tiny"],
    r"task=doctor": ["task.burst_s=0.1"],
    r"task=probe": ["task.seeds=[1]", "task.shots=[4]", "task.epochs=2"],
    r"steps=20": ["steps=2"],
    r"num_windows=0": ["task.num_windows=30"],  # of all 2,700
    r"task=backtest(?!.*task.windows)": ["task.windows=2"],
}
HOOK = """
from mmengine.hooks import Hook


class MyHook(Hook):
    def __init__(self, interval):
        self.interval = interval
"""
UNSHRUNK = (
    r"task=(eval|export|predict|env|report|doctor|probe)|task=features init_from=outputs|init_from=\$RUN|--help|dry_run"
)


# Whatever starts exp leaves its arguments instead.
PROGRAMS = """
exp() { for word; do printf '%s\\0' "$word"; done >"$RECORD"; }
python() { while [ "$1" != exp ]; do shift; done; shift; exp "$@"; }
torchrun() { python "$@"; }
mpirun() { python "$@"; }
srun() { python "$@"; }
"""


def lines_of(page: Path) -> list[str]:
    """The commands in the page's blocks, comments and continuations as bash wants them."""
    blocks, fenced = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        fenced ^= fence
        inside = line if fenced else line[4:] if line.startswith("    ") else ""
        blocks.append("" if fence else inside)
    begin = r"^(?:python|exp|make|pip|kill|torchrun|mpirun|\w+=\$\()"
    return [command.strip() for command in re.findall(rf"{begin}(?:\\\n|.)*", "\n".join(blocks), re.MULTILINE)]


class Shell:
    """A reader at a terminal, who works in one folder; beside it lies his home."""

    def __init__(self, folder: Path) -> None:
        home, self.folder = make_home(folder / "home"), folder / "work"
        self.folder.mkdir()
        self.state, self.record = folder / "state", folder / "arguments"
        self.state.touch()
        # The only weights that need no download have this size, whatever the file is called.
        shutil.copy(str(home / "tiny.pth"), str(self.folder / "dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth"))
        (self.folder / "my_package.py").write_text(HOOK)
        write_files(ROOT / "docs" / "guide" / "data.md", self.folder, python=["my_columns.py"])
        rows = (ROOT / "data" / "ett" / "ETTh1.csv").read_text().splitlines(keepends=True)
        (self.folder / "new.csv").write_text("".join([rows[0], *rows[-400:]]))
        cells = [(number, row.split(",")) for number in (1, 2) for row in rows[number : 600 + 50 * number]]
        table = "".join(f"shop_{number},{row[0]},{row[number]}\n" for number, row in cells)
        (self.folder / "shops.csv").write_text(f"unique_id,ds,y\n{table}")
        cache = os.environ.get("SIM_GCU_CACHE", str(Path.home() / ".cache" / "simulated-gcu"))
        self.environment = {"HOME": str(home), "SIM_GCU_CACHE": cache}
        self.ran: set[frozenset[str]] = set()
        self.composed: list[str] = []  # what was not run, each with what it needs

    def arguments(self, line: str) -> list[str] | None:
        """What exp is given for a line; None where the line does not call it."""
        script = f"{PROGRAMS}source {self.state}\n{line}\ndeclare -p RUN >{self.state} 2>/dev/null || true\n"
        environment = clean_environment(RECORD=str(self.record), **self.environment)
        subprocess.run(["bash", "-ec", script], cwd=self.folder, env=environment, check=True)
        if not self.record.exists():
            return None
        words = self.record.read_bytes().decode().split("\0")[:-1]
        self.record.unlink()
        return words

    def try_out(self, line: str) -> str | None:
        """Run a line as it is here; returns what went wrong."""
        if line.startswith("make "):  # sets up an environment of its own
            words = ["make", "-n", *shlex.split(line, comments=True)[1:]]
            return said(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False))
        if line.startswith("pip "):  # installs from a package index
            (extra,) = re.findall(r"exp-accelerators\[(\w+)\]", line)
            return None if f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() else f"there is no extra {extra}"
        arguments = self.arguments(line)
        if arguments is None or ("optuna" in line and sys.version_info < (3, 11)):  # where it is not installed
            return None
        needs = [need for pattern, need in NOT_HERE.items() if re.search(pattern, line)]
        if needs:
            self.composed.append(f"{needs[0]}: {line}")
            single = [re.sub(r"^([\w.+]+=[^,\[{]+),.*", r"\1", word) for word in arguments if word != "-m"]
            done = run_exp(self.folder, *single, "--cfg", "job", **self.environment)
            return said(done) or (typed(OmegaConf.create(done.stdout), untrusted=True) and None)  # refuses wrong keys
        words = [*fewer_jobs(arguments), *self.shrinking(line)]
        # What comes last counts; and this machine is the CPU, said or not.
        same = frozenset({word.partition("=")[0]: word for word in words}.values()) - {"backend=cpu"}
        if same in self.ran:
            return None
        self.ran.add(same)
        return said(run_exp(self.folder, *words, **self.environment))

    def shrinking(self, line: str) -> list[str]:
        """What is appended to a line."""
        family = IMAGES if "dinov3" in line else SERIES
        words = [] if re.search(UNSHRUNK, line) else list(family)
        if re.search(r"task=features init_from=dinov3", line):
            words = ["model.backbone.size=tiny"]
        for pattern, more in SHRINK.items():
            words += more if re.search(pattern, line) else []
        # A key that the line sweeps is left to it.
        swept = re.findall(r"([\w.]+)=(?:[^ ]*,|choice|interval|tag)", line) if " -m " in line[12:] else []
        last = {word.partition("=")[0]: word for word in words}
        return [word for key, word in last.items() if key not in swept]


def said(done: subprocess.CompletedProcess[str]) -> str | None:
    """What a command that has failed said."""
    text = f"exit code {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return text if done.returncode != 0 else None


def fewer_jobs(arguments: list[str]) -> list[str]:
    """A sweep over lists as one of a single job: the first value of each list.

    Where a sweep goes on, the last value of the first list stays, too: it is the job that is not done yet.
    """
    words, swept = [], False
    for word in arguments:
        key, _, values = word.partition("=")
        if "-m" in arguments and re.fullmatch(r"[\w./+-]+(,[\w./+-]+)+", values):
            each = values.split(",")
            kept = [each[0], *(each[-1:] if "sweep.resume=true" in arguments and not swept else [])]
            word, swept = f"{key}={','.join(kept)}", True
        words.append(word)
    return words


def try_pages(folder: Path, group: str) -> None:
    """Try all commands of a group's pages in one folder."""
    shell = Shell(folder)
    wrong = []
    for name in GROUPS[group]:
        page = next(page for page in PAGES if page.stem == name)
        if name == "add-a-backend":
            python, yaml = ["acme_backend.py", "my_vendors.py"], ["my_conf/backend/acme.yaml"]
            write_files(page, shell.folder, python=python, yaml=yaml)
        for line in lines_of(page):
            error = shell.try_out(line)
            if error is not None:
                wrong.append(f"{page.name}: {line}\n{error}")
    LISTS.mkdir(parents=True, exist_ok=True)
    (LISTS / f"{group}.txt").write_text("".join(f"{line}\n" for line in [f"{len(shell.ran)} run", *shell.composed]))
    assert not wrong, "\n\n".join(wrong)
