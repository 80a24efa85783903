"""Parameter schedules: MMEngine's classes and torch's OneCycleLR, over groups that learn at different rates."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from mmengine.optim import OptimWrapper, PolyLR
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.momentum_scheduler import MomentumSchedulerMixin
from mmengine.registry import PARAM_SCHEDULERS
from torch.optim.lr_scheduler import OneCycleLR

from exp.config.explain import nearest
from exp.engine.registries import registered
from exp.errors import ConfigError
from exp.user_code import first_line

__all__ = ["PolyLRByGroup", "TorchOneCycle", "build_schedulers", "check_monitor"]

_KINDS = (LRSchedulerMixin, MomentumSchedulerMixin)


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
            raise ValueError("there is no cycle by epoch; set by_epoch: false, or convert_to_iter_based: true")
        inner = _inner(optimizer)
        self._scheduler = OneCycleLR(
            inner,
            max_lr=[eta_max * scale for scale in _scales(inner)],
            total_steps=total_steps or end,
            pct_start=pct_start,
            cycle_momentum=cycle_momentum,
        )

    @classmethod
    def build_iter_from_epoch(
        cls, *, optimizer: Any, epoch_length: int, total_steps: int, by_epoch: bool = True, **kwargs: Any
    ) -> TorchOneCycle:
        """Build for ``total_steps`` epochs; the registry calls this if ``convert_to_iter_based`` is set."""
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

    An epoch is its optimizer steps. ``end``, ``T_max`` and ``total_steps`` that are null are the training's length.

    Args:
        configs: each has ``type``, a registered name or a dotted path, and arguments.
        runner: has ``optim_wrapper``, ``train_loop``, ``val_loop`` and ``session``.

    Raises:
        ConfigError: one is unknown, does not take its settings, or looks at a metric that is not measured.
    """
    built = []
    for each in configs:
        config = {name: value for name, value in each.items() if value is not None}
        loop, kind = runner.train_loop, str(config.get("type"))
        cls = registered("schedule.param_scheduler.type", kind, PARAM_SCHEDULERS, _KINDS)
        given = [key for key in ("end", "T_max", "total_steps") if key in each]
        if given and not set(given) & set(config) and config.pop("convert_to_iter_based", False):
            # It ends with the training, which max_steps may end within an epoch.
            config.update(by_epoch=False, begin=config.get("begin", 0) * loop.steps_per_epoch)
        by_epoch, converted = config.get("by_epoch", True), config.get("convert_to_iter_based", False)
        length = loop.max_epochs if by_epoch else loop.max_iters
        begin, end = config.get("begin", 0), config.get("end", length if set(given) - set(config) else math.inf)
        config.setdefault("end", length)
        if begin >= min(end, length):
            continue
        unit, factors = (
            ("epoch" if by_epoch else "step"),
            (config.get("start_factor", 1 / 3), config.get("end_factor", 1)),
        )
        if cls.__name__.startswith("Linear") and (end - begin) * (loop.steps_per_epoch if converted else 1) == 1:
            if factors[1] == 1 and (converted or not by_epoch):
                continue  # a warm-up of one step is none
            raise ConfigError(
                f"schedule: {kind} from begin={begin:g} to end={end:g} takes one {unit}, and MMEngine's then stays at "
                f"its start_factor for ever; set end={begin + 2:g} or more, or convert_to_iter_based: true"
            )
        if cls.__name__ == "LinearLR" and factors[0] <= factors[1] and length < end < math.inf:
            runner.session.say(
                f"warning: the learning rate warms up until {unit} {end:g}, and the training ends after {length}: it "
                "never comes to optim.lr; set schedule.warmup_steps"
            )
        _follow(cls, config, getattr(runner.val_loop, "evaluator", None))
        _keep_ratio(cls, config, runner.optim_wrapper.optimizer)
        arguments = {"optimizer": runner.optim_wrapper, "epoch_length": loop.steps_per_epoch}
        try:
            built.append(PARAM_SCHEDULERS.build(config, default_args=arguments))
        except (AssertionError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"schedule: {kind} does not take these settings: {first_line(error)}") from error
    return built


def _follow(cls: Any, config: dict[str, Any], evaluator: Any) -> None:
    """Let a scheduler that follows the validations (ReduceOnPlateau) look at the metric that decides, by default."""
    if getattr(cls, "need_val_args", False) and evaluator is not None:
        monitor = config.setdefault("monitor", evaluator.metric_name)
        check_monitor(f"schedule: {config['type']}", monitor, evaluator.names)
        if monitor == evaluator.metric_name:
            config.setdefault("rule", "greater" if evaluator.greater_is_better else "less")


def check_monitor(place: str, monitor: str, names: Sequence[str]) -> None:
    """Refuse to look at a metric that is not measured.

    Raises:
        ConfigError: names those that are.
    """
    if monitor not in names:
        raise ConfigError(
            f"{place} has monitor={monitor}{nearest(monitor, list(names))}, but what is measured is {', '.join(names)}"
        )


def _keep_ratio(cls: Any, config: dict[str, Any], optimizer: Any) -> None:
    """If groups have different rates, let ``eta_min`` be that of a group with the full rate, not one rate for all.

    MMEngine's schedulers multiply each group's own rate, except for ``eta_min`` and OneCycleLR's ``eta_max``.

    Raises:
        ConfigError: OneCycleLR would undo the ratios.
    """
    if len(set(_initial_rates(optimizer))) == 1:
        return
    if cls.__name__ == "OneCycleLR":
        raise ConfigError(
            f"schedule: OneCycleLR gives all groups of parameters the one rate eta_max={config.get('eta_max')}; "
            "optim.layer_decay and optim.backbone_lr_scale need type TorchOneCycle (schedule=onecycle)"
        )
    if cls is PolyLR and config.get("eta_min"):
        config["type"] = PolyLRByGroup.__name__
    elif cls.__name__.endswith("LR") and config.get("eta_min"):
        config["eta_min_ratio"] = config.pop("eta_min") / optimizer.defaults["lr"]


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, OptimWrapper) else optimizer


def _initial_rates(optimizer: Any) -> list[float]:
    """What the groups were made with: a scheduler that was built before may have changed ``lr`` since."""
    return [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]


def _scales(optimizer: Any) -> list[float]:
    """Each group's rate as a part of the optimizer's own."""
    base = optimizer.defaults["lr"]
    return [rate / base if base else 1.0 for rate in _initial_rates(optimizer)]
