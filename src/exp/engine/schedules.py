"""The schedules of learning rates: those of MMEngine, and torch's OneCycleLR.

They keep the ratios between the learning rates of the parameter groups.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from mmengine.optim import OptimWrapper, PolyLR
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.momentum_scheduler import MomentumSchedulerMixin
from mmengine.registry import PARAM_SCHEDULERS
from torch.optim.lr_scheduler import OneCycleLR

from exp.config.resolve import check_arguments
from exp.engine.mmengine import check_monitor, lookup_class
from exp.errors import ConfigError, first_line

# A learning rate of this share of the largest one is next to nothing; before this share of the steps, that is early.
_VANISHED = 0.01
_EARLY = 0.75


@PARAM_SCHEDULERS.register_module(force=True)
class TorchOneCycle(OneCycleLR):
    """Torch's OneCycleLR as a parameter scheduler of MMEngine, stepped at each optimizer step.

    MMEngine's OneCycleLR does not change the momentum. Torch's cycles it inversely to the learning rate (Smith and
    Topin, arXiv 1708.07120); for Adam this is the first beta. Published results with OneCycleLR use torch's.

    The ratios between the groups' learning rates stay: a group that starts at a tenth of the optimizer's learning rate
    (``layer_decay``, ``backbone_lr_scale``) rises to a tenth of ``eta_max``. All groups have the same momentum.

    Args:
        optimizer: passed by the engine.
        eta_max: largest learning rate of a group that starts at the optimizer's own learning rate.
        total_steps: optimizer steps of the whole cycle; None: ``end``.
        end: optimizer steps of the training; set by the engine, as for MMEngine's schedulers.
        by_epoch: False; it takes each step.
        **options: other arguments of torch's class, such as ``pct_start``.

    Raises:
        ValueError: the optimizer has no momentum to cycle.
    """

    by_epoch = False

    def __init__(
        self,
        optimizer: Any,
        eta_max: float,
        total_steps: int | None = None,
        end: int | None = None,
        by_epoch: bool = False,
        **options: Any,
    ) -> None:
        inner = _unwrap(optimizer)
        rates = [eta_max * scale for scale in _lr_ratios(inner)]
        super().__init__(inner, max_lr=rates, total_steps=total_steps or end, **options)

    def state_dict(self) -> dict[str, int]:
        """The position; learning rates and momenta are in the optimizer's state, all else in the configuration."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the position of ``state_dict``."""
        self.last_epoch = state_dict["last_epoch"]


@PARAM_SCHEDULERS.register_module(force=True)
class PolyLRByGroup(PolyLR):
    """MMEngine's PolyLR, with a final learning rate for each group, so that the ratios between the groups stay.

    Args:
        optimizer: passed by the engine.
        eta_min: final learning rate of a group that starts at the optimizer's own learning rate.
        **options: other arguments of PolyLR.
    """

    def __init__(self, optimizer: Any, *, eta_min: float, **options: Any) -> None:
        self._ends = [eta_min * scale for scale in _lr_ratios(_unwrap(optimizer))]
        super().__init__(optimizer, eta_min=0.0, **options)  # calls step(), so _ends must be set before

    def step(self) -> None:
        """Set ``lr = (lr - end) * c + end``, where PolyLR with a final rate of 0 sets ``lr = lr * c``."""
        before = [group["lr"] for group in self.optimizer.param_groups]
        super().step()
        for group, rate, end in zip(self.optimizer.param_groups, before, self._ends):
            group["lr"] += end * (1 - group["lr"] / rate) if rate else 0.0


def build_schedulers(configs: Sequence[Mapping[str, Any]], runner: Any) -> list[Any]:
    """Make the parameter schedulers of a training, except those that begin after its end.

    If ``end`` is null or not set, it becomes the length of the training: in epochs, or in optimizer steps if
    ``by_epoch`` is false. ``T_max`` and ``total_steps`` that are null or not set follow from it. A ``begin``
    with a decimal point is a share of it. With ``convert_to_iter_based`` an epoch counts as its optimizer steps.

    Args:
        configs: each has ``type``, a registered name or a dotted path, and arguments.
        runner: has ``optim_wrapper``, ``train_loop`` and ``val_loop``.

    Raises:
        ConfigError: a scheduler is unknown, does not take its arguments, monitors a metric that is not measured, or
            would give all groups the same learning rate although they have different ones.
        UnavailableError: the module of a scheduler cannot be imported.
    """
    built, loop = [], runner.train_loop
    for number, scheduler_config in enumerate(configs):
        config = {name: value for name, value in scheduler_config.items() if value is not None}
        kind = str(config.get("type"))
        interfaces = LRSchedulerMixin, MomentumSchedulerMixin
        cls = lookup_class("schedule.param_scheduler.type", kind, PARAM_SCHEDULERS, interfaces)
        reserved = dict.fromkeys(("optimizer", "param_name", "epoch_length"), "exp sets it")
        names = [name for name in scheduler_config if name not in ("type", "_scope_", "convert_to_iter_based", "end")]
        check_arguments(f"schedule.param_scheduler[{number}]", cls, names, reserved)
        by_epoch = config.get("by_epoch", getattr(cls, "by_epoch", True))
        end = config.setdefault("end", loop.max_epochs if by_epoch else loop.max_iters)
        begin = config.get("begin", 0)
        if isinstance(begin, float):
            begin = config["begin"] = round(begin * end)
        if begin >= end:
            continue
        if cls.__name__.startswith("Linear") and not by_epoch and end - begin == config.get("end_factor", 1) == 1:
            continue  # a warm-up of one step changes nothing, and MMEngine's class would stay at its start_factor
        evaluator = getattr(runner.val_loop, "evaluator", None)
        if getattr(cls, "need_val_args", False) and evaluator is not None:  # monitors the main metric by default
            monitor = config.setdefault("monitor", evaluator.metric_name)
            check_monitor(f"schedule: {kind}", monitor, evaluator.names)
            if monitor == evaluator.metric_name:
                config.setdefault("rule", "greater" if evaluator.greater_is_better else "less")
        # MMEngine's schedulers multiply the learning rate of each group, except with these two arguments.
        one_rate = "eta_max" if cls.__name__ == "OneCycleLR" else "eta_min" if config.get("eta_min") else None
        if one_rate and cls is not PolyLRByGroup and len(set(_lr_ratios(runner.optim_wrapper.optimizer))) > 1:
            raise ConfigError(
                f"schedule: {kind} gives all parameter groups the same rate {one_rate}={config.get(one_rate)}; "
                "optim.layer_decay and optim.backbone_lr_scale need eta_min_ratio, TorchOneCycle or PolyLRByGroup"
            )
        arguments = {"optimizer": runner.optim_wrapper, "epoch_length": loop.steps_per_epoch}
        try:
            built.append(PARAM_SCHEDULERS.build(config, default_args=arguments))
        except (AssertionError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(f"schedule: {kind} does not take these settings: {first_line(error)}") from error
    return built


def vanished_rate(records: Sequence[Mapping[str, Any]], metric: str, greater_is_better: bool) -> str | None:
    """A warning if the learning rate was next to nothing for long, and the validation still improved; else None.

    Args:
        records: of ``metrics.jsonl``: those of training have ``step`` and ``lr``, those of validation the metrics.
        metric: by which the best weights are chosen.
        greater_is_better: whether a larger value of it is better.
    """
    rates = [(record["step"], record["lr"]) for record in records if record.get("split") == "train" and "lr" in record]
    values = [
        (record[metric], record["step"]) for record in records if record.get("split") == "val" and metric in record
    ]
    if not rates or not values:
        return None
    peak, last = max(rate for _, rate in rates), rates[-1][0]
    until = max(step for step, rate in rates if rate >= _VANISHED * peak)
    best = (max if greater_is_better else min)(values)[1]
    if best <= until or until > _EARLY * last:
        return None
    return (
        f"the learning rate was below {_VANISHED:.0%} of its peak after step {until} of {last}, and the validation "
        f"still improved (best at step {best}): the model may have learned too little; take a schedule over steps "
        "(schedule=cosine), or schedule=constant"
    )


def _unwrap(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, OptimWrapper) else optimizer


def _lr_ratios(optimizer: Any) -> list[float]:
    """The initial learning rate of each group, divided by the optimizer's own."""
    base = optimizer.defaults["lr"]
    return [group.get("initial_lr", group["lr"]) / base if base else 1.0 for group in optimizer.param_groups]
