"""``task=estimate``: what the command line does for it. No worker, no device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp import console
from exp.backends_registry import create_backend
from exp.compat import TORCH_VERSION, supports_estimates
from exp.engine.registries import import_plugins
from exp.errors import UnavailableError
from exp.estimate.table import show
from exp.freezing import complete, prepare
from exp.result import blank_result
from exp.runfolder import write_json
from exp.summary import Finished

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.tasks.estimate import Estimate

__all__ = ["memory_of", "write_estimate"]


def write_estimate(config: ExpConfig, overrides: list[str], task: Estimate) -> Finished:
    """Estimate, print the table, and leave ``estimate.json`` and ``result.json`` in a run folder.

    Args:
        config: composed.
        overrides: the user's.
        task: the task.

    Raises:
        ConfigError: a value is wrong, or the model cannot be run without values.
        DataError: the data cannot be read, or are not here and their class has no sketch of them.
        UnavailableError: this torch is too old.
    """
    if not supports_estimates():
        raise UnavailableError(
            f"task=estimate needs torch 2.1 or newer, and this is {'.'.join(map(str, TORCH_VERSION))}; estimate on any "
            "other machine: it takes no card, and the figures are the same"
        )
    from exp.estimate.figures import estimate  # which an older torch could not import

    run = complete(prepare(config, overrides), overrides, Path(config.output_dir))
    config, folder = run.config, run.folder
    import_plugins(config.plugins)
    backend = create_backend(config.backend)
    memory = None if task.memory_gib is None else int(task.memory_gib * 2**30)
    content = estimate(config, backend, memory or memory_of(backend), task.headroom)
    run.write()
    try:
        folder.begin(config.overwrite)
        write_json(folder.path / "estimate.json", content)
        result: dict[str, Any] = {**blank_result(config), "status": "completed", "measured_on": "paper"}
        result.update(memory_peak=[content["memory_peak"]] * content["world_size"], estimate=content)
        folder.write_result(result)
    finally:
        run.release()
    terminal = console.make_console()
    show(terminal, content)
    terminal.print(f"results in {console.shown(folder.path)}", soft_wrap=True)
    return Finished()


def memory_of(backend: Backend) -> int | None:
    """Bytes of the smallest card here, as the vendor's monitor tells them; None: no card, or none that tells."""
    try:
        sizes = [row.get("memory_total") for row in backend.monitor()]
    except Exception:  # noqa: BLE001 - of a vendor's tool; without a card it is not asked for
        return None
    known = [int(size) for size in sizes if size]
    return min(known) if known else None
