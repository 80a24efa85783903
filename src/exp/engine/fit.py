"""Weights from a file into a model: all of them, or a refusal that names what is missing and what would mend it.

A task that uses a model as it is (eval, predict, features) needs every tensor from the file, and every tensor of the
file in the model: whatever were left out would come from random numbers, or be another model than was trained. A
training may begin with part of a model anew, as a head for other classes; more than that only where it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping

import torch
from torch import nn

from exp import hub
from exp.engine import checkpoint
from exp.engine.finiteness import not_finite
from exp.errors import ConfigError
from exp.task import task_class

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Weights", "find_weights", "fit_weights", "read_weights"]

_SHOWN = 10


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
    path = hub.local_file(str(path)) if hub.is_name(str(path)) else find_weights(path)
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
            a training ``fit_state_dict(state, path)`` makes them fit; what ``may_start_anew(name)`` says of its
            parameters, and ``settings_of(state)`` of the keys that weights were made with, is made use of.
        weights: of :func:`read_weights`.
        config: the frozen configuration.
        as_it_is: whether the model is to be used, not trained; None: as the task says.

    Returns:
        What fits and what does not, to be shown.

    Raises:
        ConfigError: they do not fit.
    """
    state = weights.state
    adapt = getattr(model, "adapt_state_dict", None)
    if adapt is not None:
        state = adapt(state, weights.path)
    made_to_fit: list[str] = []
    if as_it_is is None:
        as_it_is = task_class(config).needs_weights
    if not as_it_is and hasattr(model, "fit_state_dict"):
        adapted, state = state, model.fit_state_dict(state, weights.path)  # type: ignore[operator]
        made_to_fit = [key for key, value in state.items() if value.shape != adapted[key].shape]
    fit = _Fit(model, state, may_be_new=getattr(model, "may_start_anew", _never))
    task = config.task.name
    if as_it_is:
        # Features are what the backbone says: a head plays no part in them.
        wrong = fit.wrong(heads=task != "features")
        if wrong:
            raise ConfigError(
                f"task={task} needs all weights of the model, and {weights.path} does not fit it: {fit.count()}"
                f"{_mend(model, state, config, fit)}\n  {_lines(wrong)}"
            )
    elif not fit.fitting:
        raise ConfigError(
            f"init_from: nothing in {weights.path} fits the model: its keys are like {_first(state, 3)}; the model's "
            f"like {_first(fit.own, 3)}"
        )
    elif not config.init_partial:
        lacking = {title: fit.not_new(names) for title, names in fit.wrong().items() if title != _UNKNOWN}
        if any(lacking.values()):
            raise ConfigError(
                f"init_from: {weights.path} fits the model in part only, and not just its head is new: {fit.count()}"
                f"{_mend(model, state, config, fit)}; init_partial=true starts the rest from random weights\n"
                f"  {_lines(lacking)}"
            )
    odd = not_finite(fit.fitting, {name for name, _ in model.named_parameters()})
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise ConfigError(
            f"init_from: {weights.path} has weights that are not finite: {odd[0]}{more}; the training that left them "
            "has diverged, use other weights"
        )
    model.load_state_dict(fit.fitting, strict=False)
    report = f"init_from: {fit.count()} from {weights.path}"
    if weights.path.is_file() and checkpoint.digest_in(weights.path) is None:
        report += f" ({checkpoint.NO_DIGEST})"
    trusted = [f"model.{key}={_word(config.model.get(key))}" for key in getattr(model, "taken_on_trust", ())]
    if trusted and config.record.trained_in is None:
        report += f"\n  taken on trust, since the weights do not tell them: {', '.join(trusted)}"
    if made_to_fit:
        report += f"\n  made to fit the model: {', '.join(made_to_fit)}"
    if not as_it_is:
        report += f"\n  {_lines(fit.wrong())}" if fit.wrong() else ""
    return report


def _never(_: str) -> bool:
    return False


_MISSING, _SHAPE, _UNKNOWN = "missing in the file", "other shape", "unknown to the model"


class _Fit:
    """Which tensors of a file fit a model, and which do not."""

    def __init__(self, model: nn.Module, state: Mapping[str, torch.Tensor], may_be_new: Any) -> None:
        self.own = model.state_dict()
        self.may_be_new = may_be_new
        self.fitting = {
            key: value for key, value in state.items() if key in self.own and value.shape == self.own[key].shape
        }
        self._state = state

    def count(self) -> str:
        return f"{len(self.fitting)} of {len(self.own)} tensors"

    def wrong(self, heads: bool = True) -> dict[str, list[str]]:
        """Lists of what does not fit, by how; empty where everything does.

        Args:
            heads: also what a training may begin anew.
        """
        state, own = self._state, self.own
        names = {
            _MISSING: [key for key in own if key not in state],
            _SHAPE: [key for key in state if key in own and key not in self.fitting],
            _UNKNOWN: [key for key in state if key not in own],
        }
        if not heads:
            names = {title: self.not_new(keys) for title, keys in names.items()}
        return {title: [self._described(key) for key in keys] for title, keys in names.items() if keys}

    def not_new(self, names: Iterable[str]) -> list[str]:
        """Those that no training may begin anew."""
        return [name for name in names if not self.may_be_new(name.partition(":")[0])]

    def _described(self, key: str) -> str:
        if key not in self.own or key not in self._state:
            return key
        return f"{key}: {tuple(self._state[key].shape)} in the file, {tuple(self.own[key].shape)} in the model"


def _mend(model: nn.Module, state: Mapping[str, torch.Tensor], config: ExpConfig, fit: _Fit) -> str:
    """What to change, as far as weights and run tell."""
    settings_of: Any = getattr(model, "settings_of", dict)
    there, here = settings_of(state), settings_of(fit.own)
    keys = [f"{key}={_word(value)}" for key, value in there.items() if key in here and here[key] != value]
    if keys:
        return f"; set {' '.join(keys)}"
    if config.record.differs:
        return f"; not as in the run: {', '.join(config.record.differs)}"
    missing = [key for key in fit.own if key not in state]
    if fit.fitting and missing and all(map(fit.may_be_new, missing)):
        others = [f"{key} {tuple(value.shape)}" for key, value in state.items() if key not in fit.own]
        lacks = f"the file has another head ({_first(others, 2)})" if others else "its head is not in the file"
        return f"; {lacks}: train it first (task=train), then use that run"
    return "; use the settings that they were trained with"


def _word(value: Any) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _lines(wrong: Mapping[str, list[str]]) -> str:
    lines = []
    for title, names in wrong.items():
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{title}: {', '.join(names[:_SHOWN])}{more}")
    return "\n  ".join(lines)


def _first(names: Iterable[str], count: int) -> str:
    return ", ".join(list(names)[:count])
