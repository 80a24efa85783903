"""Which machine the kit is on, asked in a way that no driver can hang the kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Mapping

from omegaconf import OmegaConf

from exp.backend import Backend
from exp.backends_registry import create_backend
from exp.config.names import allow
from exp.environment import variables
from exp.runfolder import to_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Monitor", "different", "machine"]

_PATIENCE_S = 20.0
_IDENTITY = ("index", "name", "uuid", "serial", "bus_id")
_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
"""Variables that are others each time."""


class Monitor:
    """The vendor's monitor, read by a process of its own; one that has hung once is not asked again.

    Args:
        config: has the backend whose monitor it is.
        backend: the same.
    """

    def __init__(self, config: ExpConfig, backend: Backend) -> None:
        plain: Any = OmegaConf.to_container(config.backend, resolve=True)
        self._order = to_json({"backend": plain, "plugins": list(config.plugins)}).encode()
        self._answers = type(backend).monitor is not Backend.monitor

    def read(self) -> list[dict[str, Any]]:
        """See :meth:`exp.backend.Backend.monitor`; empty where it does not answer in time."""
        if not self._answers:
            return []
        process = subprocess.Popen(
            [sys.executable, "-m", "exp.qualify.machine"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(self._order, timeout=_PATIENCE_S)
            found: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: it may hang in the driver
            self._answers = False
            return []
        except (ValueError, IndexError):  # it has ended with an error
            return []
        return found


def machine(backend: Backend, cards: list[dict[str, Any]]) -> dict[str, Any]:
    """What tells a machine from another one, or from itself with another driver.

    Args:
        backend: of the kit.
        cards: what the vendor's monitor says.

    Returns:
        ``packages``, ``variables`` and ``cards``, of which only what stays.
    """
    lasting = {name: value for name, value in variables(backend).items() if not name.startswith(_OF_THE_JOB)}
    lasting.update({name: os.environ[name] for name in backend.visible_variables if name in os.environ})
    return {
        "packages": backend.packages(),
        "variables": lasting,
        "cards": [{key: card[key] for key in _IDENTITY if card.get(key) is not None} for card in cards],
    }


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In what two machines differ first, in words; None: in nothing."""
    for part in ("packages", "variables"):
        for name in sorted({*before[part], *now[part]}):
            old, new = before[part].get(name), now[part].get(name)
            if old != new:
                return f"{name}={old}, this one has {new}"
    if before["cards"] == now["cards"]:
        return None
    if len(before["cards"]) != len(now["cards"]):
        return f"{len(before['cards'])} cards, this one has {len(now['cards'])}"
    old, new = next(pair for pair in zip(before["cards"], now["cards"]) if pair[0] != pair[1])
    return f"the card {_told(old)}, this one has {_told(new)}"


def _told(card: Mapping[str, Any]) -> str:
    return " ".join(str(card[key]) for key in _IDENTITY if key in card)


def main() -> None:
    """``-m exp.qualify.machine``: the backend as JSON comes in, what its monitor says goes out."""
    order = json.load(sys.stdin)
    allow(order["plugins"])
    print(to_json(create_backend(order["backend"]).monitor()))  # noqa: T201


if __name__ == "__main__":
    main()
