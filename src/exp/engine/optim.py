"""The optimizer of a training, its groups of parameters, and the schedules of their rates.

MMEngine's OptimWrapper over the backend's autocast and loss scaler, without a device synchronization; MMEngine's
schedulers and torch's OneCycleLR, over groups that learn at different rates.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Collection, ContextManager, Iterator, Mapping, Sequence

import torch
from mmengine.optim import OptimWrapper, PolyLR
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.momentum_scheduler import MomentumSchedulerMixin
from mmengine.registry import OPTIMIZERS, PARAM_SCHEDULERS
from omegaconf import OmegaConf
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from exp.engine.fsdp import clip_grad_norm
from exp.engine.registries import check_monitor, registered
from exp.errors import ConfigError, first_line
from exp.hardware.backend import FLOAT32
from exp.hardware.numerics import grad_scaler
from exp.runs.status import Stage, beat

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = [
    "BackendOptimWrapper", "PolyLRByGroup", "TorchOneCycle", "build_optimizer", "build_schedulers", "parameter_groups",
]  # fmt: skip

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
        self.before_backward: Callable[[], None] | None = None
        """Called after the forward pass of each micro-batch."""
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
        if self.before_backward is not None:
            self.before_backward()
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


_SCHEDULERS = (LRSchedulerMixin, MomentumSchedulerMixin)


@PARAM_SCHEDULERS.register_module(force=True)
class TorchOneCycle:
    """Torch's own OneCycleLR as an MMEngine parameter scheduler, by step.

    MMEngine's OneCycleLR leaves the momentum alone; torch's cycles it against the learning rate (Smith and Topin,
    arXiv 1708.07120), for Adam its first beta. Published results that name OneCycleLR mean torch's.

    Groups keep the ratio of their rates: one that begins at a tenth of the optimizer's learning rate (``layer_decay``,
    ``backbone_lr_scale``) rises to a tenth of ``eta_max``. Momentum is the same in all of them.

    Args:
        optimizer: given by the engine.
        eta_max: largest learning rate, of a group with the optimizer's own.
        total_steps: steps of the whole cycle; None: ``end``.
        pct_start: part of them in which the rate rises.
        end: of the training, where MMEngine's schedulers end.
        cycle_momentum: cycle the momentum against the rate.
        by_epoch: false: there is no cycle by epoch.

    Raises:
        ValueError: the optimizer has no momentum to cycle, or ``by_epoch`` is set.
    """

    by_epoch = False

    def __init__(
        self,
        optimizer: Any,
        eta_max: float,
        total_steps: int | None = None,
        pct_start: float = 0.3,
        end: int | None = None,
        cycle_momentum: bool = True,
        by_epoch: bool = False,
    ) -> None:
        if by_epoch:
            raise ValueError("there is no cycle by epoch; set by_epoch: false")
        inner = _inner(optimizer)
        self._scheduler = OneCycleLR(
            inner,
            max_lr=[eta_max * scale for scale in _scales(inner)],
            total_steps=total_steps or end,
            pct_start=pct_start,
            cycle_momentum=cycle_momentum,
        )

    def step(self) -> None:
        """One optimizer step has been taken."""
        self._scheduler.step()

    def state_dict(self) -> dict[str, int]:
        """The position alone: rates and momenta are in the optimizer's own state, the rest is configuration."""
        return {"last_epoch": self._scheduler.last_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the position of ``state_dict``."""
        self._scheduler.last_epoch = state_dict["last_epoch"]


@PARAM_SCHEDULERS.register_module(force=True)
class PolyLRByGroup(PolyLR):
    """MMEngine's PolyLR, at whose end groups of parameters keep the ratio of their rates.

    Args:
        optimizer: given by the engine.
        eta_min: learning rate at the end, of a group with the optimizer's own.
        **options: of PolyLR.
    """

    def __init__(self, optimizer: Any, *, eta_min: float, **options: Any) -> None:
        self._ends = [eta_min * scale for scale in _scales(_inner(optimizer))]
        super().__init__(optimizer, eta_min=0.0, **options)  # which takes the first step

    def step(self) -> None:
        """To ``(lr - end) * c + end``, where MMEngine's makes ``lr * c`` of a rate that ends at zero."""
        before = [group["lr"] for group in self.optimizer.param_groups]
        super().step()
        for group, rate, end in zip(self.optimizer.param_groups, before, self._ends):
            group["lr"] += end * (1 - group["lr"] / rate) if rate else 0.0


def build_schedulers(configs: Sequence[Mapping[str, Any]], runner: Any) -> list[Any]:
    """The parameter schedulers of a training; one that begins after its end is left out.

    An epoch is its optimizer steps. ``end``, ``T_max`` and ``total_steps`` that are null or left out are the training's
    length: in steps, if ``by_epoch`` is false.

    Args:
        configs: each has ``type``, a registered name or a dotted path, and arguments.
        runner: has ``optim_wrapper``, ``train_loop``, ``val_loop`` and ``session``.

    Raises:
        ConfigError: one is unknown, does not take its settings, or looks at a metric that is not measured.
    """
    built, loop = [], runner.train_loop
    for each in configs:
        config = {name: value for name, value in each.items() if value is not None}
        kind = str(config.get("type"))
        cls = registered("schedule.param_scheduler.type", kind, PARAM_SCHEDULERS, _SCHEDULERS)
        by_epoch = config.get("by_epoch", getattr(cls, "by_epoch", True))
        end = config.setdefault("end", loop.max_epochs if by_epoch else loop.max_iters)
        begin = config.get("begin", 0)
        if begin >= end:
            continue
        in_steps = config.get("convert_to_iter_based", False) or not by_epoch
        if (
            cls.__name__.startswith("Linear")
            and (end - begin) * (loop.steps_per_epoch if in_steps and by_epoch else 1) == 1
        ):
            if in_steps and config.get("end_factor", 1) == 1:
                continue  # a warm-up of one step is none
            raise ConfigError(
                f"schedule: {kind} from begin={begin} to end={end} takes one {'epoch' if by_epoch else 'step'}, and "
                f"MMEngine's then stays at its start_factor for ever; set end={begin + 2} or more, or "
                "convert_to_iter_based: true"
            )
        evaluator = getattr(runner.val_loop, "evaluator", None)
        if getattr(cls, "need_val_args", False) and evaluator is not None:  # by default, of the metric that decides
            monitor = config.setdefault("monitor", evaluator.metric_name)
            check_monitor(f"schedule: {kind}", monitor, evaluator.names)
            if monitor == evaluator.metric_name:
                config.setdefault("rule", "greater" if evaluator.greater_is_better else "less")
        # MMEngine's schedulers multiply each group's own rate, but for these two.
        one_rate = "eta_max" if cls.__name__ == "OneCycleLR" else "eta_min" if config.get("eta_min") else None
        if one_rate and cls is not PolyLRByGroup and len(set(_scales(runner.optim_wrapper.optimizer))) > 1:
            raise ConfigError(
                f"schedule: {kind} gives all groups of parameters the one rate {one_rate}={config.get(one_rate)}; "
                "optim.layer_decay and optim.backbone_lr_scale need eta_min_ratio, TorchOneCycle or PolyLRByGroup"
            )
        arguments = {"optimizer": runner.optim_wrapper, "epoch_length": loop.steps_per_epoch}
        try:
            built.append(PARAM_SCHEDULERS.build(config, default_args=arguments))
        except (AssertionError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"schedule: {kind} does not take these settings: {first_line(error)}") from error
    return built


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, OptimWrapper) else optimizer


def _scales(optimizer: Any) -> list[float]:
    """Each group's rate as a part of the optimizer's own, as it was made."""
    base = optimizer.defaults["lr"]
    return [group.get("initial_lr", group["lr"]) / base if base else 1.0 for group in optimizer.param_groups]
