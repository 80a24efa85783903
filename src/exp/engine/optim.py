"""MMEngine's OptimWrapper over the backend's autocast and loss scaler, without a device synchronisation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Collection, ContextManager, Iterator

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIMIZERS
from omegaconf import OmegaConf
from torch import nn

from exp.engine.fsdp import clip_grad_norm
from exp.engine.registries import registered
from exp.errors import ConfigError
from exp.hardware.backend import FLOAT32
from exp.hardware.numerics import grad_scaler
from exp.models.dropout import backward_begins
from exp.runs.status import Stage, beat

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = ["BackendOptimWrapper", "build_optimizer", "parameter_groups"]

_NOTHING: ContextManager[Any] = contextlib.nullcontext()
_UNDECAYED = ("bias", "token", "tokens")  # ends of names, of parameters with several axes, too
_FORMS = ("foreach", "fused")  # of one step of torch's optimizers, with the same numbers


class _ScaledOptimizer(torch.optim.Optimizer):
    """An optimizer whose step is the loss scaler's, which leaves it out where gradients are not finite.

    The backend ends every step, so that a lazy device's graph ends with one that was left out, too. Everything but the
    step is the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self._optimizer, self._scaler = optimizer, scaler  # without the base class's: there is one state only

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.__getstate__()
        return state

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Take the step unless a gradient overflowed, and adapt the scale of the losses."""
        if closure is not None:
            kwargs["closure"] = closure  # which scalers refuse
        loss = self._scaler.step(self._optimizer, **kwargs)
        self._scaler.update()
        return loss


class BackendOptimWrapper(OptimWrapper):
    """Mixed precision, gradient accumulation and clipping for any backend.

    MMEngine's AmpOptimWrapper admits four vendors and one vendor's scaler; this one asks the backend. The gradient norm
    stays on the device in :attr:`grad_norm` instead of being read at every step.

    Args:
        optimizer: a torch optimizer.
        backend: gives autocast, loss scaler and the step itself.
        precision: one of :data:`exp.hardware.backend.PRECISIONS`.
        accumulate: micro-batches per optimizer step.
        clip_grad_norm: largest L2 norm of all gradients, or None.
        model: what is trained, for lazy devices; None: not known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        backend: Backend,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_grad_norm: float | None = None,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__(optimizer, accumulative_counts=accumulate)
        self.backend = backend
        self.model = model
        self.precision = precision
        self.accumulate = accumulate
        self.scaler = grad_scaler(backend, precision)
        self._stepper = optimizer if self.scaler is None else _ScaledOptimizer(optimizer, self.scaler)
        self.clip_grad_norm = clip_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self.exchange_gradients: Callable[[], None] | None = None
        """Averages the gradients of a step over the ranks, where the backward pass has not done so."""
        self.before_step: Callable[[], None] | None = None
        """Called with all gradients in place, unscaled, before they are clipped."""
        self._losses: list[torch.Tensor] = []
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        rates = [group["lr"] for group in optimizer.param_groups]
        self._logged = rates.index(optimizer.defaults["lr"]) if optimizer.defaults["lr"] in rates else 0

    @property
    def learning_rate(self) -> float:
        """The present rate of the parameters that began with the optimizer's own; the first group's where none did."""
        rate: float = self.optimizer.param_groups[self._logged]["lr"]
        return rate

    def optim_context(self, model: nn.Module) -> ContextManager[Any]:
        """Autocast, and no gradient exchange before the last micro-batch of a step."""
        if self.precision in FLOAT32 and self.accumulate == 1:
            return _NOTHING
        return self._optim_context(model)

    @contextlib.contextmanager
    def _optim_context(self, model: nn.Module) -> Iterator[None]:
        with super().optim_context(model), self.backend.autocast(self.precision):
            yield

    def update_params(
        self, loss: torch.Tensor, step_kwargs: dict[str, Any] | None = None, zero_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Back-propagate one micro-batch's mean loss; step and clear gradients after the last one of a step."""
        beat(Stage.BACKWARD)
        self._losses.append(loss.detach())  # its graph must not outlive its micro-batch
        if self.accumulate > 1:
            loss = loss / self.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        backward_begins()
        self.backward(loss)
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def step(self, **kwargs: Any) -> None:
        """Clip, and have the backend end the step; with a loss scaler it is skipped where fp16 gradients overflow."""
        if self.exchange_gradients is not None:
            self.exchange_gradients()
        if self.scaler is not None and (self.before_step is not None or self.clip_grad_norm is not None):
            self.scaler.unscale_(self.optimizer)
        if self.before_step is not None:
            self.before_step()
        if self.clip_grad_norm is not None:
            if hasattr(self._parameters[0], "full_tensor"):
                self.grad_norm = clip_grad_norm(self._parameters, self.clip_grad_norm, self.backend)
            else:
                self.grad_norm = nn.utils.clip_grad_norm_(self._parameters, self.clip_grad_norm)
        outputs = self._losses if self.grad_norm is None else [*self._losses, self.grad_norm]
        self.backend.end_step(self._stepper, model=self.model, outputs=outputs, **kwargs)
        self._losses = []

    def zero_grad(self, **kwargs: Any) -> None:
        """Drop the gradients (set_to_none: no kernel is launched).

        Torch's own method opens a profiler range around that, which takes twenty times as long as dropping a few. One
        that an optimizer brings itself is called.
        """
        if kwargs or type(self.optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
            kwargs.setdefault("set_to_none", True)
            self.optimizer.zero_grad(**kwargs)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and the loss scaler's under ``loss_scaler``."""
        state = dict(self.optimizer.state_dict())
        if self.scaler is not None:
            state["loss_scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, on whatever device that was: how steps are computed is this one's."""
        state = dict(state_dict)
        scaler = state.pop("loss_scaler", None)
        if self.scaler is not None and scaler is not None:
            self.scaler.load_state_dict(scaler)
        saved = state["param_groups"]
        own = [{name: group[name] for name in _FORMS if name in group} for group in self.optimizer.param_groups]
        own += [{} for _ in saved[len(own) :]]  # of another model: torch says so
        state["param_groups"] = [{**group, **form} for group, form in zip(saved, own)]
        self.optimizer.load_state_dict(state)


def _plain(options: Any) -> dict[str, Any]:
    """Options as Python's own types, which checkpoints can hold; pairs such as Adam's betas as tuples."""
    content: Any = OmegaConf.to_container(OmegaConf.create(options), resolve=True)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def build_optimizer(model: nn.Module, config: Any, lacking: Collection[str] = frozenset()) -> torch.optim.Optimizer:
    """The optimizer of ``config`` over the trainable parameters.

    Args:
        model: its trainable parameters.
        config: :class:`exp.config.schema.OptimConfig`.
        lacking: ATen operators that the device has no kernel for
            (:class:`exp.hardware.backend.Capabilities`).
            Where the fused step is one of them, ``fused=true`` gives the foreach step, whose numbers are the same.

    Raises:
        ConfigError: its type or one of its options is unknown, nothing is trainable, or learning rates are to differ by
            depth and the model does not tell its layers.
    """
    cls = registered("optim.type", config.type, OPTIMIZERS, torch.optim.Optimizer)
    options = _plain(config.options)
    if options.get("fused") and f"_fused_{config.type.lower()}_" in lacking:
        options.update(fused=False, foreach=True)
    groups = parameter_groups(model, config)
    try:
        made: torch.optim.Optimizer = cls(groups, lr=config.lr, weight_decay=config.weight_decay, **options)
        return made
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optim: {config.type} does not take these settings: {error}") from error


def parameter_groups(model: nn.Module, config: Any) -> list[dict[str, Any]]:
    """Parameters that share learning rate and weight decay, those with the full learning rate first.

    Layer ``i`` of a backbone of ``n`` layers learns with ``lr * backbone_lr_scale * layer_decay**(n - 1 - i)`` (BEiT,
    arXiv 2106.08254).

    Args:
        model: its parameters that are trained.
        config: :class:`exp.config.schema.OptimConfig`.

    Raises:
        ConfigError: there are none, or learning rates are to differ by depth and the model does not tell its layers.
    """
    by_depth = config.backbone_lr_scale != 1.0 or config.layer_decay != 1.0
    if by_depth and not hasattr(model, "layer_of"):
        raise ConfigError(
            f"optim.backbone_lr_scale={config.backbone_lr_scale} and optim.layer_decay={config.layer_decay} are for "
            f"models with a backbone, and {type(model).__name__} has none; leave them at 1"
        )
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
    if not groups:
        raise ConfigError("no parameter of the model is trainable; set model.freeze to less")
    result = []
    for (scale, decays), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True):
        group: dict[str, Any] = {"params": parameters}
        if scale != 1.0:
            group["lr"] = config.lr * scale
        if not decays:
            group["weight_decay"] = 0.0
        result.append(group)
    return result
