"""task=why: how two runs differ, the likely causes first, and from which step on. Imports torch only for checkpoints.

Compared is what runs record: their configuration, ``env.json``, ``inputs.json``, ``metrics.jsonl`` and
``result.json`` (:mod:`exp.runs`).
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

from exp import console
from exp.checks.parity import allowed_differences
from exp.console import format_metric
from exp.data.fingerprint import shortened
from exp.errors import EXIT_OK, ConfigError
from exp.report.compare import compare_groups
from exp.report.formats import count_words, format_value
from exp.report.groups import Group, column, differing, is_seed
from exp.report.runs import Run, find_runs, is_number
from exp.runs.files import to_json
from exp.task import rerun_command

_FILES = (".pth", ".safetensors")
_SHOWN, _LINES = 12, 4  # causes, and changed lines of a module, on the screen
# Others in every process or job.
_OF_PROCESS = re.compile(r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|SLURM_(JOB_ID|PROCID)")


class Cause(NamedTuple):
    """One thing that differs.

    Attributes:
        kind: ``key``, ``data``, ``weights``, ``code``, ``seed`` or ``environment``.
        name: what differs: a key, a file, a module, a package, a variable.
        first: what it is in the first run, as text; None: there is none.
        second: likewise in the second run.
        lines: changed lines of code, with ``-`` and ``+``.
    """

    kind: str
    name: str
    first: str | None
    second: str | None
    lines: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.first or 'none'} -> {self.second or 'none'}"


class Parting(NamedTuple):
    """Where the training losses of two runs part.

    Attributes:
        step: the first step whose losses differ; None: those of all compared steps are equal.
        first: the loss of the first run there.
        second: that of the second run.
        relative: the relative difference there.
        largest: the largest relative difference of all compared steps.
        steps: number of compared steps.
        allowed: relative differences up to this one are rounding, in the first steps.
    """

    step: int | None
    first: float
    second: float
    relative: float
    largest: float
    steps: int
    allowed: float

    def __str__(self) -> str:
        if self.step is None:
            return f"the losses of all {self.steps} steps are equal, to the last digit"
        size = "as rounding may" if self.relative <= self.allowed else "which is more than rounding"
        where = "the initial weights, the first batch or the forward pass differ"
        if self.step > 1:
            where = f"all is equal up to step {self.step - 1}, so an update or a later batch differs"
        return (
            f"losses part at step {self.step}: {self.first:.9g} and {self.second:.9g}, {self.relative:.1e} apart, "
            f"{size}; {where}. At most {self.largest:.1e} apart in {self.steps} steps."
        )


def causes(first: Run, second: Run) -> list[Cause]:
    """What differs in two runs, the likely causes first: keys, data, weights, code, seed, environment."""
    runs = (first, second)
    weights = [{"weights": _weights(run)} for run in runs]
    keys = [
        cause._replace(kind="seed" if is_seed(cause.name) else "key")
        for key in differing(runs)
        for cause in _unequal("key", [{key: value} for value in column(runs, key)])
        # Where weights lie does not matter if they are the same.
        if key != "init_from" or weights[0] != weights[1] or None in weights[0].values()
    ]
    files = [run.inputs.get("data_files") or {} for run in runs]
    rows = [{f"samples of {split}": (run.result.get("data") or {}).get(split) for split in ("train", "val", "test")}
            for run in runs]  # fmt: skip
    environments = [_environment(run) for run in runs]
    if "nproc" in {cause.name for cause in keys}:
        del environments[0]["world size"], environments[1]["world size"]
    return [
        *(cause for cause in keys if cause.kind == "key"),
        *(_unequal("data", files, _about_file) if all(files) else []),
        *_unequal("data", rows),
        *_unequal("weights", weights),
        *_code(*runs),
        *(cause for cause in keys if cause.kind == "seed"),
        *_unequal("environment", environments),
    ]


def _unequal(
    kind: str, pair: Sequence[Mapping[str, Any]], about: Callable[[Any], str] = format_value
) -> Iterator[Cause]:
    """The names whose values differ, in their order."""
    for name in dict.fromkeys([*pair[0], *pair[1]]):
        values = [part.get(name) for part in pair]
        if values[0] != values[1]:
            texts = [None if value is None else about(value)[:60] for value in values]
            yield Cause(kind, name, texts[0], texts[1])


def _about_file(entry: Sequence[Any]) -> str:
    """An entry of a fingerprint as text, such as ``2,589,657 bytes f18de3ad``."""
    count, size, digest = entry
    return f"{f'{count} files of ' if count > 1 else ''}{size:,} bytes {digest[:8]}"


def _weights(run: Run) -> str | None:
    """The digests of the weights from which a run started, or that it evaluated; None: it had none."""
    files = (run.result.get("weights") or {}).get("files") or {}
    digests = [str(digest)[:8] for digest in (*files.values(), run.result.get("checkpoint_digest")) if digest]
    return " ".join(digests) or None


def _environment(run: Run) -> dict[str, Any]:
    """World size, cards, versions and variables, those first on which numbers depend the most."""
    env, result = run.env, run.result
    cards = [str(device.get("name")) for device in result.get("devices") or []]
    packages = {**dict.fromkeys(env.get("packages") or {}), **(run.inputs.get("packages") or env.get("packages") or {})}
    variables = {**(env.get("variables") or {}), **(env.get("backend_env") or {})}
    return {
        "world size": result.get("world_size"),
        "cards": count_words(sorted(set(cards))) or None,
        **packages,
        **{name: value for name, value in variables.items() if not _OF_PROCESS.fullmatch(name)},
        **{name: env.get(name) for name in ("exp", "python", "platform", "host")},
    }


def _code(first: Run, second: Run) -> list[Cause]:
    """The user's modules whose source differs, and exp's revision and changes."""
    modules = [run.inputs.get("modules") or {} for run in (first, second)]
    differences = []
    for name in sorted(set(modules[0]) & set(modules[1])):
        old, new = (part[name] for part in modules)
        if old["digest"] != new["digest"]:
            old_digest, new_digest = (part["digest"][:8] for part in (old, new))
            lines = _changed_lines(old["source"], new["source"])
            differences.append(Cause("code", f"{name} ({new['file']})", old_digest, new_digest, lines))
    differences += _unequal("code", [dict.fromkeys(part, "imported") for part in modules])
    (revision, changes), (other, other_changes) = (
        (run.env.get("git_revision"), str(run.inputs.get("exp_changes") or "")) for run in (first, second)
    )
    if (revision, changes) != (other, other_changes):
        # Of the two diffs the lines of code, which tell more than a diff of diffs.
        added = ("\n".join(re.findall(r"^\+(?!\+\+ )(.*)", diff, re.MULTILINE)) for diff in (changes, other_changes))
        differences.append(Cause("code", "exp", revision, other, _changed_lines(*added)))
    return differences


def _changed_lines(old: str | None, new: str | None) -> list[str]:
    """The lines that differ, with ``-`` and ``+``."""
    lines = difflib.unified_diff((old or "").splitlines(), (new or "").splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@")) and line[1:].strip()]


def parting(first: Run, second: Run) -> Parting | None:
    """Where the training losses part; None: there are no losses of equal steps."""
    a, b = (_losses(run) for run in (first, second))
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return None
    gaps = {step: abs(a[step] - b[step]) / max(abs(a[step]), abs(b[step]), 1e-12) for step in steps}
    allowed = max(allowed_differences(str(run.config.get("precision") or "fp32"))["loss"] for run in (first, second))
    step = next((step for step in steps if gaps[step]), None)
    at = steps[0] if step is None else step
    return Parting(step, a[at], b[at], gaps[at], max(gaps.values()), len(steps), allowed)


def _losses(run: Run) -> dict[int, float]:
    """The loss of each training step that is recorded one by one."""
    losses: dict[int, float] = {}
    last = 0
    for record in run.records():
        if record["split"] == "train" and is_number(record.get("loss")):
            step = record["step"]
            single = record.get("loss_of_steps") or [record["loss"]] * (step == last + 1)
            losses.update(zip(range(step - len(single) + 1, step + 1), single))
            last = step
    return losses


def compare_weights(first: Path, second: Path) -> str:
    """The first module whose weights differ in two checkpoints of one step, in words.

    Raises:
        ConfigError: the checkpoints are of different steps.
        CheckpointError: one cannot be read.
    """
    from exp.engine.checkpoint.reader import read_checkpoint

    contents = [read_checkpoint(path, mapped=True) for path in (first, second)]
    steps = [(content.get("meta") or {}).get("step") for content in contents]
    if steps[0] != steps[1]:
        raise ConfigError(f"run: {first} is of step {steps[0]}, and {second} of step {steps[1]}; give two of one step")
    a, b = (content.get("state_dict", content) for content in contents)
    unequal = [
        name for name in a if name in b and not (a[name].shape == b[name].shape and bool((a[name] == b[name]).all()))
    ]
    missing = [name for name in {**a, **b} if name not in a or name not in b]
    if not unequal and not missing:
        return f"all {len(a)} tensors of step {steps[0]} are equal"
    if not unequal:
        return f"equal, but only one of them has {shortened(missing, 3)}"
    name = unequal[0]
    gap = float((a[name].double() - b[name].double()).abs().max()) if a[name].shape == b[name].shape else float("inf")
    scale = max(float(a[name].double().abs().max()), 1e-12)
    return (
        f"{len(unequal)} of {len(a)} tensors differ at step {steps[0]}, first {name.rpartition('.')[0] or name}: "
        f"{name} by {gap / scale:.1e} of its largest value"
    )


def explain(paths: Sequence[str]) -> dict[str, Any]:
    """All that ``task=why`` says, as plain values.

    Args:
        paths: of two runs, of two folders with runs of several seeds each, or of two checkpoints.

    Raises:
        ConfigError: there are not two runs.
        CheckpointError: a checkpoint cannot be read.
    """
    checkpoints = [Path(path) for path in paths if path.endswith(_FILES) and Path(path).is_file()]
    folders = [str(Path(path).parent.parent) if Path(path) in checkpoints else path for path in paths]
    sides = [find_runs([folder]) for folder in folders]
    if len(sides) == 1 and len(sides[0]) == 2:
        sides = [[run] for run in sides[0]]
    if len(sides) != 2 or len(checkpoints) == 1:
        number = " and ".join(str(len(side)) for side in sides)
        raise ConfigError(f"task=why compares two runs, and run names {number}; give run=[<a run>,<another>]")
    first = sides[0][0]
    same_seed = (run for run in sides[1] if run.config.get("seed") == first.config.get("seed"))
    second = next(same_seed, sides[1][0])
    metric = first.metric_name
    groups = [Group(side, metric) for side in sides] if metric == second.metric_name else []
    causes_found, part = causes(first, second), parting(first, second)
    return {
        "runs": [str(run.folder) for run in (first, second)],
        "metric": metric,
        "values": [run.metric for run in (first, second)],
        "errors": [run.error for run in (first, second)],
        "causes": [cause._asdict() for cause in causes_found],
        "losses": None if part is None else {**part._asdict(), "text": str(part)},
        "noise": [comparison.verdict() for comparison in compare_groups(groups)],
        "weights": compare_weights(*checkpoints) if checkpoints else None,
        "commands": _commands(first, second, causes_found, part, bool(checkpoints)),
    }


def _commands(
    first: Run, second: Run, causes_found: Sequence[Cause], part: Parting | None, has_weights: bool
) -> list[str]:
    """Commands that would tell more, the most telling first."""
    kinds, commands = [cause.kind for cause in causes_found], []
    parts = part is not None and part.step is not None
    if "seed" in kinds:
        commands.append(_repeated(second, f"seed={first.config.get('seed')}"))
    elif kinds.count("key") > 1:  # one key at a time
        key = next(cause for cause in causes_found if cause.kind == "key").name
        commands.append(_repeated(second, f"{key}={format_value(column([first], key)[0])}"))
    elif parts and not set(kinds) - {"environment"}:
        commands.append(_repeated(second, "task=parity"))
    elif parts and "key" not in kinds:
        commands.append(_repeated(first))
    common = [
        sorted({path.name for path in (run.folder / "checkpoints").glob("step_*.pth")}) for run in (first, second)
    ]
    steps = [name for name in common[0] if name in common[1]]
    if steps and parts and not has_weights:
        files = ",".join(console.display_path(run.folder / "checkpoints" / steps[0]) for run in (first, second))
        commands.append(f"python -m exp task=why 'run=[{files}]'")
    return commands


def _repeated(run: Run, *changes: str) -> str:
    """The command that repeats a run in a folder of its own, with changes."""
    return rerun_command(*changes, without=("output_dir", "overwrite", "resume"), arguments=run.overrides)


def print_explanation(paths: Sequence[str], form: str) -> int:
    """Print what :func:`explain` returns, as text of one screen or as JSON; returns the exit code."""
    about = explain(paths)
    terminal = console.make_console()
    for line in [to_json(about, indent=2)] if form == "json" else _lines(about):
        # What is to be copied is not broken into lines.
        terminal.print(line, highlight=False, markup=False, soft_wrap=form == "json" or line.startswith("    python"))
    return EXIT_OK


def _lines(about: Mapping[str, Any]) -> Iterator[str]:
    for sign, folder, value, error in zip("-+", about["runs"], about["values"], about["errors"]):
        measured = "" if value is None else f": {about['metric']} {format_metric(value)}"
        yield f"{sign} {console.display_path(Path(folder))}{measured}{'' if error is None else f'; {error}'}"
    causes_read = [Cause(**cause) for cause in about["causes"]]
    yield "" if causes_read else "\nnothing differs of what the runs have recorded"
    for number, cause in enumerate(causes_read[:_SHOWN]):
        yield f"{cause.kind if not number or causes_read[number - 1].kind != cause.kind else '':<12} {cause}"
        yield from (f"{'':<12}   {line[:100]}" for line in cause.lines[:_LINES])
    if len(causes_read) > _SHOWN:
        yield f"{'':<12} and {len(causes_read) - _SHOWN} more (task.format=json)"
    yield ""
    yield "no training losses of equal steps" if about["losses"] is None else about["losses"]["text"]
    yield from (f"weights: {text}" for text in filter(None, [about["weights"]]))
    yield from (f"{about['metric']}: {text}" for text in about["noise"])
    if about["commands"]:
        yield "\nthese would tell more:"
        yield from (f"    {command}" for command in about["commands"])
