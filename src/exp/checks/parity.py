"""task=parity in the parent: starts two runs, one after the other, and compares their traces. Imports no torch.

The experiment runs twice (``task=trace``): first on the reference backend, then on the backend under test. Each run
writes a trace (:mod:`~exp.checks.measure`). Each is a process of its own, because two vendors' torch plug-ins may not
work in one process.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple

import numpy as np
from omegaconf import OmegaConf

from exp import console
from exp.checks.check import FAILED, OK, fail, ok, report_result, round2
from exp.checks.child import overrides_without, run_exp
from exp.errors import EXIT_CONFIG, EXIT_OK, REFUSAL_CODES, ConfigError, UnavailableError
from exp.hardware.backend import FLOAT32
from exp.launcher.execute import print_header
from exp.launcher.freeze import freeze
from exp.report.runs import flatten
from exp.runs.files import csv_content, write_atomically, write_json
from exp.runs.folder import RunFolder

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig


_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3, "tf32": 2e-3, "efp": 2e-2}
_MAX_TOLERANCE = 0.5  # upper bound of a tolerance: with a larger one, no difference would be found
_FLOOR = 1e-3
_DROPOUT = re.compile(r"drop[^.]*$")  # keys of dropout: ``dropout``, ``attn_drop``, ``drop_path_rate``
_KEYS_OF_PARITY = ("task", "output_dir", "overwrite", "resume", "max_steps", "max_epochs", "log_every")

# Title, name of the phase, and tolerance as a multiple of the loss's: single values differ more than a sum over many
# values (the loss), and the optimizer amplifies differences. Gradients of later steps are not compared: near a kink of
# the loss, such as that of the absolute value, rounding errors can flip the sign of a gradient.
_KINDS = {
    "output": ("forward (step 1)", "the forward pass", 10.0),
    "loss": ("loss", "the loss", 1.0),
    "gradient": ("gradients (step 1)", "the backward pass", 100.0),
    "parameter": ("parameters (step 1)", "the optimizer's step", 100.0),
}


def allowed_differences(precision: str, tolerance: float | None = None) -> dict[str, float]:
    """The largest relative differences that count as rounding, by kind of tensor (:class:`Difference`).

    Args:
        precision: of the run under test.
        tolerance: that of the loss; None: the usual one of ``precision``.
    """
    base = _LOSS_TOLERANCE[precision] if tolerance is None else tolerance
    return {kind: min(base * factor, _MAX_TOLERANCE) for kind, (_, _, factor) in _KINDS.items()}


class Difference(NamedTuple):
    """The difference between two tensors, or between two losses.

    Attributes:
        kind: ``output``, ``loss``, ``gradient`` or ``parameter``. All but losses are of the first step. Of a parameter,
            only values with a clear gradient are compared: optimizers such as Adam divide a gradient by its size, so a
            value whose gradient is only rounding error moves by a whole step in a random direction.
        step: optimizer step, from 1.
        name: name of the module or parameter.
        absolute: largest absolute difference; infinite if a tensor is missing, the shapes differ, or only one of the
            two is finite.
        relative: ``absolute`` divided by the tensor's largest absolute value in the reference. Outputs and gradients
            are divided by at least a thousandth of the largest value of their kind, because a tensor that is zero up to
            rounding has no scale of its own.
    """

    kind: str
    step: int
    name: str
    absolute: float
    relative: float


def compare(tested: RunFolder, reference: RunFolder, significant: float) -> Iterator[Difference]:
    """All differences, in the order of computation: forward, loss, backward, optimizer; then the losses of later steps.

    Args:
        tested: run folder with ``trace.npz`` and ``metrics.jsonl``.
        reference: run folder of the reference, with the same files.
        significant: a gradient is significant if its absolute value is above this share of the largest in its tensor.
    """
    tested_losses, reference_losses = read_losses(tested), read_losses(reference)
    losses = []
    for step in sorted(set(tested_losses) & set(reference_losses)):
        gap = abs(tested_losses[step] - reference_losses[step])
        losses.append(Difference("loss", step, "loss", gap, gap / max(abs(reference_losses[step]), 1e-12)))
    # np.load reads each tensor when it is used: all tensors of a large model would not fit into memory.
    with np.load(tested.path / "trace.npz") as trace, np.load(reference.path / "trace.npz") as expected:
        outputs = [key for key in expected.files if key.startswith("output/")]
        gradients = [key for key in expected.files if key.startswith("gradient/")]
        floors = [_FLOOR * max((max_abs(expected[key]) for key in keys), default=0.0) for keys in (outputs, gradients)]
        for key in outputs:
            # One backend may use a fused kernel instead of this module; errors then show in the modules after it.
            if key in trace.files:
                yield _difference(key, trace, expected, floors[0])
        yield losses[0]
        order = {key[7:]: position for position, key in enumerate(outputs)}
        either = {*gradients, *(key for key in trace.files if key.startswith("gradient/"))}
        for key in sorted(either, key=lambda key: (order.get(key[9:].rpartition(".")[0], 0), key), reverse=True):
            yield _difference(key, trace, expected, floors[1])
        for key in gradients:
            gradient = np.abs(expected[key])
            least = max(significant * gradient.max(initial=0.0), _FLOOR * floors[1])
            yield _difference(key.replace("gradient", "parameter", 1), trace, expected, 0.0, gradient > least)
    yield from losses[1:]


def _difference(key: str, tested: Any, reference: Any, floor: float, significant: Any = True) -> Difference:
    """The difference of one tensor, over the values where ``significant`` is true."""
    kind, _, name = key.partition("/")
    values, expected = (trace[key] if key in trace.files else None for trace in (tested, reference))
    if values is None or expected is None or values.shape != expected.shape:
        return Difference(kind, 1, name, math.inf, math.inf)
    mask = np.broadcast_to(significant, values.shape)
    return Difference(kind, 1, name, *max_difference(values[mask], expected[mask], floor))


def read_losses(folder: RunFolder) -> dict[int, float]:
    """The training loss of every step, by step."""
    return {record["step"]: record["loss"] for record in folder.records() if record["split"] == "train"}


def max_abs(values: Any) -> float:
    """Largest absolute finite value of an array; infinite values, such as those of an attention mask, are ignored."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def max_difference(tested: Any, reference: Any, floor: float) -> tuple[float, float]:
    """Largest absolute and relative difference of two arrays of the same shape.

    Equal infinities, and NaN in both arrays, count as equal. If a difference is not finite, both results are infinite.

    Args:
        tested: array under test.
        reference: array of the reference.
        floor: lower bound of the scale, which is the largest absolute value of ``reference``.
    """
    differ = ~((tested == reference) | (np.isnan(tested) & np.isnan(reference)))
    absolute = float(np.abs(tested[differ] - reference[differ]).max(initial=0.0))
    if not math.isfinite(absolute):
        return math.inf, math.inf
    return absolute, absolute / max(max_abs(reference), floor, 1e-30)


def compare_backends(config: ExpConfig, overrides: list[str]) -> int:
    """Run the experiment in ``reference/`` and, if that succeeds, in ``tested/``; then compare the two.

    Args:
        config: composed configuration.
        overrides: overrides of the user.

    Returns:
        The exit code.

    Raises:
        ConfigError: the configuration is wrong, or one of the two runs refuses it.
        UnavailableError: a backend or a package is not available.
    """
    run = freeze(config, overrides)
    config, folder, task = run.config, run.folder, run.config.task
    epochs = max(config.max_epochs or 0, task.steps)
    keys = flatten(OmegaConf.to_container(config.model, resolve=True), "model")
    dropout = {key: value for key, value in keys.items() if _DROPOUT.search(key) and isinstance(value, float) and value}
    common = ["task=trace", f"max_steps={task.steps}", f"max_epochs={epochs}", "log_every=1", "overwrite=true",
              *(f"{key}=0.0" for key in dropout)]  # fmt: skip
    tested_overrides = overrides_without(overrides, *_KEYS_OF_PARITY)
    # The reference is exact: not compiled, and in full float32 if the tested precision is a form of float32.
    exact = [f"backend={task.reference}", "compile=false", *["precision=fp32"] * (config.precision in FLOAT32)]
    reference_overrides = [*overrides_without(tested_overrides, "backend", "compile"), *exact]
    run.write()
    try:
        folder.commit_pending(config.overwrite)
        print_header(run)
        if dropout:
            changed = ", ".join(f"{key} was {value}" for key, value in dropout.items())
            console.make_console().print(f"dropout is off in both runs: {changed}", soft_wrap=True)
        for part, overrides_of_run in {"reference": reference_overrides, "tested": tested_overrides}.items():
            arguments = [*overrides_of_run, *common, f"output_dir={folder.path / part}"]
            ended = run_exp(arguments, folder.logs / f"{part}.log", math.inf)
            if ended.interrupted_by:
                return ended.code
            name = task.reference if part == "reference" else config.backend.name
            if ended.code in REFUSAL_CODES:
                run.rollback()
                raise (ConfigError if ended.code == EXIT_CONFIG else UnavailableError)(f"{part}={name}: {ended.why}")
            if ended.code != EXIT_OK:
                return report_result(config, folder, fail(f"{part}={name}: {ended.why}", f"look at logs/{part}.log"))
        run.check_folder()
        return _evaluate(config, folder)
    finally:
        run.release()


def _evaluate(config: ExpConfig, folder: RunFolder) -> int:
    """Compare the two runs, print and write the result; returns the exit code.

    If they agree, the traces are deleted; otherwise they are kept for inspection.
    """
    tested, reference = (RunFolder(folder.path / part) for part in ("tested", "reference"))
    allowed = allowed_differences(config.precision, config.task.tolerance)
    differences = list(compare(tested, reference, significant=allowed["gradient"]))
    titles = (*Difference._fields, "allowed")
    rows = [(*d, allowed[d.kind]) for d in differences]
    write_atomically(folder.path / "differences.csv", csv_content([titles, *rows]))
    by_kind = [[d for d in differences if d.kind == kind] for kind in _KINDS]
    worst = [max(of_kind, key=lambda d: d.relative) for of_kind in by_kind if of_kind]
    table = [{"largest difference": _KINDS[d.kind][0], "relative": round2(d.relative), "absolute": round2(d.absolute),
              "allowed": allowed[d.kind], "step": d.step, "at": d.name,
              "verdict": FAILED if d.relative > allowed[d.kind] else OK} for d in worst]  # fmt: skip
    first = next((d for d in differences if d.relative > allowed[d.kind]), None)
    losses = [d.relative for d in differences if d.kind == "loss"]
    losses_by_part = {part.path.name: list(read_losses(part).values()) for part in (tested, reference)}
    write_json(folder.path / "parity.json", {"agrees": first is None, "losses": losses_by_part})
    if first is None:
        for part in (tested, reference):
            (part.path / "trace.npz").unlink()
        finding = f"{config.backend.name} and {config.task.reference} agree over {len(losses)} steps: losses within "
        check = ok(f"{finding}{max(losses):.1e}", table=table)
    else:
        how_far = f"{first.relative:.1e} relative difference, {allowed[first.kind]:.0e} allowed"
        if first.absolute == math.inf:
            how_far = "missing, of another shape or not finite on one of the two"
        finding = f"{config.backend.name} first differs from {config.task.reference} in {_KINDS[first.kind][1]} of "
        advice = "compare this layer on both (does it draw random numbers of its own?), or set task.tolerance"
        check = fail(f"{finding}step {first.step}, at {first.name}: {how_far}", advice, table=table)
    return report_result(config, folder, check, steps=len(losses))
