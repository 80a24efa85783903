"""The base class of all models: MMEngine's model interface, without steps that exp's engine has done already."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

import torch
from mmengine.model import BaseModel
from torch import nn

from exp.errors import EXPERIMENT_PAGE, ConfigError, qualified_name

_KNOWN = {"exp", "torch", "mmengine", "mmcv", "builtins", "functools", "operator", "_operator", "math", "numpy"}


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Number of ``parameters`` and of ``trained_parameters`` (not frozen); of a sharded model over all ranks."""
    every = list(model.parameters())
    return {
        "parameters": sum(value.numel() for value in every),
        "trained_parameters": sum(value.numel() for value in every if value.requires_grad),
    }


def has_user_part(model: nn.Module) -> bool:
    """Whether a part of a model, such as a head or a loss, is a user's.

    Parts are its modules, and the functions and objects that these hold.

    Args:
        model: the model, not wrapped.
    """
    if getattr(model, "user_module", None) is not None:
        return True
    parts = (part for module in model.modules() for part in _parts(module))
    return any(qualified_name(part).partition(".")[0] not in _KNOWN for part in parts)


def has_user_loss(model: nn.Module) -> bool:
    """Whether a part of a model is a user's, and no part has ``loss_is_mean = False``."""
    return has_user_part(model) and all(getattr(module, "loss_is_mean", True) for module in model.modules())


def _parts(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    for value in vars(module).values():
        while isinstance(value, functools.partial):
            value = value.func
        if callable(value) and not isinstance(value, nn.Module):
            yield value


class _IdentityPreprocessor(nn.Module):
    """Replaces MMEngine's data preprocessor; the engine has moved the batch to the device already."""

    def forward(self, data: dict[str, torch.Tensor], training: bool = False) -> dict[str, torch.Tensor]:
        """Return ``data`` itself."""
        del training
        return data

    __call__ = forward  # called at every step, so without the overhead of nn.Module.__call__


class Model(BaseModel):
    """A model that MMEngine's Runner, MMDistributedDataParallel and exp's engine can run.

    Subclasses write ``forward(<keys of the batch>, mode)``; a batch is a dict of tensors, passed as keyword arguments.
    ``mode`` is one of

    - ``"loss"``: return a dict of 0-dim tensors, such as ``{"loss": ...}``. Training minimizes the sum of the entries
      whose names contain ``loss``; other entries are only logged;
    - ``"predict"``: return the predictions that the metrics take; for ``task=predict`` a tensor (B, ...) with one row
      per sample of the batch;
    - ``"tensor"``: return the network's raw output.

    The batch is on the model's device, and autocast is on if ``precision`` needs it. The constructor's arguments are
    the keys of ``model`` in the configuration, and those of :meth:`exp.data.base.Data.model_arguments`.

    Optional members: :meth:`adapt_state_dict` for checkpoints of other projects; ``num_layers`` and ``layer_of(name)``
    for learning rates by depth (see :mod:`exp.engine.optim`); ``sharded_units()`` if ``wrapper=fsdp`` does not find the
    parts to shard (see :func:`exp.engine.fsdp.units_of`).
    """

    user_module: nn.Module | None = None
    """The module of the user's that this model trains, if it only adapts one: messages name its class."""
    loss_is_mean: bool = True
    """Whether the loss is a mean over samples, so that it does not depend on how a batch is split. False for a
    contrastive loss, for example; a user's model is then not checked. A head or loss module may have it, too."""

    all_reduce: Callable[[torch.Tensor], None] | None = None
    """Set by the engine if several ranks train the model; see :meth:`sum_over_ranks`."""
    unverifiable_keys: Sequence[str] = ()
    """Keys of ``model`` that names and shapes of weights cannot confirm, such as the number of heads. If weights come
    without a configuration, the values of these keys are reported to the user."""
    class_rows: Sequence[str] | None = None
    """Names of the tensors with a row per class. A training that starts from weights of other classes, or of the same
    in another order, sorts these rows by name or starts them anew. None: they are found, by building the model for one
    class more (``num_classes``)."""

    def __init__(self) -> None:
        super().__init__(data_preprocessor=_IdentityPreprocessor())

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Rename the weights of a file to this model's names; the caller reports tensors that do not fit.

        Args:
            state: tensors by name.
            source: the file of the weights, for messages.

        Returns:
            All tensors, some with other names.

        Raises:
            ConfigError: the weights are known to be those of another model.
        """
        del source
        return strip_prefix(state, self.state_dict())

    def fit_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Change the shapes of weights to fit a model that will be trained, for example for other input channels.

        Never used for evaluation or prediction: the changed weights are only a starting point.

        Args:
            state: result of :meth:`adapt_state_dict`.
            source: the file of the weights, for messages.
        """
        del source
        return dict(state)

    def no_weight_decay(self) -> Collection[str]:
        """Names of further parameters without weight decay, besides norms, biases and tokens.

        They apply with ``optim.decay_norm_and_bias=false``.
        """
        return ()

    def prepare_training(self) -> None:
        """Create what only a training needs, such as a teacher; called once, before weights are loaded."""

    def start_epoch(self, epoch: int) -> None:
        """Called before each epoch of a training, and when training resumes within an epoch.

        Args:
            epoch: from 0.
        """

    def end_step(self, step: int, total: int) -> None:
        """Called after each optimizer step, for example to move a teacher's weights towards the new ones.

        Args:
            step: optimizer steps completed, from 1.
            total: optimizer steps of the whole training.
        """

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Add up a tensor on the model's device over all ranks of a training, in place, without a gradient.

        For losses that compare samples of the whole batch; every rank must call it. Without other ranks the sum is
        ``value``.
        """
        if self.all_reduce is not None:
            self.all_reduce(value)
        return value

    def is_new_head(self, name: str) -> bool:
        """Whether a training may start with weights that lack this tensor, such as that of a new head.

        Args:
            name: name of a parameter or buffer.
        """
        del name
        return False

    def parse_losses(self, losses: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The total loss to back-propagate, and the values to log.

        The total is the sum of the entries whose names contain ``loss``, as in MMEngine. A single loss, the usual case,
        is returned unchanged; MMEngine's own version launches a mean and an addition for it.

        Args:
            losses: 0-dim tensors by name.

        Returns:
            The total, and ``losses`` with the total under ``"loss"``; no value is read from the device.

        Raises:
            ConfigError: ``losses`` is not a dict, no name contains ``loss``, or a value is not a 0-dim tensor.
        """
        description = f"a {type(losses).__name__}"
        if isinstance(losses, dict):
            only = losses.get("loss") if len(losses) == 1 else None
            if isinstance(only, torch.Tensor) and not only.dim():
                return only, {"loss": only}  # the usual case: nothing to add up
            parts = [value for name, value in losses.items() if "loss" in name]
            if parts and all(isinstance(value, torch.Tensor) and not value.dim() for value in losses.values()):
                total = functools.reduce(operator.add, parts)
                return total, {**losses, "loss": total}
            description = ", ".join(
                f"{name} of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else f"{name}, a {type(loss).__name__}"
                for name, loss in losses.items()
            )
        raise ConfigError(
            f"model: {qualified_name(self)}.forward(..., mode='loss') must give a dict of 0-dim tensors such as "
            f"{{'loss': ...}}, but gives {description}; see {EXPERIMENT_PAGE}"
        )


def strip_prefix(state: Mapping[str, torch.Tensor], model_state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Remove a prefix from the names in ``state``: the prefix under which most names of ``model_state`` are found.

    For example ``model.`` (Lightning), ``encoder.`` or ``teacher.``; any prefix is possible, there is no list.

    Args:
        state: tensors by name.
        model_state: the model's state dict.

    Returns:
        The tensors. Tensors without the prefix keep their names, but are left out if the model has the same name.
    """
    prefixes = most_frequent_prefixes(state, model_state.__contains__)
    prefix = "" if not prefixes or "" in prefixes else best_prefix(prefixes)
    return without_prefix(state, prefix, model_state)


def most_frequent_prefixes(keys: Iterable[str], is_name: Callable[[str], bool]) -> list[str]:
    """The prefixes, empty or up to a dot, under which most keys have names of a model; empty: no key has one.

    Args:
        keys: names of a file's tensors.
        is_name: whether the rest of a key is a name of the model.
    """
    fits: Counter[str] = Counter()
    for key in keys:
        ends = (0, *(end for end, letter in enumerate(key, 1) if letter == "."))
        fits.update(key[:end] for end in ends if is_name(key[end:]))
    most = max(fits.values(), default=0)
    return [prefix for prefix, count in fits.items() if count == most]


def best_prefix(prefixes: Iterable[str]) -> str:
    """Choose one of several models in a file: a teacher or an average of weights (ema) if there is one, then the
    shortest prefix, then the first in alphabetical order.
    """
    return min(prefixes, key=lambda prefix: ("teacher" not in prefix and "ema" not in prefix, len(prefix), prefix))


def without_prefix(state: Mapping[str, torch.Tensor], prefix: str, taken: Container[str]) -> dict[str, torch.Tensor]:
    """The tensors under ``prefix`` without it, and the other tensors under their names, unless ``taken`` has these.

    Args:
        state: tensors by name.
        prefix: ends with a dot, or is empty.
        taken: names that only tensors under the prefix may have.
    """
    inner = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    return {**{key: value for key, value in state.items() if not key.startswith(prefix) and key not in taken}, **inner}
