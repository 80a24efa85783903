"""Compares two configurations, and decides which keys may change when a training is resumed. No torch.

It compares a resumed run with its checkpoint, an evaluation with the training of its weights, and a run with the
experiment that it started from.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from omegaconf import MISSING

from exp.config.resolve import to_plain
from exp.config.schema import ExpConfig
from exp.errors import ConfigError

__all__ = [
    "Change", "Changes", "continues_after_early_stop", "diff_lines", "format_value", "node_changes", "resume_changes",
    "resume_error", "training_config",
]  # fmt: skip

_MAX_CHARS = 60  # characters of a value in a message
_DATA = re.compile(r"data(?:\..*)?")
# Keys on which the results of a run depend, except _SPEED_ONLY: those change the speed or the memory, not the results.
_RESULT_KEYS = re.compile(r"(?:model|data)(?:\..*)?|seed|precision")
_SPEED_ONLY = re.compile(
    r"data\.(?:num_workers|eval_batch_size|cache_mb|device_cache)|model\.backbone\.activation_checkpointing"
)
# Keys without a meaning for training: its folder, records, keys of other tasks, and derived keys.
_IGNORED = re.compile(
    r"output_dir|overwrite|checkpoint\.trusted|resume|resume_changed_data|init_partial|batch_size"
    r"|(?:record|sweep|reference|task(?!\.name$))(?:\..*)?"
)
# May change on resume: the location of the data, since the files themselves are compared, and which data are refused.
_MAY_CHANGE = re.compile(r"data\.(?:root|sample_data|archive_folder|allow_gaps|on_error)")
# Must not change on resume: the samples of each step and their order, the model, and the keys of the optimizer's state.
_MUST_MATCH = re.compile(
    r"(?:model|data)(?:\..*)?|optim\.(?:type|options\.(?:amsgrad|centered))|seed|global_batch_size|init_from|metric|task\.name"
    r"|debug\.(?:train_batches|overfit)"
)
# What may differ between the nodes of a job: the path of the folder, records, and shares with what follows from them.
_FOLDER_KEYS = re.compile(r"output_dir|record\..*")
_NODE_KEYS = re.compile(_FOLDER_KEYS.pattern + r"|launcher\.shares?|batch_size")
_MIXED_KEYS = re.compile(_NODE_KEYS.pattern + r"|backend\..*|nproc|data\.num_workers")
# Length and settings of the training: if one of them changes, a training that was stopped early continues.
_SCHEDULE_KEYS = re.compile(r"patience|min_delta|max_epochs|max_steps|val_every|(?:optim|schedule|hooks)(?:\..*)?")


class Change(NamedTuple):
    """A key whose values differ in two configurations; None if a configuration does not have the key."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}={format_value(self.new)} (was {format_value(self.old)})"

    def beside(self, label: str) -> str:
        """``data.horizon=48 (<label>: 96)``: the new value, and the old one by the name of its configuration."""
        return f"{self.key}={format_value(self.new)} ({label}: {format_value(self.old)})"


class Changes(NamedTuple):
    """How the configuration of a resumed training differs from the one in the checkpoint.

    Attributes:
        allowed: changes that take effect from the step at which the training resumes.
        refused: changes of keys that must stay the same within one training.
    """

    allowed: tuple[Change, ...] = ()
    refused: tuple[Change, ...] = ()


def training_config(config: ExpConfig) -> dict[str, Any]:
    """The part of a frozen configuration that a checkpoint contains: without output paths, records and derived keys."""
    content = {key: value for key, value in to_plain(config).items() if key == "task" or not _IGNORED.fullmatch(key)}
    content["task"] = {"name": content["task"]["name"]}
    return content


def format_value(value: Any) -> str:
    """A value as it is written on the command line, cut to 60 characters."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


def resume_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare the configurations of a training before and after it is resumed.

    Args:
        old: configuration in the checkpoint, as :func:`exp.config.resolve.to_plain` returns it.
        new: configuration of the run that resumes; if ``resume_changed_data`` is true, all keys of ``data`` may change.
    """
    changes = [
        change
        for change in _compare(old, new)
        # Without init_from a resumed run still has the right weights: those of the checkpoint.
        if not _IGNORED.fullmatch(change.key) and not (change.key == "init_from" and not change.new)
    ]

    def is_fixed(change: Change) -> bool:
        may_change = _SPEED_ONLY.fullmatch(change.key) or _MAY_CHANGE.fullmatch(change.key)
        other_data = new.get("resume_changed_data") and _DATA.fullmatch(change.key)
        return bool(_MUST_MATCH.fullmatch(change.key)) and not may_change and not other_data

    return Changes(tuple(change for change in changes if not is_fixed(change)), tuple(filter(is_fixed, changes)))


def resume_error(refused: tuple[Change, ...], source: object) -> ConfigError:
    """The error of refused changes. Its finding has the first change with both values.

    Args:
        refused: of :func:`resume_changes`; not empty.
        source: the checkpoint or run folder to resume from.
    """
    # Keys of data first, because keys of the model may follow from them.
    first, *more = sorted(refused, key=lambda change: _DATA.fullmatch(change.key) is None)
    data = all(_DATA.fullmatch(change.key) for change in refused)
    return ConfigError(
        f"resume: {source} was trained with {first.key}={format_value(first.old)}, this run has "
        f"{format_value(first.new)}",
        f"set {first.key}={format_value(first.old)}, or start a new training from its weights with init_from={source} "
        "and another output_dir" + (", or continue with the other data with resume_changed_data=true" if data else ""),
        [f"also {change}" for change in more],
        key=first.key,
    )


def continues_after_early_stop(changed: Iterable[Change]) -> bool:
    """Whether a training that was stopped early continues: a change concerns its length, early stopping, validation,
    optimizer, schedule or hooks.

    Args:
        changed: the allowed changes of :func:`resume_changes`.
    """
    return any(_SCHEDULE_KEYS.fullmatch(change.key) for change in changed)


def diff_lines(config: ExpConfig, other: ExpConfig, label: str, leave_out: Sequence[str] = ()) -> list[str]:
    """A line for each key of model, data, seed and precision that differs in two configurations.

    Without keys that only follow from another key, and keys that are missing (``???``) in ``other``.

    Args:
        config: the configuration to describe.
        other: the configuration to compare it with.
        label: name of ``other`` in the lines: ``data.horizon=48 (<label>: 96)``.
        leave_out: keys to ignore.
    """
    changes = {change.key: change for change in _compare(to_plain(other), to_plain(config))}
    dependent = {key for key, target in config.record.follows.items() if target in changes}
    return [
        change.beside(label)
        for key, change in changes.items()
        if _RESULT_KEYS.fullmatch(key)
        and not _SPEED_ONLY.fullmatch(key)
        and key not in dependent
        and key not in leave_out
        if change.old != MISSING
    ]


def node_changes(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[Change]:
    """The keys that differ in the configurations of two nodes of a job, and must not.

    Each node may choose the path of the run folder and, if all nodes have one, its share of a batch; with
    ``launcher.mixed`` also its backend, the number of its ranks, and their loader workers.
    """
    launchers = first["launcher"], other["launcher"]
    with_shares = [bool(launcher["shares"]) or launcher["share"] is not None for launcher in launchers]
    chosen = _NODE_KEYS if with_shares[0] == with_shares[1] else _FOLDER_KEYS
    if all(launcher["mixed"] for launcher in launchers):
        chosen = _MIXED_KEYS
    return [change for change in _compare(first, other) if not chosen.fullmatch(change.key)]


def _compare(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """The keys that differ; of a section whose class differs only ``_target_``: its other keys have another meaning."""
    keys = dict.fromkeys([*old, *new])
    if old.get("_target_") != new.get("_target_") and "_target_" in old and "_target_" in new:
        keys = {"_target_": None}
    for key in keys:
        before, after = (None if part.get(key) == {} else part.get(key) for part in (old, new))
        if before != after and all(part is None or isinstance(part, Mapping) for part in (before, after)):
            yield from _compare(before or {}, after or {}, f"{prefix}{key}.")
        elif before != after:
            yield Change(f"{prefix}{key}", before, after)
