"""The interface of wrappers, which make a model data-parallel, and a training step through a wrapped model."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Mapping

import torch
from mmengine.model import BaseModel
from torch import nn

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

_SHARDED_MARK = "weights_are_sharded"


class Wrapper(abc.ABC):
    """The base class of wrappers, which make a model data-parallel.

    A configuration names a subclass in ``wrapper._target_``; its constructor's arguments are the keys of
    ``wrapper.options``. If ``compile`` is one of them, :meth:`move_to_device` compiles the model; else the whole model
    is compiled before. In a training with several ranks, each rank makes one object, and calls its
    :meth:`move_to_device` and then its :meth:`wrap`, each once.
    """

    def move_to_device(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """Move the model to its device, before the optimizer is built; parameters may be replaced by other objects.

        Args:
            model: on the CPU, with the same weights on every rank.
            backend: see :meth:`wrap`.
            device: the device of this rank.

        Returns:
            The model on the device.
        """
        del backend
        return model.to(device)

    @abc.abstractmethod
    def wrap(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """Wrap the model for training: the backward pass or ``train_step`` must average gradients over all ranks.

        Args:
            model: on ``device``, with the same weights on every rank.
            backend: has ``collectives.ddp_class``; use the collectives of ``torch.distributed``.
            device: the device of this rank.

        Returns:
            A module with the model as ``module``, and ``train_step(data, optim_wrapper)``, as :class:`TrainStep` has it
            and :func:`exp.engine.ddp.wrap` returns it for DDP; or the model itself, for example with hooks on its
            gradients. Checkpoints contain the weights of the model alone, and evaluation uses the model without the
            wrapper. For a model with a ``train_step`` of its own the module also needs ``exchange_gradients()``, which
            averages the gradients before each update; see :class:`TrainStep`.
        """


def has_own_step(model: nn.Module) -> bool:
    """Whether a model defines how it is trained: MMEngine's ``train_step``, or the forward pass within it."""
    methods = {name: getattr(model, name, None) for name in ("train_step", "_run_forward")}
    return any(
        method is not None and getattr(method, "__func__", None) is not getattr(BaseModel, name)
        for name, method in methods.items()
    )


class TrainStep:
    """Mixin with the ``train_step`` that the training loop calls, for a wrapper class with the model as ``module``.

    If the class has ``exchange_gradients()``, it is called before each update of the weights, to average the gradients
    over the ranks. Then a model's own ``train_step`` is used instead of this one.
    """

    module: nn.Module

    def train_step(self: Any, data: dict[str, torch.Tensor], optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Forward pass through the wrapper, whose hooks act in the backward pass; then backward pass and update.

        Args:
            data: a batch on the device.
            optim_wrapper: the :class:`exp.engine.optim.BackendOptimWrapper`.

        Returns:
            The losses by name, 0-dim tensors on the device.
        """
        optim_wrapper.exchange_gradients = getattr(self, "exchange_gradients", None)
        if optim_wrapper.exchange_gradients is not None and has_own_step(self.module):
            losses = self.module.train_step(data, optim_wrapper)
            getattr(self, "end_step", lambda: None)()
            return losses  # type: ignore[no-any-return]
        with optim_wrapper.optim_context(self):
            losses = forward(self, preprocessed(self.module, data, training=True), "loss")
        log_vars: dict[str, torch.Tensor]
        loss, log_vars = self.module.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars


def preprocessed(model: nn.Module, data: Any, training: bool = False) -> Any:
    """Apply the model's ``data_preprocessor`` (MMEngine) to a batch, if the model has one.

    Args:
        model: the model, not wrapped.
        data: a batch on the model's device.
        training: passed to the preprocessor, which may augment in training.

    Returns:
        The arguments of the model's ``forward``.
    """
    preprocessor: Any = getattr(model, "data_preprocessor", None)
    return data if preprocessor is None else preprocessor(data, training)


def forward(model: nn.Module, data: Any, mode: str) -> Any:
    """Call a model or its wrapper with a preprocessed batch: a mapping as keyword arguments, else positional ones."""
    return model(**data, mode=mode) if isinstance(data, Mapping) else model(*data, mode=mode)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a wrapper; a model that is not wrapped is returned unchanged."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is sharded over the ranks, so that every forward pass is a collective."""
    return bool(getattr(model, _SHARDED_MARK, False))
