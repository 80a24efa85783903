"""Where two configurations differ: a resumed run and its record, an evaluation and its training, an experiment and what
was chosen beside it. No torch.

What may change when a training goes on, and what would make another training of it, is decided here, too.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence

from omegaconf import MISSING, OmegaConf

from exp.config.schema import ExpConfig

__all__ = [
    "Change", "Changes", "as_plain", "changes", "different", "of_training", "refusal", "trains_on",
]  # fmt: skip

_LENGTH = 60  # characters of a value in a message
_DATA = re.compile(r"data(?:\..*)?")
# What a run's numbers depend on; of that, what says how fast something is computed, and not what.
_COMPUTED = re.compile(r"(?:model|data)(?:\..*)?|seed|precision")
_NEUTRAL = re.compile(
    r"data\.(?:num_workers|eval_batch_size|cache_megabytes|on_device)|model\.activation_checkpointing"
)
# Of no meaning for a training: where it is, what is noted of it, what other tasks read, what is derived.
_SILENT = re.compile(
    r"output_dir|overwrite|resume|resume_changed_data|init_partial|batch_size|reference|run|steps"
    r"|(?:record|sweep|published|published_\w+|task(?!\.name$))(?:\..*)?"
)
# May change on resume: where the data lie, since the files themselves are compared, and whether data are refused.
_FREE = re.compile(r"data\.(?:root|sample_data|archive_folder|allow_gaps|on_error)")
# The samples that a step sees, what they say and in which order; what learns from them; what its state consists of.
_FIXED = re.compile(
    r"(?:model|data)(?:\..*)?|optim\.(?:type|options\.(?:amsgrad|centered))|seed|global_batch_size|init_from|metric|task\.name"
    r"|debug\.(?:train_batches|overfit)"
)
# How long is trained, and with what: who changes it wants more of a training that had been stopped early.
_COURSE = re.compile(r"patience|min_delta|max_epochs|max_steps|val_every|(?:optim|schedule|hooks)(?:\..*)?")
# Groups of which another choice has other keys: one line says it all.
_CHOICES = ("backend", "launcher", "wrapper", "model", "data")


class Change(NamedTuple):
    """One key of two configurations; a value that is not there is None."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}={text_of(self.new)} (was {text_of(self.old)})"


class Changes(NamedTuple):
    """How a configuration differs from the one that a training began with."""

    allowed: tuple[Change, ...] = ()
    """They take effect from the step at which the training goes on."""
    refused: tuple[Change, ...] = ()
    """They would make another training of it."""


def as_plain(config: ExpConfig) -> dict[str, Any]:
    """A configuration as plain dicts and lists, without interpolations."""
    node: Any = config
    content: Any = OmegaConf.to_container(node, resolve=True)
    return dict(content)


def of_training(config: ExpConfig) -> dict[str, Any]:
    """What a checkpoint keeps of a frozen configuration: all but where a run is and what is noted of it."""
    content = {key: value for key, value in as_plain(config).items() if key == "task" or not _SILENT.fullmatch(key)}
    content["task"] = {"name": content["task"]["name"]}
    return content


def text_of(value: Any) -> str:
    """A value as it is written on the command line; a long one is cut."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """Compare the configurations of a training that is to go on.

    Args:
        old: what the training began with, as :func:`as_plain` gives it.
        new: of the run that is to go on. With ``resume_changed_data: true`` its data may be others.
    """
    found = [
        change
        for change in _compared(old, new)
        # The weights are the checkpoint's in any case.
        if not _SILENT.fullmatch(change.key) and not (change.key == "init_from" and not change.new)
    ]
    replaced = {change.key.partition(".")[0] for change in found if change.key.endswith("._target_")}
    fixed: list[Change] = []
    free: list[Change] = []
    for change in found:
        key = change.key
        group = key.partition(".")[0]
        if group in replaced and group in _CHOICES and not key.endswith("._target_"):
            continue
        may_differ = _NEUTRAL.fullmatch(key) or _FREE.fullmatch(key) or not _FIXED.fullmatch(key)
        other_data = new.get("resume_changed_data") and _DATA.fullmatch(key)
        (free if may_differ or other_data else fixed).append(change)
    return Changes(tuple(free), tuple(fixed))


def refusal(refused: tuple[Change, ...], source: object) -> str:
    """The message for changes that are refused: the first line names the first of them, with both values.

    Args:
        refused: of :func:`changes`; not empty.
        source: the checkpoint or run folder that was to be continued.
    """
    # Of the data first: keys of the model follow some of them.
    first, *more = sorted(refused, key=lambda change: _DATA.fullmatch(change.key) is None)
    data = all(_DATA.fullmatch(change.key) for change in refused)
    lines = [
        f"resume: {source} was trained with {first.key}={text_of(first.old)}, this run has {text_of(first.new)}; "
        f"set {first.key}={text_of(first.old)}, or begin anew from its weights with init_from={source} and another "
        "output_dir" + (", or go on with other data with resume_changed_data=true" if data else "")
    ]
    return "\n".join(lines + [f"  also {change}" for change in more])


def trains_on(changed: Iterable[Change]) -> bool:
    """Whether a training that was stopped early goes on with these changes: they say how, or how long, to train."""
    return any(_COURSE.fullmatch(change.key) for change in changed)


def different(config: ExpConfig, other: ExpConfig, names: str, leave_out: Sequence[str] = ()) -> list[str]:
    """A line for each key of model, data, seed and precision that two configurations do not have in common.

    Keys that only follow another one are left out, and those that ``other`` leaves to the user.

    Args:
        config: the one that is described.
        other: what it is compared with.
        names: what ``other`` is called in the lines: ``data.horizon=48 (<names>: 96)``.
        leave_out: keys that do not count.
    """
    found = {change.key: change for change in _compared(as_plain(other), as_plain(config))}
    silent = {key for key, target in config.record.follows.items() if target in found}
    return [
        f"{key}={text_of(change.new)} ({names}: {text_of(change.old)})"
        for key, change in found.items()
        if _COMPUTED.fullmatch(key) and not _NEUTRAL.fullmatch(key) and key not in silent and key not in leave_out
        if change.old != MISSING
    ]


def _compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    both = (Change(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after]))
    return [change for change in both if change.old != change.new]


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
