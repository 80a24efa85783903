"""An estimate on a terminal of 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from rich.markup import escape
from rich.table import Table

from exp.console import size
from exp.estimate.tracker import KINDS

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["show"]

_MEANT = {
    "optimizer": "optimizer's state",
    "wrapper": "wrapper's buffers",
    "buffers": "model's buffers",
    "activations": "activations, temporaries",
}


def show(terminal: Console, content: Mapping[str, Any]) -> None:
    """Print it.

    Args:
        terminal: of :func:`exp.console.make_console`.
        content: of :func:`exp.estimate.figures.estimate`.
    """
    ranks, batch = content["world_size"], content["batch_size"]
    terminal.print(
        f"{content['experiment']} on {ranks} {content['backend']}, wrapper={content['wrapper']}, "
        f"{content['precision']}: "
        f"global batch {content['global_batch_size']} = {batch} x {ranks} x {content['accumulate']}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("memory of each rank")
    passes = {name: each for name, each in content["memory"].items() if each is not None}
    for name in passes:
        table.add_column(
            f"{name}, batch {batch if name == 'training' else content['eval_batch_size']}", justify="right"
        )
    for kind in KINDS:
        if any(each[kind] for each in passes.values()):
            table.add_row(_MEANT.get(kind, kind), *(size(each[kind]) for each in passes.values()))
    table.add_row("[bold]at the worst moment", *(f"[bold]{size(each['total'])}" for each in passes.values()))
    terminal.print(table)
    terminal.print()
    rows = Table(box=None, show_header=False, pad_edge=False)
    parameters, trained = content["parameters"], content["trained_parameters"]
    rows.add_row("parameters", f"{parameters:,}" + (f", {trained:,} of them trained" if trained < parameters else ""))
    rows.add_row("operations", f"{_count(content['flops_per_sample'])}FLOP per sample, "
                 f"{_count(content['flops_per_step'])}FLOP per step")  # fmt: skip
    rows.add_row("checkpoint", f"{size(content['checkpoint_bytes'])}; weights alone {size(content['weights_bytes'])}")
    if ranks > 1:
        gathered = content["gathered_bytes_per_step"]
        also = f", {size(gathered)} of parameters gathered" if gathered else ""
        rows.add_row("each step", f"{size(content['reduced_bytes_per_step'])} of gradients summed{also}; each rank "
                     f"sends {size(content['sent_bytes_per_rank_and_step'])}")  # fmt: skip
    if content["card_memory"] is not None:
        rows.add_row("card", _fit(content))
    terminal.print(rows)
    for note in content["notes"]:
        terminal.print(f"note: {escape(note)}", style="yellow", soft_wrap=True)


def _fit(content: Mapping[str, Any]) -> str:
    advice = content["advice"]
    card = f"{size(content['card_memory'])}, less {content['headroom']:.0%}: "
    if content["largest_batch_size"] == 0 or advice is None:
        return card + "[bold red]not even a batch of 1 fits[/]; try wrapper=fsdp, precision=bf16 or a smaller model"
    told = card + ("it fits" if content["fits"] else "[bold red]it does not fit[/]")
    told += f"; at most batch_size={content['largest_batch_size']} per device"
    if (advice["batch_size"], advice["accumulate"]) != (content["batch_size"], content["accumulate"]):
        told += (
            f"; batch_size={advice['batch_size']} accumulate={advice['accumulate']} keeps the global batch "
            f"({size(advice['memory'])})"
        )
    return told


def _count(value: float) -> str:
    """``1.2 T``: for operations."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} "
