"""``task=estimate``: prints and records an estimate of a training before it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from exp import console
from exp.config.resolve import import_plugins
from exp.console import format_bytes, format_flops
from exp.data.loader import tensors_of
from exp.errors import EXIT_OK
from exp.estimate.memory import KINDS, bytes_of
from exp.estimate.tracer import Tracer, as_batch
from exp.estimate.training import trace_flops
from exp.launcher.execute import print_header
from exp.launcher.freeze import freeze
from exp.models.base import parameter_counts
from exp.report.formats import Table, as_rich
from exp.runs.record import empty_result

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig


def write_estimate(composed: ExpConfig, overrides: list[str]) -> int:
    """Estimate, print the result, and write it to ``result.json`` in a run folder.

    Args:
        composed: composed configuration.
        overrides: overrides of the user.

    Returns:
        The exit code.

    Raises:
        ConfigError: a value is wrong, or the model cannot be run without values.
        DataError: the data cannot be read, or are missing and their class has no ``example_batch``.
        UnavailableError: this torch version is too old.
    """
    run = freeze(composed, overrides)
    config: Any = run.config
    task = config.task
    import_plugins(config.plugins)
    backend = run.backend
    tracer = Tracer(config, backend)
    model, passes = tracer.model, {"training": tracer.peak, "validation": tracer.validate()}
    peak = max(memory["total"] for memory in passes.values() if memory is not None)
    per_sample = trace_flops(model, as_batch(tracer.example.train, config.batch_size)) / config.batch_size
    weights_bytes = bytes_of(tensors_of(model.state_dict()))
    # Default: the memory of the smallest card on this host, from the vendor's monitor.
    card_memories = (int(row["memory_total"]) for row in backend.monitor() if row.get("memory_total"))
    memory = min(card_memories, default=None) if task.memory_gib is None else int(task.memory_gib * 2**30)
    budget = None if memory is None else int(memory * (1 - task.headroom))
    gradients = bytes_of(value for value in model.parameters() if value.requires_grad)
    estimate = {  # docs/hardware/estimate.md describes the keys
        "eval_batch_size": tracer.example.eval_batch_size,
        **parameter_counts(model),
        "flops_per_sample": per_sample,
        "flops_per_step": per_sample * config.global_batch_size,
        "memory": passes,
        "memory_peak": peak,
        "checkpoint_bytes": weights_bytes + tracer.optimizer_bytes,
        "weights_bytes": weights_bytes,
        "card_memory": memory,
        "fits": None if budget is None else peak <= budget,
        "largest_batch_size": None if budget is None else tracer.largest_batch(budget),
        "advice": None if budget is None else tracer.fitting_batch(budget),
        "exchanged_bytes": gradients if config.launcher.mixed else None,
        "notes": tracer.notes,
    }
    result = {**empty_result(config), "status": "completed", "measured_on": "paper", "estimate": estimate}
    result["memory_peak"] = [peak] * (config.nproc * config.launcher.nnodes)
    run.write()
    try:
        run.folder.commit_pending(config.overwrite)
        run.folder.write_result(result)
    finally:
        run.release()
    print_header(run)
    _print_estimate(config, estimate)
    return EXIT_OK


def _print_estimate(config: Any, estimate: Mapping[str, Any]) -> None:
    """Print an estimate, the key ``estimate`` of ``result.json``."""
    batches = {"training": config.batch_size, "validation": estimate["eval_batch_size"]}
    passes = {f"{name}, batch {batches[name]}": peak for name, peak in estimate["memory"].items() if peak is not None}
    rows = [{"memory of each rank": kind, **{title: format_bytes(peak[kind]) for title, peak in passes.items()}}
            for kind in (*KINDS, "total") if any(peak[kind] for peak in passes.values())]  # fmt: skip
    lines = [
        "parameters: {parameters:,}, {trained_parameters:,} of them trained".format(**estimate),
        f"operations: {format_flops(estimate['flops_per_sample'])}FLOP per sample, "
        f"{format_flops(estimate['flops_per_step'])}FLOP per step",
        f"checkpoint: {format_bytes(estimate['checkpoint_bytes'])}; weights alone "
        f"{format_bytes(estimate['weights_bytes'])}",
    ]
    if estimate["exchanged_bytes"] is not None:
        size = format_bytes(estimate["exchanged_bytes"])
        lines.append(f"launcher.mixed=true: in each step {size} of gradients go from each card to the CPU and back")
    if estimate["card_memory"] is not None:
        lines.append(f"card: {format_bytes(estimate['card_memory'])}, less headroom: {_fit_text(config, estimate)}")
    terminal = console.make_console()
    terminal.print(as_rich(Table.of(rows)))
    terminal.print("\n".join([*lines, *(f"note: {note}" for note in estimate["notes"])]), soft_wrap=True, markup=False)


def _fit_text(config: Any, estimate: Mapping[str, Any]) -> str:
    advice = estimate["advice"]
    if advice is None:
        return "not even a batch of 1 fits; try wrapper=fsdp, precision=bf16 or a smaller model"
    fits, largest = "fits" if estimate["fits"] else "does NOT fit", estimate["largest_batch_size"]
    alternative = (
        f"; batch_size={advice['batch_size']} accumulate={advice['accumulate']} keeps the global batch "
        f"({format_bytes(advice['memory'])})"
    ) * (advice["accumulate"] != config.accumulate)
    return f"it {fits}; at most batch_size={largest} per device{alternative}"
