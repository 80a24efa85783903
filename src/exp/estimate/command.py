"""``task=estimate``: estimates memory and FLOPs of a training before it runs. Needs no worker and no device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import torch

from exp import console
from exp.console import flops, size
from exp.engine.registries import import_plugins
from exp.errors import EXIT_OK
from exp.estimate.trace import KINDS, Tracer, as_batch, fitting_batch, largest_batch, trace_flops
from exp.frozen import freeze
from exp.hardware.registry import create_backend
from exp.models.base import parameter_counts
from exp.report.tables import Table, as_rich
from exp.runs.files import write_json
from exp.runs.folder import blank_result

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.tasks.train import Estimate

__all__ = ["write_estimate"]

_SAME = ("experiment", "backend", "world_size", "precision", "batch_size", "accumulate", "global_batch_size")
"""Keys that ``estimate.json`` has in common with ``result.json``."""
_LABELS = {
    "optimizer": "optimizer's state",
    "wrapper": "wrapper's buffers",
    "buffers": "model's buffers",
    "activations": "activations, temporaries",
    "total": "peak",
}


def write_estimate(config: ExpConfig, overrides: list[str], task: Estimate) -> int:
    """Estimate, print the result, and write ``estimate.json`` and ``result.json`` to a run folder.

    Args:
        config: composed configuration.
        overrides: overrides of the user.
        task: the task of the configuration.

    Returns:
        The exit code.

    Raises:
        ConfigError: a value is wrong, or the model cannot be run without values.
        DataError: the data cannot be read, or are missing and their class has no ``example_batch``.
        UnavailableError: this torch version is too old.
    """
    run = freeze(config, overrides, Path(config.output_dir))
    config, folder = run.config, run.folder
    import_plugins(config.plugins)
    backend = create_backend(config.backend)
    # Default: the memory of the smallest card on this host, from the vendor's monitor.
    here = (int(row["memory_total"]) for row in backend.monitor() if row.get("memory_total"))
    memory = min(here, default=None) if task.memory_gib is None else int(task.memory_gib * 2**30)
    content = _estimate(config, backend, memory, task.headroom)
    run.write()
    try:
        folder.begin(config.overwrite)
        write_json(folder.path / "estimate.json", content)
        peaks = [content["memory_peak"]] * content["world_size"]
        result: dict[str, Any] = {**blank_result(config), "status": "completed", "measured_on": "paper"}
        folder.write_result({**result, "memory_peak": peaks, "estimate": content})
    finally:
        run.release()
    _show(content, folder.path)
    return EXIT_OK


def _estimate(config: Any, backend: Backend, memory: int | None, headroom: float) -> dict[str, Any]:
    """The content of ``estimate.json`` (docs/hardware/estimate.md describes its keys).

    Args:
        config: validated configuration, with batch sizes.
        backend: backend of the configuration; its hardware is not used.
        memory: memory of a card in bytes; None: unknown, then no batch size is suggested.
        headroom: share of ``memory`` that is kept free for what is not counted.
    """
    tracer, blank = Tracer(config, backend), blank_result(config)
    model, passes = tracer.model, {"training": tracer.peak, "validation": tracer.validate()}
    peak = max(each["total"] for each in passes.values() if each is not None)
    per_sample = trace_flops(model, as_batch(tracer.example.train, config.batch_size)) / config.batch_size
    weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    fit: dict[str, Any] = dict.fromkeys(("fits", "largest_batch_size", "advice"))
    if memory is not None:
        budget = int(memory * (1 - headroom))
        fit = {"fits": peak <= budget, "largest_batch_size": largest_batch(tracer, budget),
               "advice": fitting_batch(tracer, budget)}  # fmt: skip
    return {
        **{key: blank[key] for key in _SAME},
        "wrapper": config.wrapper.kind if blank["world_size"] > 1 else "none",
        "eval_batch_size": tracer.example.eval_batch_size,
        **parameter_counts(model),
        "flops_per_sample": per_sample,
        "flops_per_step": per_sample * config.global_batch_size,
        "memory": passes,
        "memory_peak": peak,
        "checkpoint_bytes": weights + tracer.optimizer_bytes,
        "weights_bytes": weights,
        "card_memory": memory,
        "headroom": headroom,
        **fit,
        "torch": torch.__version__,
        "notes": tracer.notes,
    }


def _show(found: Mapping[str, Any], folder: Path) -> None:
    """Print an estimate."""
    batches = {"training": found["batch_size"], "validation": found["eval_batch_size"]}
    passes = {f"{name}, batch {batches[name]}": each for name, each in found["memory"].items() if each is not None}
    kinds = [kind for kind in (*KINDS, "total") if any(each[kind] for each in passes.values())]
    rows = [{"memory of each rank": _LABELS.get(kind, kind),
             **{title: size(each[kind]) for title, each in passes.items()}} for kind in kinds]  # fmt: skip
    lines = [
        "parameters: {parameters:,}, {trained_parameters:,} of them trained".format(**found),
        f"operations: {flops(found['flops_per_sample'])}FLOP per sample, {flops(found['flops_per_step'])}FLOP per step",
        f"checkpoint: {size(found['checkpoint_bytes'])}; weights alone {size(found['weights_bytes'])}",
    ]
    if found["card_memory"] is not None:
        lines.append(f"card: {size(found['card_memory'])}, less {found['headroom']:.0%}: {_fit(found)}")
    lines += [*(f"note: {note}" for note in found["notes"]), f"results in {console.shown(folder)}"]
    terminal = console.make_console()
    head = "{experiment} on {world_size} {backend}, wrapper={wrapper}, {precision}: "
    head += "global batch {global_batch_size} = {batch_size} x {world_size} x {accumulate}"
    terminal.print(head.format(**found), soft_wrap=True, markup=False)
    terminal.print(as_rich(Table.of(rows)))
    terminal.print("\n".join(lines), soft_wrap=True, markup=False)


def _fit(found: Mapping[str, Any]) -> str:
    advice, largest = found["advice"], found["largest_batch_size"]
    if largest == 0 or advice is None:
        return "not even a batch of 1 fits; try wrapper=fsdp, precision=bf16 or a smaller model"
    text = f"it {'fits' if found['fits'] else 'does NOT fit'}; at most batch_size={largest} per device"
    if (advice["batch_size"], advice["accumulate"]) != (found["batch_size"], found["accumulate"]):
        kept = f"batch_size={advice['batch_size']} accumulate={advice['accumulate']} keeps the global batch"
        text += f"; {kept} ({size(advice['memory'])})"
    return text
