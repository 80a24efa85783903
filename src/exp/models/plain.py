"""``model=plain``: a torch module and a loss of anybody's as a model, without a class of exp's in their code."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from exp.config.resolve import instantiate, resolve
from exp.errors import ConfigError, error_message, nearest, qualified_name, raised_by_user_code, user_location
from exp.models.base import Model, strip_prefix
from exp.models.keys import PREDICTIONS

if TYPE_CHECKING:
    from pathlib import Path

_TARGETS = ("y", "target", "targets", "label", "labels")
_ELEMENTWISE = {
    *("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss", "SoftMarginLoss"),
    *("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss"),
}
"""Losses of torch that compare output and target element by element, and broadcast other shapes."""


class PlainModel(Model):
    """Trains a torch module with one or several losses.

    The module gets keys of the batch, and each loss the output and the target, in float32. Images of 8 bits become
    float32 without a change of their values (0..255); labels become int64, which torch's losses of classes take, or
    float32 for losses that compare elements.

    Args:
        module: see :class:`exp.models.keys.PlainConfig`, as for the other keys.
        loss: a loss.
        losses: several losses, instead of ``loss``.
        inputs: keys of the batch that the module gets.
        output: which part of an output counts.
        target: key of the batch with the target.
        predict: what ``mode="predict"`` gives.
        **data_arguments: of :meth:`exp.data.base.Data.model_arguments`; module and losses get those that their
            constructors take and the configuration does not set, such as ``num_classes`` and ``ignore_index``.

    Raises:
        ConfigError: a class or a function cannot be used, or a key has a wrong value.
    """

    raw_arguments = ("module", "loss", "losses")

    def __init__(
        self,
        module: Mapping[str, Any],
        loss: Mapping[str, Any] | None = None,
        losses: Sequence[Mapping[str, Any]] = (),
        inputs: Sequence[str] | Mapping[str, str] | None = None,
        output: str | int | None = None,
        target: str | None = None,
        predict: str = "identity",
        **data_arguments: Any,
    ) -> None:
        super().__init__()
        if predict not in PREDICTIONS:
            raise ConfigError(f"model.predict={predict} is not one of {', '.join(PREDICTIONS)}", key="model.predict")
        self.inputs, self.output, self.target, self.prediction = inputs, output, target, predict
        # Not `module`: wrappers such as DDP have the model under this name.
        self.network: nn.Module = _make("model.module", module, data_arguments)
        self.name = qualified_name(self.network)
        self._has_run = False  # an error of the first call is one of shapes or types; its message lists them
        if bool(loss) == bool(losses):
            raise ConfigError("model.loss._target_ or model.losses must be set, and not both", key="model.loss")
        entries = {f"model.losses[{number}]": entry for number, entry in enumerate(losses)}
        if loss:
            entries["model.loss"] = loss
        self.weights, modules = [], []
        for key, entry in entries.items():
            weight, arguments = _split_weight(entry)
            self.weights.append(weight)
            modules.append(_make(key, arguments, data_arguments, functions=True))
        self.losses = nn.ModuleList(modules)
        self._loss_paths = [loss.name if isinstance(loss, _Function) else qualified_name(loss) for loss in modules]
        self._compares_elements = [
            path.startswith("torch.nn.") and path.rpartition(".")[2] in _ELEMENTWISE for path in self._loss_paths
        ]
        self.loss_names = [*_loss_names(self._loss_paths)]
        parameters = inspect.signature(self.network.forward).parameters
        self._named = [name for name, value in parameters.items() if value.kind in _NAMED]
        self._required = [name for name in self._named if parameters[name].default is inspect.Parameter.empty]
        takes_any = any(value.kind == inspect.Parameter.VAR_KEYWORD for value in parameters.values())
        unknown = [] if takes_any or not isinstance(inputs, Mapping) else [n for n in inputs if n not in self._named]
        if unknown:
            raise ConfigError(
                f"model.inputs: {self.name}.forward has no argument {', '.join(unknown)}; it has "
                f"{', '.join(self._named)}",
                key="model.inputs",
            )

    def forward(self, mode: str = "tensor", **batch: Any) -> torch.Tensor | dict[str, torch.Tensor]:
        """The output of the module, what ``predict`` makes of it, or the losses by name.

        Args:
            mode: see :class:`exp.models.base.Model`.
            **batch: the batch.

        Raises:
            ConfigError: the batch lacks a key, or shapes do not fit; the message names class and shapes.
        """
        output = self._compute(batch)
        if mode == "tensor":
            return output
        output = output.float() if output.is_floating_point() else output
        if mode == "predict":
            return _PREDICT[self.prediction](output)
        key = self._target_key(batch)
        if key is None:
            raise ConfigError(
                f"model.target{'' if self.target is None else f'={self.target}'} is not a key of the batch, which has "
                f"{', '.join(batch)}",
                "set model.target to the key with the target",
                key="model.target",
            )
        values = [self._loss(number, loss, output, key, batch[key]) for number, loss in enumerate(self.losses)]
        self._has_run = True
        return {
            name: value if weight == 1.0 else value * weight
            for name, value, weight in zip(self.loss_names, values, self.weights)
        }

    @property
    def user_module(self) -> nn.Module:  # type: ignore[override]
        """The module; so this model is rehearsed, also if all parts are of torch."""
        return self.network

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Also take the weights of the module alone, as its authors have saved them; losses keep their own tensors."""
        own = self.state_dict()
        adapted = super().adapt_state_dict(state, source)
        if not adapted.keys() & own.keys():
            inner = strip_prefix(state, self.network.state_dict())
            adapted = {f"network.{key}": value for key, value in inner.items()}
        return {**{key: value for key, value in own.items() if key.startswith("losses.")}, **adapted}

    def _target_key(self, batch: Mapping[str, Any]) -> str | None:
        return next((key for key in ([self.target] if self.target else _TARGETS) if key in batch), None)

    def _arguments(self, batch: Mapping[str, Any]) -> dict[str, tuple[str | None, Any]]:
        """The inputs by key of the batch: the name of the argument, None for one by position, and the value."""
        if self.inputs is None:
            target = self._target_key(batch)
            names: dict[str, str | None] = {name: name for name in self._named if name in batch and name != target}
            missing = [name for name in self._required if name not in names]
            if missing or not names:
                raise ConfigError(
                    f"model.inputs: {self.name}.forward takes {', '.join(self._required or self._named)}, and the "
                    f"batch has {', '.join(batch)}",
                    "name the keys of the batch in the order of the arguments, model.inputs=[...], or by argument, "
                    "model.inputs={argument: key}",
                    key="model.inputs",
                )
        elif isinstance(self.inputs, Mapping):
            names = {key: name for name, key in self.inputs.items()}
        else:
            names = dict.fromkeys(self.inputs)
        absent = [key for key in names if key not in batch]
        if absent:
            raise ConfigError(
                f"model.inputs: the batch has no {', '.join(absent)}; it has {', '.join(batch)}", key="model.inputs"
            )
        return {key: (name, _as_float(batch[key])) for key, name in names.items()}

    def _compute(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Call the module; the part of its output that counts."""
        inputs = self._arguments(batch)
        positional = [value for name, value in inputs.values() if name is None]
        try:
            result = self.network(*positional, **{name: value for name, value in inputs.values() if name is not None})
        except Exception as error:  # of torch's own modules; for a user's frames the engine says the same
            if self._has_run or not raised_by_user_code(error) or user_location(error):
                raise
            shapes = ", ".join(f"{key} {tuple(getattr(value, 'shape', ()))}" for key, (_, value) in inputs.items())
            raise ConfigError(f"model.module: {self.name}.forward({shapes}): {error_message(error)}") from error
        part = result if self.output is None else _part(result, self.output)
        if not isinstance(part, torch.Tensor):
            parts = f"with {', '.join(map(str, result))}" if isinstance(result, Mapping) else ""
            raise ConfigError(
                f"model.output{'' if self.output is None else f'={self.output}'}: {self.name}.forward gives a "
                f"{type(result).__name__} {parts}".rstrip(),
                "set model.output to the key, attribute or index of the tensor that counts",
                key="model.output",
            )
        return part

    def _loss(self, number: int, loss: nn.Module, output: torch.Tensor, key: str, target: torch.Tensor) -> torch.Tensor:
        """The value of a loss, a 0-dim tensor."""
        name = self._loss_paths[number]
        if self._compares_elements[number]:
            if output.shape != target.shape:
                raise ConfigError(
                    f"model: {self._shapes(output, key, target)}; {name} compares them element by element, so the "
                    f"output must be {tuple(target.shape)}"
                )
            target = target.to(output.dtype)
        elif not target.is_floating_point() and target.dtype != torch.bool:
            target = target.long()
        try:
            value: torch.Tensor = loss(output, target)
        except Exception as error:
            if self._has_run or not raised_by_user_code(error):
                raise
            raise ConfigError(
                f"model: {self._shapes(output, key, target)}; {name}: {error_message(error)}{user_location(error)}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.dim():
            shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ConfigError(f"model.loss: {name} gives {shape}, and a loss is one number", "take its mean")
        return value

    def _shapes(self, output: torch.Tensor, key: str, target: torch.Tensor) -> str:
        return f"{self.name} gives {tuple(output.shape)}, and {key} is {tuple(target.shape)}"


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PREDICT: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda output: output,
    "argmax": lambda output: output.argmax(dim=1),
    "softmax": lambda output: output.softmax(dim=1),
    "sigmoid": torch.sigmoid,
}


class _Function(nn.Module):
    """A function as a loss; its tensors, such as the weights of classes, move with the model.

    Args:
        function: called with output and target.
        arguments: its further arguments.
    """

    def __init__(self, function: Callable[..., torch.Tensor], arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.name, self.loss_is_mean = qualified_name(function), getattr(function, "loss_is_mean", True)
        self.function = functools.partial(function, **{k: v for k, v in arguments.items() if not torch.is_tensor(v)})
        for key, value in arguments.items():
            if torch.is_tensor(value):
                self.register_buffer(key, value)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The value of the function."""
        return self.function(output, target, **dict(self.named_buffers()))


def _make(key: str, entry: Any, data_arguments: Mapping[str, Any], functions: bool = False) -> nn.Module:
    """The module or the loss of a section; ``functions``: it may be a function, too."""
    content = dict(entry) if isinstance(entry, Mapping) else {}
    path = content.pop("_target_", None)
    if path is None:
        raise ConfigError(f"{key} has no _target_", "give the path of a class, such as my_package.Net", key=key)
    cls = resolve(f"{key}._target_", str(path), nn.Module, functions)
    known = {name: value for name, value in data_arguments.items() if name not in content}
    if functions:  # the weights of classes: torch takes a tensor
        content = {name: torch.tensor(value) if _is_row(value) else value for name, value in content.items()}
    if inspect.isclass(cls):
        module: nn.Module = instantiate(cls, key, content, known)
        return module
    try:
        names = [*inspect.signature(cls).parameters]
    except ValueError:  # written in C
        return _Function(cls, content)
    unknown = [name for name in content if name not in names]
    if unknown:
        raise ConfigError(f"{key}.{unknown[0]}: {path} has no such argument{nearest(unknown[0], names)}", key=key)
    return _Function(cls, {**content, **{name: value for name, value in known.items() if name in names}})


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, float) for item in value)


def _split_weight(entry: Any) -> tuple[float, Any]:
    """The factor of a loss, and its other keys. A list of ``weight`` is the weights of classes: it stays among them."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("weight"), (int, float)):
        return 1.0, entry
    return float(entry["weight"]), {name: value for name, value in entry.items() if name != "weight"}


def _loss_names(paths: Sequence[str]) -> Iterator[str]:
    """Under which names losses are logged: ``loss``, or ``loss_<class>`` of each of several."""
    used: Counter[str] = Counter()
    for path in paths:
        name = path.rpartition(".")[2]
        used[name] += 1
        yield "loss" if len(paths) == 1 else f"loss_{name}" + (f"_{used[name]}" if used[name] > 1 else "")


def _as_float(value: Any) -> Any:
    """A tensor of 8 bits as float32, with its values; anything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 else value


def _part(result: Any, name: str | int) -> Any:
    """An entry or an attribute of an output; None: there is none."""
    if isinstance(result, Mapping):
        return result.get(name)
    if isinstance(name, int):
        return result[name] if isinstance(result, (list, tuple)) and name < len(result) else None
    return getattr(result, name, None)
