"""Learning-rate schedules for optimizers whose groups of parameters learn at different rates."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Iterator, Mapping, Sequence

from mmengine.optim import OptimWrapper, PolyLR
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.momentum_scheduler import MomentumSchedulerMixin
from mmengine.registry import PARAM_SCHEDULERS
from torch.optim.lr_scheduler import OneCycleLR

from exp.config.explain import nearest
from exp.engine.registries import registered
from exp.errors import ConfigError
from exp.raised import first_line

__all__ = [
    "PolyLRByGroup",
    "TorchOneCycle",
    "check_monitor",
    "follow",
    "is_reached",
    "keep_ratio",
    "over_the_training",
    "settings_of",
    "unfinished",
]


_KINDS = (LRSchedulerMixin, MomentumSchedulerMixin)
_LENGTHS = ("end", "T_max", "total_steps")


@PARAM_SCHEDULERS.register_module(force=True)
class TorchOneCycle:
    """Torch's own OneCycleLR as an MMEngine parameter scheduler.

    MMEngine's OneCycleLR leaves the momentum alone; torch's cycles it against the learning rate (Smith and Topin,
    arXiv 1708.07120), for Adam its first beta. Published results that name OneCycleLR mean torch's.

    Groups keep the ratio of their rates: one that begins at a tenth of the optimizer's learning rate (``layer_decay``,
    ``backbone_lr_scale``) rises to a tenth of ``eta_max``. Momentum is the same in all of them.

    Args:
        optimizer: given by the runner.
        eta_max: largest learning rate, of a group with the optimizer's own.
        total_steps: steps of the whole cycle.
        pct_start: part of them in which the rate rises.
        cycle_momentum: cycle the momentum against the rate.
        by_epoch: false: there is no cycle by epoch.

    Raises:
        ConfigError: the optimizer has no momentum to cycle.
    """

    by_epoch = False

    def __init__(
        self,
        optimizer: Any,
        eta_max: float,
        total_steps: int,
        pct_start: float = 0.3,
        end: int | None = None,
        cycle_momentum: bool = True,
        by_epoch: bool = False,
    ) -> None:
        if by_epoch:
            raise ConfigError("schedule: TorchOneCycle goes by step; set its convert_to_iter_based: true")
        del end  # MMEngine sets it for every scheduler; this one ends with its cycle
        inner = optimizer.optimizer if isinstance(optimizer, OptimWrapper) else optimizer
        if cycle_momentum and not {"momentum", "betas"} & set(inner.defaults):
            raise ConfigError(
                f"schedule: {type(inner).__name__} has no momentum that TorchOneCycle could cycle; "
                "set its cycle_momentum: false, or use another optimizer"
            )
        largest = [eta_max * scale for scale in _scales(inner)]
        self._scheduler = OneCycleLR(
            inner, max_lr=largest, total_steps=total_steps, pct_start=pct_start, cycle_momentum=cycle_momentum
        )

    @classmethod
    def build_iter_from_epoch(
        cls, *, optimizer: Any, epoch_length: int, total_steps: int, by_epoch: bool = True, **kwargs: Any
    ) -> TorchOneCycle:
        """Build for ``total_steps`` epochs; the runner calls this where ``convert_to_iter_based`` is set."""
        del by_epoch
        return cls(optimizer, total_steps=total_steps * epoch_length, **kwargs)

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
        optimizer: given by the runner.
        eta_min: learning rate at the end, of a group with the optimizer's own.
        **options: of PolyLR.
    """

    def __init__(self, optimizer: Any, *, eta_min: float, **options: Any) -> None:
        inner = optimizer.optimizer if isinstance(optimizer, OptimWrapper) else optimizer
        self._ends = [eta_min * scale for scale in _scales(inner)]
        super().__init__(optimizer, eta_min=0.0, **options)  # which takes the first step

    def step(self) -> None:
        """To ``(lr - end) * c + end``, where MMEngine's makes ``lr * c`` of a rate that ends at zero."""
        before = [group["lr"] for group in self.optimizer.param_groups]
        super().step()
        for group, rate, end in zip(self.optimizer.param_groups, before, self._ends):
            group["lr"] += end * (1 - group["lr"] / rate) if rate else 0.0


def keep_ratio(scheduler: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """A stock scheduler whose absolute ``eta_min`` is that of groups with the optimizer's own rate, where rates differ.

    MMEngine's schedulers multiply each group's own rate, but for ``eta_min`` and for OneCycleLR's ``eta_max``, which
    they take for all groups alike.

    Args:
        scheduler: its configuration.
        optimizer: with the rates that the groups begin with.

    Raises:
        ConfigError: it would drive groups with different rates to one.
    """
    config, kind = dict(scheduler), _kind(scheduler)
    if len(set(_initial_rates(optimizer))) == 1 or not kind.endswith("LR"):
        return config
    if kind == "OneCycleLR":
        raise ConfigError(
            f"schedule: OneCycleLR gives all groups of parameters the one rate eta_max={scheduler.get('eta_max')}; "
            "optim.layer_decay and optim.backbone_lr_scale need type TorchOneCycle (schedule=onecycle)"
        )
    if config.get("eta_min"):
        if kind == "PolyLR":
            config["type"] = PolyLRByGroup.__name__
        else:
            config["eta_min_ratio"] = config.pop("eta_min") / optimizer.defaults["lr"]
    return config


@contextlib.contextmanager
def settings_of(scheduler: Any) -> Iterator[None]:
    """Where a scheduler is built: what its class does not take is an error of the configuration.

    Args:
        scheduler: its configuration.

    Raises:
        ConfigError: its type is unknown, or does not take its settings.
    """
    kind = scheduler.get("type") if isinstance(scheduler, Mapping) else scheduler
    try:
        yield
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"schedule: {kind} does not take these settings: {first_line(error)}") from error


def follow(scheduler: dict[str, Any], evaluator: Any) -> None:
    """Let a scheduler that follows the validations (ReduceOnPlateau) look at the metric that decides, if at no other.

    Args:
        scheduler: its configuration, which gets ``monitor`` and ``rule`` where it lacks them.
        evaluator: of the validation; one of a user's own loop need not tell its metrics.

    Raises:
        ConfigError: it looks at a metric that is not measured.
    """
    kind = scheduler["type"]
    cls = registered("schedule.param_scheduler.type", kind, PARAM_SCHEDULERS, _KINDS)
    names = getattr(evaluator, "names", None)
    if not names or not getattr(cls, "need_val_args", False):
        return
    monitor = scheduler.setdefault("monitor", evaluator.metric_name)
    check_monitor(f"schedule: {kind}", monitor, names)
    if monitor == evaluator.metric_name:
        scheduler.setdefault("rule", "greater" if evaluator.greater_is_better else "less")


def check_monitor(place: str, monitor: str, names: Sequence[str]) -> None:
    """Refuse to look at a metric that is not measured.

    Raises:
        ConfigError: names those that are.
    """
    if monitor not in names:
        raise ConfigError(
            f"{place} has monitor={monitor}{nearest(monitor, list(names))}, but what is measured is {', '.join(names)}"
        )


def over_the_training(scheduler: Mapping[str, Any], epochs: int, steps: int) -> dict[str, Any]:
    """A scheduler with the length of the training where its own, ``end``, ``T_max`` or ``total_steps``, is null.

    One by epoch that is converted to steps would end with the last epoch, which ``max_steps`` need not come to the end
    of: it becomes one by step.

    Args:
        scheduler: its configuration, with ``epoch_length``.
        epochs: of the training.
        steps: likewise.
    """
    config = dict(scheduler)
    given = [key for key in _LENGTHS if key in config]
    is_open = given and all(config[key] is None for key in given) and config.get("by_epoch", True)
    if is_open and config.pop("convert_to_iter_based", False):
        config.update(by_epoch=False, begin=config.get("begin", 0) * config["epoch_length"])
    length = epochs if config.get("by_epoch", True) else steps
    for key in given:
        if config[key] is None:
            config[key] = length - (config.get("begin", 0) if key == "T_max" else 0)
    return config


def is_reached(scheduler: Mapping[str, Any], epochs: int, steps: int) -> bool:
    """Whether a stock scheduler changes anything in a training.

    MMEngine refuses one that begins after the end of a short run. A linear change over a single step, such as a warm-up
    of one, leaves its ``start_factor`` in place for ever there; a warm-up of one step or none is none here.

    Args:
        scheduler: its configuration, with ``epoch_length``.
        epochs: of the training.
        steps: likewise.

    Raises:
        ConfigError: a linear change that is no warm-up by step takes one step only.
    """
    begin, end = _span(scheduler)
    if begin >= min(end, epochs if scheduler.get("by_epoch", True) else steps):
        return False
    kind = _kind(scheduler)
    converted = bool(scheduler.get("convert_to_iter_based"))
    by_epoch = scheduler.get("by_epoch", True) and not converted
    length = (end - begin) * (scheduler["epoch_length"] if converted else 1)
    if not kind.startswith("Linear") or length != 1:
        return True
    if not by_epoch and scheduler.get("end_factor", 1.0) == 1.0:
        return False
    unit = "epoch" if by_epoch else "step"
    raise ConfigError(
        f"schedule: {kind} from begin={begin:g} to end={end:g} takes one {unit}, and MMEngine's then stays at its "
        f"start_factor for ever; set end={begin + 2:g} or more"
        + (", or convert_to_iter_based: true" if by_epoch else "")
    )


def unfinished(scheduler: Mapping[str, Any], epochs: int, steps: int) -> str | None:
    """What to tell of a warm-up that is longer than the training; None: it is not.

    Args:
        scheduler: the configuration of a stock scheduler.
        epochs: of the training.
        steps: likewise.
    """
    _, end = _span(scheduler)
    by_epoch = scheduler.get("by_epoch", True)
    last = epochs if by_epoch else steps
    first, full = scheduler.get("start_factor", 1 / 3), scheduler.get("end_factor", 1.0)
    warms_up = _kind(scheduler) == "LinearLR" and full >= first
    if not warms_up or end == math.inf or end <= last:
        return None
    unit = "epoch" if by_epoch else "step"
    return (
        f"warning: the learning rate warms up until {unit} {end:g}, and the training ends after {last}: it never "
        "comes to optim.lr; set schedule.warmup_steps"
    )


def _kind(scheduler: Mapping[str, Any]) -> str:
    return str(scheduler.get("type")).rpartition(".")[2]


def _span(scheduler: Mapping[str, Any]) -> tuple[float, float]:
    """``begin`` and ``end``, in epochs or steps."""
    end = scheduler.get("end")
    return scheduler.get("begin", 0), math.inf if end is None else end


def _initial_rates(optimizer: Any) -> list[float]:
    """What the groups were made with: a scheduler that was built before may have changed ``lr`` since."""
    return [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]


def _scales(optimizer: Any) -> list[float]:
    """Each group's rate as a part of the optimizer's own."""
    base = optimizer.defaults["lr"]
    return [rate / base if base else 1.0 for rate in _initial_rates(optimizer)]
