"""The optimizer of a training, and its parameter groups.

:class:`BackendOptimWrapper` is MMEngine's OptimWrapper with the backend's autocast and loss scaler, and without waiting
for the device.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Callable, Collection, ContextManager, Iterator, Mapping

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIMIZERS
from omegaconf import OmegaConf
from torch import nn

from exp.config.resolve import check_arguments
from exp.data.fingerprint import shortened
from exp.engine.mmengine import lookup_class
from exp.errors import ConfigError, RunError
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from exp.engine.rank_times import RankTimes
    from exp.engine.replay import StepReplay
    from exp.hardware.backend import Backend


_UNDECAYED = ("bias", "token", "tokens")  # ends of names without weight decay, also for parameters with several axes
_SET_ELSEWHERE = {
    "params": "exp sets it",
    "lr": "set optim.lr",
    "weight_decay": "set optim.weight_decay",
}  # arguments of optimizers
_IMPLEMENTATIONS = ("foreach", "fused")  # implementations of a step in torch's optimizers, which give the same result


def grad_scaler(backend: Backend, precision: str) -> Any | None:
    """A loss scaler with the interface of ``torch.amp.GradScaler``; None if ``precision`` needs none.

    The vendor's scaler if ``torch.<device_type>.amp`` has one, because some cards report overflow in their own way.
    """
    if precision != "fp16":
        return None
    vendor_scaler = getattr(getattr(backend.torch_module, "amp", None), "GradScaler", None)
    torch_scaler: Any = getattr(torch.amp, "GradScaler", None)  # torch >= 2.3
    if vendor_scaler is not None and (torch_scaler is None or not vendor_scaler.__module__.startswith("torch.")):
        return vendor_scaler()
    return torch_scaler(backend.device_type)


class _ScaledOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is done by a loss scaler, which skips it if gradients are not finite.

    :meth:`exp.hardware.backend.Backend.end_step` takes it like any optimizer, so that a lazy device also ends its graph
    after a skipped step. All other attributes are those of the wrapped optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self._optimizer, self._scaler = optimizer, scaler  # no super().__init__(): the state is in the other optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Step unless a gradient has overflowed, and update the scale of the losses."""
        loss = self._scaler.step(self._optimizer, **kwargs)
        self._scaler.update()
        return loss


class BackendOptimWrapper(OptimWrapper):
    """Mixed precision, gradient accumulation and clipping for any backend.

    MMEngine's AmpOptimWrapper supports the devices of four vendors, and the loss scaler of one; this class uses the
    backend's. The gradient norm stays on the device, in :attr:`grad_norm`, instead of being read at every step.

    Args:
        optimizer: a torch optimizer.
        backend: has autocast, the loss scaler and ``end_step``.
        precision: one of :data:`exp.config.schema.PRECISIONS`.
        accumulate: micro-batches per optimizer step.
        clip_grad_norm: largest L2 norm of all gradients together; None: no clipping.
        model: the trained model, for lazy devices; None: not known.
        awaited: parameters by name whose gradients the backward pass exchanges with other ranks, which wait for them
            (:func:`exp.engine.wrapper.awaited_parameters`).
        loss_weight: samples of this rank as a multiple of the mean over ranks; each loss is multiplied by it, so that
            the mean of the gradients over ranks is the mean over samples.

    Attributes:
        exchange_gradients: averages the gradients of a step over the ranks, if the backward pass does not do it.
        during_backward: context of each backward pass.
        rank_times: measures the backward passes; None: nothing does.
        replay: computes some steps again before their gradients are exchanged; None: nothing does.
        before_clipping: functions that are called before each step, in this order, when the gradients are complete and
            unscaled, and not yet clipped.
        after_clipping: likewise, when they are clipped, just before the optimizer uses them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        model: nn.Module | None = None,
        awaited: Mapping[str, nn.Parameter] | None = None,
        loss_weight: float = 1.0,
    ) -> None:
        super().__init__(optimizer, accumulative_counts=accumulate)
        self.backend = backend
        self.model = model
        self.precision = precision
        self.accumulate = accumulate
        self.loss_weight = loss_weight
        self.scaler = grad_scaler(backend, precision)
        self._step_target = optimizer if self.scaler is None else _ScaledOptimizer(optimizer, self.scaler)
        self.clip_grad_norm = clip_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self.exchange_gradients: Callable[[], None] | None = None
        self.during_backward: Callable[[], ContextManager[object]] = contextlib.nullcontext
        self.rank_times: RankTimes | None = None
        self.replay: StepReplay | None = None
        self.before_clipping: list[Callable[[], object]] = []
        self.after_clipping: list[Callable[[], object]] = []
        self._losses: list[torch.Tensor] = []
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._updates, self._counted = 0, (0, 0)
        self._awaited = dict(awaited or {})
        self._arrived: set[str] = set()  # names of parameters with a gradient in this backward pass
        for name, parameter in self._awaited.items() if accumulate > 1 else ():  # else it is seen by their gradients
            parameter.register_hook(functools.partial(self._arrive, name))

    def __getitem__(self, name: str) -> Any:
        """Refuse what MMEngine has for several optimizers.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"model: train_step asks for the optimizer '{name}', and exp trains with one optimizer: use optim_wrapper "
            "itself, for example with requires_grad_(False) for the parameters that an update must not change"
        )

    def _arrive(self, name: str, _gradient: torch.Tensor) -> None:
        self._arrived.add(name)

    def count(self) -> tuple[int, int]:
        """Number of backward passes and of updates since the last call."""
        (passes, updates), self._counted = self._counted, (self.inner_count, self._updates)
        return self._counted[0] - passes, self._counted[1] - updates

    def optim_context(self, model: nn.Module) -> ContextManager[None]:
        """Context of a forward pass: autocast, and no gradient exchange before the last micro-batch of a step."""
        autocast = self.backend.autocast(self.precision)
        return autocast if self.should_sync() else self._without_exchange(model, autocast)

    @contextlib.contextmanager
    def _without_exchange(self, model: nn.Module, autocast: ContextManager[None]) -> Iterator[None]:
        with super().optim_context(model), autocast:
            yield

    def update_params(
        self, loss: torch.Tensor, step_kwargs: dict[str, Any] | None = None, zero_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Backward pass of one micro-batch; after the last one of a step, also the step, which clears the gradients.

        Args:
            loss: the mean loss of the micro-batch, 0-dim.
            step_kwargs: arguments of :meth:`step`.
            zero_kwargs: arguments of the optimizer's ``zero_grad``.
        """
        if self.replay is not None:
            self.replay.watch(loss)
        self._losses.append(loss.detach())  # detached, so that the graph is freed after the micro-batch
        if self.accumulate > 1:
            loss = loss / self.accumulate
        self.backward(loss)
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward pass; with fp16 of the scaled loss.

        Args:
            loss: 0-dim, divided by the number of micro-batches.
            **kwargs: of :meth:`torch.Tensor.backward`.

        Raises:
            RunError: a parameter got no gradient, and the other ranks wait for it.
        """
        report_stage(Stage.BACKWARD)
        if self.loss_weight != 1.0:
            loss = loss * self.loss_weight
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.accumulate > 1:
            self._arrived.clear()
        times = self.rank_times
        if times is not None:
            times.start("backward")
        with self.during_backward():
            super().backward(loss, **kwargs)
        if times is not None:
            times.end_backward()
        if self._awaited and self.should_update():
            self._check_gradients()

    def _check_gradients(self) -> None:
        """Refuse a parameter without a gradient, before this rank waits for ranks that wait for the gradient.

        Raises:
            RunError: there is one; the message has the parameters.
        """
        if self.accumulate > 1:
            missing = [name for name in self._awaited if name not in self._arrived]
        else:
            missing = [name for name, parameter in self._awaited.items() if parameter.grad is None]
        if missing:
            step = -(-self.inner_count // self.accumulate)
            raise RunError(
                f"no gradient on this rank in step {step} for {shortened(missing)}, and other ranks wait for it; set "
                "wrapper.find_unused_parameters=true if a step may leave parameters unused"
            )

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients, and step by the backend; a loss scaler skips the step if gradients overflow (fp16)."""
        if self.replay is not None:
            self.replay.check()
        if self.exchange_gradients is not None:
            self.exchange_gradients()
        if self.scaler is not None and (self.before_clipping or self.after_clipping or self.clip_grad_norm is not None):
            self.scaler.unscale_(self.optimizer)
        for function in self.before_clipping:
            function()
        if self.clip_grad_norm is not None:
            norm: Any = nn.utils.clip_grad_norm_(self._parameters, self.clip_grad_norm)
            self.grad_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of all shards together
        for function in self.after_clipping:
            function()
        outputs = self._losses if self.grad_norm is None else [*self._losses, self.grad_norm]
        self.backend.end_step(self._step_target, model=self.model, outputs=outputs, **kwargs)
        self._losses = []
        self._updates += 1

    def zero_grad(self, **kwargs: Any) -> None:
        """Set all gradients to None, which launches no kernel.

        Torch's own method opens a profiler range, which takes twenty times as long for a few parameters. If the
        optimizer has its own method, or there are arguments, the optimizer's method is called.
        """
        if kwargs or type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            kwargs.setdefault("set_to_none", True)
            self.optimizer.zero_grad(**kwargs)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with that of the loss scaler under ``loss_scaler``."""
        state = dict(self.optimizer.state_dict())
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`, which may come from another type of device.

        The settings ``foreach`` and ``fused`` are kept as they are here, since devices support different ones.
        """
        state = dict(state_dict)
        scaler = state.pop("loss_scaler", None)
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(scaler)
        saved = state["param_groups"]
        implementations = [
            {name: group[name] for name in _IMPLEMENTATIONS if name in group} for group in self.optimizer.param_groups
        ]
        implementations += [
            {} for _ in saved[len(implementations) :]
        ]  # more groups mean another model; torch reports that below
        state["param_groups"] = [{**group, **implementation} for group, implementation in zip(saved, implementations)]
        self.optimizer.load_state_dict(state)


class BackwardOnly:
    """Stands in for the optimizer wrapper in a model's ``train_step``: makes backward passes, and no update.

    Args:
        forward_context: makes the context of a forward pass.
        backward_context: makes the context of a backward pass.
        backward: makes the backward pass of a loss.

    Attributes:
        share: factor of each loss.
        losses: the losses so far, times their factors; 0-dim tensors.
    """

    def __init__(
        self,
        forward_context: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
        backward_context: Callable[[], ContextManager[Any]] = contextlib.nullcontext,
        backward: Callable[..., object] = torch.Tensor.backward,
    ) -> None:
        self._forward_context, self._backward_context, self._backward = forward_context, backward_context, backward
        self.share = 1.0
        self.losses: list[torch.Tensor] = []
        self.scale_loss = lambda loss: loss  # a user's train_step may call it

    def optim_context(self, model: nn.Module) -> ContextManager[Any]:
        """Context of a forward pass."""
        return self._forward_context()

    def update_params(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        """Make the backward pass."""
        self.backward(loss)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Make the backward pass."""
        loss = loss if self.share == 1.0 else loss * self.share
        self.losses.append(loss.detach())
        with self._backward_context():
            self._backward(loss, **kwargs)

    def step(self, **_: Any) -> None:
        """Make no update."""

    zero_grad = step


def build_optimizer(
    model: nn.Module, config: Any, missing_operators: Collection[str] = frozenset()
) -> torch.optim.Optimizer:
    """Make the optimizer of ``config`` for the trainable parameters of a model.

    Args:
        model: the model, not wrapped.
        config: :class:`exp.config.schema.OptimConfig`.
        missing_operators: ATen operators without a kernel on the device (:class:`exp.hardware.backend.Capabilities`).
            If the fused step is one of them, ``fused=true`` selects the foreach step, which gives the same result.

    Raises:
        ConfigError: the type or an option is unknown, or no parameter is trainable.
        UnavailableError: the module of the type cannot be imported.
    """
    cls = lookup_class("optim.type", config.type, OPTIMIZERS, torch.optim.Optimizer)
    content: Any = OmegaConf.to_container(config.options, resolve=True)
    # As types that checkpoints can contain; lists, such as Adam's betas, become tuples.
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    if options.get("fused") and f"_fused_{config.type.lower()}_" in missing_operators:
        options.update(fused=False, foreach=True)
    check_arguments("optim.options", cls, options, _SET_ELSEWHERE)
    groups = parameter_groups(model, config)
    try:
        optimizer: torch.optim.Optimizer = cls(groups, lr=config.lr, weight_decay=config.weight_decay, **options)
        return optimizer
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim: {config.type} does not take these settings: {error}") from error


def parameter_groups(model: nn.Module, config: Any) -> list[dict[str, Any]]:
    """Group the trainable parameters by learning rate and weight decay, with the largest learning rate first.

    Layer ``i`` of a backbone with ``n`` layers has the learning rate ``lr * backbone_lr_scale * layer_decay**(n-1-i)``
    (Bao et al., BEiT, arXiv 2106.08254).

    Args:
        model: the model, not wrapped. For learning rates by layer it needs ``num_layers`` and ``layer_of(name)``, which
            returns ``i`` for a parameter of the backbone, and None for others.
        config: :class:`exp.config.schema.OptimConfig`.

    Returns:
        Parameter groups for a torch optimizer.

    Raises:
        AttributeError: learning rates depend on the layer and the model has no ``layer_of``.
    """
    by_depth = config.backbone_lr_scale != 1.0 or config.layer_decay != 1.0
    left_out = set(getattr(model, "no_weight_decay", tuple)())
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = 1.0
        layer = model.layer_of(name) if by_depth else None  # type: ignore[operator]
        if layer is not None:
            scale = config.backbone_lr_scale * config.layer_decay ** (model.num_layers - 1 - layer)  # type: ignore[operator]
        decays = config.decay_norm_and_bias or (
            parameter.dim() > 1 and not name.endswith(_UNDECAYED) and name not in left_out
        )
        groups.setdefault((scale, decays), []).append(parameter)
    result = []
    for (scale, decays), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        group: dict[str, Any] = {"params": parameters}
        if scale != 1.0:
            group["lr"] = config.lr * scale
        if not decays:
            group["weight_decay"] = 0.0
        result.append(group)
    return result
