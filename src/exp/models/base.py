"""The base class of all models: MMEngine's interface without work that our engine has done already."""

from __future__ import annotations

import functools
import operator
from pathlib import Path
from typing import Any, Collection, Container, Iterable, Mapping, Sequence

import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import nn

from exp.errors import EXPERIMENT_PAGE, ConfigError, shown

__all__ = ["Model", "best_prefix", "parameter_counts", "under_own_names", "without_prefix"]


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """``parameters`` and ``trained_parameters``, those that are not frozen; of a sharded model those of all ranks."""
    every = list(model.parameters())
    return {
        "parameters": sum(each.numel() for each in every),
        "trained_parameters": sum(each.numel() for each in every if each.requires_grad),
    }


class _PassThrough(nn.Module):
    """Stands where MMEngine keeps its data preprocessor; the engine has moved the batch to the device already."""

    def forward(self, data: dict[str, torch.Tensor], training: bool = False) -> dict[str, torch.Tensor]:
        """Return ``data`` itself."""
        del training
        return data

    __call__ = forward  # at every step: without the module's own machinery


class Model(BaseModel):
    """A model that MMEngine's Runner, MMDistributedDataParallel and our engine can run.

    Subclasses write ``forward(<keys of the batch>, mode)``; a batch is a dict of tensors and is passed as keyword
    arguments. ``mode`` is one of

    - ``"loss"``: return ``{"loss": <0-dim tensor>}``, or several, whose names contain ``loss`` where they count; other
      entries are only logged;
    - ``"predict"``: return the predictions that the metrics take, and for ``task=predict`` a tensor (B, ...) with a row
      for each sample of the batch;
    - ``"tensor"``: return the network's raw output.

    The batch is on the model's device, and autocast is on where ``precision`` asks for it. The constructor's arguments
    are the keys of ``model`` in the configuration, and those of :meth:`exp.data.base.Data.model_arguments`.

    A class that knows foreign checkpoints overrides :meth:`adapt_state_dict`; one whose learning rates may differ by
    depth has ``num_layers`` and ``layer_of(name)`` (see :mod:`exp.engine.optim`); one whose parts ``wrapper=fsdp`` does
    not find has ``sharded_units()`` (see :func:`exp.engine.fsdp.units_of`).
    """

    taken_on_trust: Sequence[str] = ()
    """Keys of ``model`` that matter and that neither names nor shapes of weights tell, such as the number of heads: for
    files without a configuration it is said which values are taken."""

    def __init__(self) -> None:
        super().__init__(data_preprocessor=_PassThrough())

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """The weights of a file under this model's names; what does not fit is left for the caller to find.

        Args:
            state: tensors by name.
            source: the file that they come from, for messages.

        Returns:
            All tensors, some of them by other names.

        Raises:
            ConfigError: they are known to be another model's.
        """
        del source
        return under_own_names(state, self.state_dict())

    def fit_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Adapted weights made to fit a model that is about to be trained, such as one for other channels.

        Never for evaluation or prediction: what is made here is a beginning, not what the weights were trained as.

        Args:
            state: of :meth:`adapt_state_dict`.
            source: the file that they come from, for messages.
        """
        del source
        return dict(state)

    def no_weight_decay(self) -> Collection[str]:
        """Parameters that are no weights besides norms, biases and tokens, for ``optim.decay_norm_and_bias=false``."""
        return ()

    def start_epoch(self, epoch: int) -> None:
        """Called before each epoch of a training, and when one goes on in the middle of an epoch.

        Args:
            epoch: from 0.
        """

    def may_start_anew(self, name: str) -> bool:
        """Whether a training may begin with weights that lack this tensor: true for a head, on top of what is known.

        Args:
            name: of a parameter or buffer.
        """
        del name
        return False

    def train_step(self, data: dict[str, torch.Tensor], optim_wrapper: OptimWrapper) -> dict[str, torch.Tensor]:
        """Forward, backward and update on one batch that lies on the model's device.

        Returns:
            The losses by name, still on the device.
        """
        with optim_wrapper.optim_context(self):
            losses = self(**self.data_preprocessor(data, True), mode="loss")
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars

    def val_step(self, data: dict[str, torch.Tensor]) -> Any:
        """Predictions for one batch."""
        return self(**self.data_preprocessor(data, False), mode="predict")

    def test_step(self, data: dict[str, torch.Tensor]) -> Any:
        """Predictions for one batch."""
        return self(**self.data_preprocessor(data, False), mode="predict")

    def parse_losses(self, losses: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The total to back-propagate, and what to log.

        The total is the sum of the entries whose name contains ``loss``, as everywhere in MMEngine. One 0-dim loss,
        the usual case, is passed on as it is: MMEngine's own version launches a mean and an addition for it.

        Args:
            losses: 0-dim tensors by name.

        Returns:
            The total, and ``losses`` with the total under ``"loss"``; nothing is read from the device.

        Raises:
            ConfigError: it is no dict, no name contains ``loss``, or a value is not a 0-dim tensor.
        """
        found = f"a {type(losses).__name__}"
        if isinstance(losses, dict):
            if len(losses) == 1 and "loss" in losses and not losses["loss"].dim():
                return losses["loss"], {"loss": losses["loss"]}  # the usual case, at every step: nothing to add up
            parts = [value for name, value in losses.items() if "loss" in name]
            if parts and all(isinstance(value, torch.Tensor) and not value.dim() for value in losses.values()):
                total = functools.reduce(operator.add, parts)
                return total, {**losses, "loss": total}
            found = ", ".join(f"{name} of shape {tuple(getattr(each, 'shape', ()))}" for name, each in losses.items())
        raise ConfigError(
            f"model: {shown(self)}.forward(..., mode='loss') must give a dict of 0-dim tensors such as "
            f"{{'loss': ...}}, but gives {found}; see {EXPERIMENT_PAGE}"
        )


def under_own_names(state: Mapping[str, torch.Tensor], own: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """``state`` without the path before the names of ``own``, if most of these are found under one.

    Such are ``model.`` (Lightning), ``encoder.`` or ``teacher.``: any path counts, and none has to be known here.

    Args:
        state: tensors by name.
        own: the model's state dict.

    Returns:
        All tensors; those that are not under the path keep their names, as far as the model has not the same.
    """
    paths = {key[:end] for key in state for end, letter in enumerate(key, 1) if letter == "."}
    fits = {path: sum(path + name in state for name in own) for path in ("", *paths)}
    most = max(fits.values())
    return without_prefix(state, "" if fits[""] == most else best_prefix(p for p in fits if fits[p] == most), own)


def best_prefix(prefixes: Iterable[str]) -> str:
    """Of several models in one file a teacher or an average of weights, which evaluation takes; else the first."""
    return min(prefixes, key=lambda prefix: ("teacher" not in prefix and "ema" not in prefix, len(prefix), prefix))


def without_prefix(state: Mapping[str, torch.Tensor], prefix: str, taken: Container[str]) -> dict[str, torch.Tensor]:
    """The tensors under ``prefix`` by the rest of their names, and the others as they are, but for names in ``taken``.

    Args:
        state: tensors by name.
        prefix: ends with a dot, or is empty.
        taken: names that only tensors under the prefix may have.
    """
    inner = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    return {**{key: value for key, value in state.items() if not key.startswith(prefix) and key not in taken}, **inner}
