"""task=env: describes a machine for a bug report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import yaml

from exp import console
from exp.config.resolve import to_plain
from exp.errors import ExpError
from exp.hardware.environment import describe_environment, process_limits, reported_variables
from exp.hardware.registry import create_backend, installed
from exp.runs.files import to_json, write_json
from exp.runs.record import empty_result

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo


def describe_machine(config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
    """Print the facts and write them to ``env.json``; a fact that cannot be determined is replaced by the reason."""
    del info
    environment = {
        **describe_environment(backend, []),
        "backends": _backends(config, backend),
        "backend_packages": backend.packages(),
        "monitor": backend.monitor(),
        "variables": [f"{name}={value}" for name, value in reported_variables(backend).items()],
        "limits": process_limits(),
    }
    write_json(folder.env, {**environment, "record": to_plain(config.record)})
    text = yaml.safe_dump(json.loads(to_json(environment)), sort_keys=False, allow_unicode=True, width=1000)
    console.make_console().print(text, highlight=False, markup=False, soft_wrap=True, end="")
    folder.write_result({**empty_result(config), "status": "completed"})


def _backends(config: ExpConfig, chosen: Backend) -> dict[str, str]:
    """By name of each installed backend its number of devices, or the reason why it cannot be used, as text."""
    states = {}
    for name in sorted({*installed(), config.backend.name}):
        try:
            backend = chosen if name == config.backend.name else create_backend({"_target_": name, "name": name})
            reason = backend.unavailable_reason()
            states[name] = f"not available: {reason}" if reason else f"available, {backend.device_count()} devices"
        except (ExpError, TypeError) as error:  # backends of other packages may be broken
            states[name] = f"does not load: {error}"
    return states
