"""What a run that continues another may change, and what would make another training of it.

Imports no torch: the parent compares before it writes anything to the run folder, with the ``config.yaml`` there; the
workers compare with the configuration that the checkpoint itself holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Mapping

from omegaconf import OmegaConf

from exp.config.schema import ExpConfig
from exp.config.structures import structure_of
from exp.config.trained import NEUTRAL, text_of

__all__ = ["Change", "Changes", "as_plain", "changes", "of_training", "refusal", "trains_on"]

# Of no meaning for a training: where it is, what is noted of it, what other tasks are told, what is derived.
_SILENT = re.compile(
    r"output_dir|overwrite|resume|resume_changed_data|init_partial|batch_size|reference|run|steps"
    r"|(?:record|sweep|published|published_\w+|task(?!\.name$))(?:\..*)?"
)
# Where the data lie: whether they are the same is asked of the files themselves.
_WHERE = re.compile(r"data\.(?:root|sample_data|archive_folder)")
# Whether data are refused, not what they are.
_LENIENT = re.compile(r"data\.(?:allow_gaps|on_error)")
# The samples that a step sees, what they say and in which order; what learns from them; what its state consists of.
_FIXED = re.compile(
    r"(?:model|data)(?:\..*)?|optim\.(?:type|options\.(?:amsgrad|centered))|seed|global_batch_size|init_from|metric|task\.name"
    r"|debug\.(?:train_batches|overfit)"
)
_DATA = re.compile(r"data(?:\..*)?")
# How long is trained, and with what: who changes it wants more of a training that had been stopped early.
_COURSE = re.compile(r"patience|min_delta|max_epochs|max_steps|val_every|(?:optim|schedule|hooks)(?:\..*)?")
# Groups of which another choice has other keys: one line says it all.
_CHOICES = ("backend", "launcher", "wrapper", "model", "data")


@dataclass(frozen=True)
class Change:
    """One key of two configurations; a value that is not there is None."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}={text_of(self.new)} (was {text_of(self.old)})"


@dataclass(frozen=True)
class Changes:
    """How a configuration differs from the one that a training began with.

    Attributes:
        allowed: take effect from the step at which the training goes on.
        refused: would make another training of it.
    """

    allowed: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()


def as_plain(config: ExpConfig) -> dict[str, Any]:
    """A frozen configuration as plain dicts and lists, without interpolations."""
    node: Any = config
    content: Any = OmegaConf.to_container(node, resolve=True)
    return dict(content)


def of_training(config: ExpConfig) -> dict[str, Any]:
    """What a checkpoint keeps of a frozen configuration: all but where a run is and what is noted of it."""
    content = {key: value for key, value in as_plain(config).items() if key == "task" or not _SILENT.fullmatch(key)}
    content["task"] = {"name": content["task"]["name"]}
    return content


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare two configurations.

    Keys that are in one of them only count with the schema's default: they are new since the other was written, or are
    no more.

    Args:
        old: what the training began with, as :func:`as_plain` gives it, or as its ``config.yaml`` has it.
        new: of the run that is to go on. With ``resume_changed_data: true`` its data may be others.
    """
    defaults = dict(_leaves(_defaults(new)))
    mine, theirs = dict(_leaves(new)), dict(_leaves(old))
    found: list[Change] = []
    for key in dict.fromkeys([*theirs, *mine]):
        before, after = (values.get(key, defaults.get(key)) for values in (theirs, mine))
        left_out = key == "init_from" and not after  # the weights are the checkpoint's in any case
        if before != after and not left_out and not _SILENT.fullmatch(key):
            found.append(Change(key, before, after))
    replaced = {change.key.partition(".")[0] for change in found if change.key.endswith("._target_")}
    kept = [change for change in found if _stands_alone(change.key, replaced)]
    fixed = [change for change in kept if _is_fixed(change, bool(new.get("resume_changed_data")))]
    return Changes(tuple(change for change in kept if change not in fixed), tuple(fixed))


def refusal(refused: tuple[Change, ...], source: object) -> str:
    """What to say of changes that are refused: the first line names the first of them, with both values.

    Args:
        refused: of :func:`changes`; not empty.
        source: the checkpoint or run folder that was to be continued.
    """
    # Of the data first: keys of the model follow some of them.
    refused = tuple(sorted(refused, key=lambda change: _DATA.fullmatch(change.key) is None))
    first = refused[0]
    data = all(_DATA.fullmatch(change.key) for change in refused)
    lines = [
        f"resume: {source} was trained with {first.key}={text_of(first.old)}, this run has {text_of(first.new)}; "
        f"set {first.key}={text_of(first.old)}, or begin anew from its weights with init_from={source} and another "
        "output_dir" + (", or go on with other data with resume_changed_data=true" if data else "")
    ]
    return "\n".join(lines + [f"  also {change}" for change in refused[1:]])


def trains_on(changed: Iterable[Change]) -> bool:
    """Whether a training that was stopped early goes on with these changes: they say how, or how long, to train."""
    return any(_COURSE.fullmatch(change.key) for change in changed)


def _is_fixed(change: Change, other_data: bool) -> bool:
    key = change.key
    if NEUTRAL.match(key) or _WHERE.fullmatch(key) or _LENIENT.fullmatch(key):
        return False
    return bool(_FIXED.fullmatch(key)) and not (other_data and _DATA.fullmatch(key))


def _stands_alone(key: str, replaced: set[str]) -> bool:
    group = key.partition(".")[0]
    return group not in replaced or group not in _CHOICES or key.endswith("._target_")


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(ExpConfig))  # type: ignore[assignment]
    for group in ("model", "data"):
        structure = structure_of((config.get(group) or {}).get("_target_"))
        if structure is not None:
            content: Any = OmegaConf.to_container(OmegaConf.structured(structure), resolve=False)
            defaults[group] = content
    return defaults


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
