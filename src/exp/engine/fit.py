"""Weights from a file into a model: all of them, or a refusal that names what is missing and what would mend it.

A task that uses a model as it is (eval, predict, features) needs every tensor from the file, and every tensor of the
file in the model: whatever were left out would come from random numbers, or be another model than was trained. A
training may begin with part of a model anew, as a head for other classes; more than that only where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import torch
from torch import nn

from exp import hub
from exp.config.compose import is_of_hub
from exp.data.places import shortened
from exp.engine import checkpoint
from exp.errors import ConfigError
from exp.task import task_class

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Weights", "find_weights", "fit_weights", "read_weights"]

_OTHER, _UNKNOWN = "other shape", "unknown to the model"


@dataclass(frozen=True)
class Weights:
    """What a file gives.

    Attributes:
        path: the file.
        state: tensors by name, on the CPU.
        data: what the data set of the run said of itself (``state()``); None: the file does not tell.
    """

    path: Path
    state: Mapping[str, torch.Tensor]
    data: dict[str, Any] | None


def read_weights(path: Path) -> Weights:
    """Our checkpoints, or the authors'.

    Args:
        path: a ``.pth``, a ``.safetensors``, an index of several, a folder (:func:`find_weights`), or a name
            (:mod:`exp.hub`).

    Raises:
        CheckpointError: the file is not readable.
        ConfigError: there is none.
        UnavailableError: weights by that name cannot be fetched.
    """
    path = hub.local_file(str(path)) if is_of_hub(str(path)) else find_weights(path)
    content = checkpoint.read(path, mapped=True)
    state = checkpoint.weights_of(content, path)
    ours = isinstance(content, Mapping) and "state_dict" in content and isinstance(content.get("data"), dict)
    return Weights(path, state, content["data"] if ours else None)


def find_weights(path: Path) -> Path:
    """The file that ``path`` stands for: itself, a run folder's best (else newest) checkpoint, or a model folder's.

    Raises:
        ConfigError: there is none.
    """
    if not path.is_dir():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    candidates = [folder / "best.pth", *checkpoint.list_checkpoints(folder), folder / "model.safetensors"]
    candidates.append(folder / hub.INDEX)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"init_from={path} holds no checkpoint; looked for best.pth, step_*.pth, model.safetensors and its "
        f"index in {folder}"
    )


def fit_weights(model: nn.Module, weights: Weights, config: ExpConfig, as_it_is: bool | None = None) -> str:
    """Give a model its weights.

    Args:
        model: takes them. Where it has ``adapt_state_dict(state, path)``, that brings foreign names to its own, and for
            a training ``fit_state_dict(state, path)`` makes them fit; ``may_start_anew(name)`` says which of its
            parameters a training may begin without.
        weights: of :func:`read_weights`.
        config: the frozen configuration.
        as_it_is: whether the model is to be used, not trained; None: as the task says.

    Returns:
        What fits and what does not, to be shown.

    Raises:
        ConfigError: they do not fit.
    """
    state, path, own = weights.state, weights.path, model.state_dict()
    task: str = config.task.name
    if as_it_is is None:
        as_it_is = task_class(config).needs_weights
    adapt: Any = getattr(model, "adapt_state_dict", None)
    state = state if adapt is None else adapt(state, path)
    made_to_fit: list[str] = []
    if not as_it_is and hasattr(model, "fit_state_dict"):
        adapted, state = state, model.fit_state_dict(state, path)  # type: ignore[operator]
        made_to_fit = [key for key, value in state.items() if value.shape != adapted[key].shape]
    may_be_new: Any = getattr(model, "may_start_anew", lambda _: False)
    fitting = {key: value for key, value in state.items() if key in own and value.shape == own[key].shape}
    wrong = {
        "missing in the file": [key for key in own if key not in state],
        _OTHER: [key for key in state if key in own and key not in fitting],
        _UNKNOWN: [key for key in state if key not in own],
    }
    count = f"{len(fitting)} of {len(own)} tensors"
    # A training may begin a head anew; and features are what the backbone says: a head plays no part in them.
    lacking = {title: [key for key in keys if not may_be_new(key)] for title, keys in wrong.items()}

    shapes = {
        key: f": {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the model" for key in wrong[_OTHER]
    }

    def shown(names: Mapping[str, list[str]]) -> str:
        listed = {title: shortened([key + shapes.get(key, "") for key in keys]) for title, keys in names.items()}
        return "".join(f"\n  {title}: {text}" for title, text in listed.items() if text)

    if as_it_is:
        refused = lacking if task == "features" else wrong
        reason, cure = f"task={task} needs all weights of the model, and {path} does not fit it", ""
    elif not fitting:
        raise ConfigError(
            f"init_from: nothing in {path} fits the model: its keys are like {', '.join(list(state)[:3])}; the model's "
            f"like {', '.join(list(own)[:3])}"
        )
    else:
        refused = {} if config.init_partial else {**lacking, _UNKNOWN: []}
        reason = f"init_from: {path} fits the model in part only, and not just its head is new"
        cure = "; init_partial=true starts the rest from random weights"
    if any(refused.values()):
        raise ConfigError(f"{reason}: {count}{_mend(model, state, own, config)}{cure}{shown(refused)}")
    odd = checkpoint.not_finite(fitting, {name for name, _ in model.named_parameters()})
    if odd:
        raise ConfigError(
            f"init_from: {path} has weights that are not finite: {shortened(odd, 1)}; the training that left them has "
            "diverged, use other weights"
        )
    model.load_state_dict(fitting, strict=False)
    report = f"init_from: {count} from {path}"
    if path.is_file() and checkpoint.digest_in(path) is None:
        report += f" ({checkpoint.NO_DIGEST})"
    trusted = [f"model.{key}={_word(config.model.get(key))}" for key in getattr(model, "taken_on_trust", ())]
    if trusted and config.record.trained_in is None:
        report += f"\n  taken on trust, since the weights do not tell them: {', '.join(trusted)}"
    if made_to_fit:
        report += f"\n  made to fit the model: {', '.join(made_to_fit)}"
    return report if as_it_is else report + shown(wrong)


def _mend(model: nn.Module, state: Mapping[str, Any], own: Mapping[str, Any], config: ExpConfig) -> str:
    """What to change, as far as weights and run tell."""
    if config.record.differs:
        return f"; not as in the run: {', '.join(config.record.differs)}"
    missing = [key for key in own if key not in state]
    may_be_new: Any = getattr(model, "may_start_anew", lambda _: False)
    if missing and len(missing) < len(own) and all(map(may_be_new, missing)):
        others = [f"{key} {tuple(value.shape)}" for key, value in state.items() if key not in own]
        lacks = f"the file has another head ({', '.join(others[:2])})" if others else "its head is not in the file"
        return f"; {lacks}: train it first (task=train), then use that run"
    return "; use the settings that they were trained with"


def _word(value: Any) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
