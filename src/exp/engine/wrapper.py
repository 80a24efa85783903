"""How a model comes to its device, and is wrapped for data-parallel training there.

Options are the configuration's, device arguments the backend's.
"""

from __future__ import annotations

import abc
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Iterable, Mapping

import torch
from mmengine.model import MMDistributedDataParallel, revert_sync_batchnorm
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exp.config.resolve import create, resolve
from exp.errors import TASK_PAGE, ConfigError, PlacementError, shown
from exp.hardware.collectives import ddp_arguments

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = [
    "TrainStep", "Wrapper", "average_buffers", "check_placement", "compiles_itself", "forward", "is_sharded",
    "place_and_wrap", "predictions", "preprocessed", "unwrapped", "wrap",
]  # fmt: skip

logger = logging.getLogger(__name__)

_SHOWN = 5
SHARDED_MARK = "weights_are_sharded"

_DEFAULTS = {
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "bucket_cap_mb": 25,
}


class Wrapper(abc.ABC):
    """How a model is made data-parallel.

    A configuration names it in ``wrapper._target_``; the constructor's arguments are the keys of ``wrapper.options``.
    It is made on every rank of a training with several, and asked once for :meth:`place`, then once for :meth:`wrap`.
    """

    compiles: ClassVar[bool] = False
    """Whether :meth:`place` sees to ``compile=true``. False: the model is compiled, as a whole, when it comes there."""

    def place(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """The model on its device, before the optimizer is built; its parameters may become other objects here.

        Args:
            model: on the CPU, with the same weights on every rank.
            backend: see :meth:`wrap`.
            device: this rank's.
        """
        del backend
        return model.to(device)

    @abc.abstractmethod
    def wrap(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """The module that trains: its backward pass, or its ``train_step``, averages gradients over all ranks.

        Args:
            model: on ``device``, with the same weights on every rank.
            backend: has ``collectives.ddp_class``; collectives are those of ``torch.distributed``.
            device: this rank's.

        Returns:
            A module with the model as ``module``, and ``train_step(data, optim_wrapper)`` (:class:`TrainStep` has one);
            :func:`wrap` gives DDP's. Or the model itself, with hooks on its gradients. Checkpoints hold the model's
            weights, and evaluation runs it alone.
        """


class TrainStep:
    """Gives a class with a ``module`` the ``train_step`` that the loop calls; validation runs on the bare module."""

    module: nn.Module

    def train_step(self: Any, data: dict[str, torch.Tensor], optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Forward through the DDP class, so that its hooks see the backward pass; then one optimizer update."""
        optim_wrapper.exchange_gradients = getattr(self, "exchange_gradients", None)
        with optim_wrapper.optim_context(self):
            losses = forward(self, preprocessed(self.module, data, training=True), "loss")
        log_vars: dict[str, torch.Tensor]
        loss, log_vars = self.module.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return log_vars


def place_and_wrap(model: nn.Module, session: Session, trains: bool = True) -> nn.Module:
    """Bring a model to the session's device, and make it data-parallel if several ranks train it.

    Args:
        model: on the CPU; its parameters may become other objects here.
        session: gives device, backend and ``wrapper``.
        trains: false: an evaluation, which runs the bare module: its ranks may have different numbers of batches.

    Raises:
        ConfigError: the wrapper gives no module that trains; names class and page.
        PlacementError: the model is not wholly on the device.
        UnavailableError: the wrapper does not go with this torch or these collectives.
    """
    config: Any = session.config.wrapper
    backend, device, info = session.backend, session.device, session.info
    several = trains and info.world_size > 1
    target = config.get("_target_") if several else None
    made: Wrapper | None = None
    if target is not None:
        made = create({"_target_": target, **config.options}, Wrapper, "wrapper")
    model = model.to(device) if made is None else made.place(model, backend, device)
    if not is_sharded(model):
        model = fit_batchnorm(model, session, config.sync_batchnorm and info.world_size > 1).to(device)
    check_placement(model, device, info.rank)
    if session.config.report_placement:
        logger.info(placement_report(model, session))
    if not several:
        return model
    if made is None:
        left_out = ("kind", "sync_batchnorm", "_target_", "options")
        options = {key: value for key, value in config.items() if key not in left_out}
        return wrap(model, config.kind, options, backend, device)
    wrapped = made.wrap(model, backend, device)
    if not isinstance(wrapped, nn.Module) or unwrapped(wrapped) is not model or not hasattr(wrapped, "train_step"):
        raise ConfigError(
            f"wrapper: {shown(made)}.wrap must give a module that has the model as its module and "
            f"train_step(data, optim_wrapper), not {type(wrapped).__qualname__}; see {TASK_PAGE}"
        )
    if wrapped is not model:
        MODEL_WRAPPERS.register_module(name=shown(wrapped), module=type(wrapped), force=True)  # as below
    return wrapped


def compiles_itself(session: Session) -> bool:
    """Whether the wrapper of a training sees to ``compile=true``."""
    wrapper: Any = session.config.wrapper
    target = wrapper.get("_target_")
    if target is None or session.info.world_size == 1:
        return False
    return bool(resolve("wrapper._target_", target, Wrapper).compiles)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_placement(model: nn.Module, device: torch.device, rank: int) -> None:
    """Refuse a model that is not wholly on ``device``, before it is wrapped.

    Raises:
        PlacementError: names the rank, the first misplaced tensors, their devices and shapes.
    """
    wrong = [
        f"  {name}: {tensor.device}, shape {tuple(tensor.shape)}"
        for name, tensor in _tensors(model)
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index)
    ]
    if wrong:
        more = [f"  and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        raise PlacementError(
            f"rank {rank}: {len(wrong)} of {len(_tensors(model))} parameters and buffers are not on {device}; make "
            "every tensor of the model a parameter or a buffer, and do not move it after it was built:\n"
            + "\n".join([*wrong[:_SHOWN], *more])
        )


def placement_report(model: nn.Module, session: Session) -> str:
    """Where this rank's parameters are: counts by device, the first five, and the rank's place in the group."""
    parameters, info = list(model.named_parameters()), session.info
    by_device = Counter(str(tensor.device) for _, tensor in _tensors(model))
    lines = [
        f"placement: rank {info.rank}  local_rank {info.local_rank}  world_size {info.world_size}  "
        f"device {session.device}  {session.distributed.process_group}",
        f"  {sum(p.numel() for _, p in parameters):,} values in {len(parameters)} parameters; tensors by device: "
        + ", ".join(f"{name} {count}" for name, count in sorted(by_device.items())),
    ]
    lines += [f"  {n}: {p.device}, shape {tuple(p.shape)}, {p.dtype}" for n, p in parameters[:_SHOWN]]
    return "\n".join(lines)


def fit_batchnorm(model: nn.Module, session: Session, synchronize: bool) -> nn.Module:
    """Convert batch norms into what the backend can do; says so if that is less than the model wants.

    Args:
        model: with its weights; they are kept, and so are the running statistics.
        session: its backend says whether it synchronizes.
        synchronize: make every batch norm a synchronized one (``wrapper.sync_batchnorm``).
    """
    if session.backend.capabilities.sync_batchnorm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronize else model
    has = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if has or synchronize:
        session.say(
            f"warning: backend={session.backend.name} has no synchronized batch norm: statistics are those of each "
            "device's own samples; a larger batch_size makes up for it, or a norm that does not look at the batch"
        )
    return revert_sync_batchnorm(model) if has else model


@torch.no_grad()
def average_buffers(modules: Iterable[nn.Module], distributed: Distributed) -> None:
    """Give all ranks the mean of their floating-point buffers, such as running statistics of unsynchronized norms.

    One exchange for all buffers, in float64 on the CPU: the mean of equal values is that value to the last bit, so
    constants stay what they are, and every process group carries it. Integer buffers count steps and are equal.

    Args:
        modules: the model and its copies; the same on every rank.
        distributed: with one process nothing is done.
    """
    if distributed.world_size == 1:
        return
    every = {id(buffer): buffer for module in modules for buffer in module.buffers() if buffer.is_floating_point()}
    if every:
        values = torch.cat([buffer.cpu().double().reshape(-1) for buffer in every.values()])
        means = (distributed.sum(values) / distributed.world_size).split([each.numel() for each in every.values()])
        for buffer, mean in zip(every.values(), means):
            buffer.copy_(mean.to(buffer.dtype).view_as(buffer))  # the dtype first: not every device takes float64


def wrap(model: nn.Module, kind: str, options: dict[str, Any], backend: Backend, device: torch.device) -> nn.Module:
    """Wrap ``model``, whose placement has been checked.

    Args:
        model: on ``device`` already.
        kind: ``mmddp`` (MMEngine's class where torch's own DDP is used), ``ddp`` or ``none``.
        options: keyword arguments of the DDP class, without any device argument.
        backend: gives the DDP class.
        device: the rank's device.

    Raises:
        ConfigError: ``kind`` is none of the three.
    """
    if kind == "none":
        return model
    if kind not in ("mmddp", "ddp"):
        raise ConfigError(f"wrapper.kind={kind} is not one of mmddp, ddp, none")
    base: type = backend.collectives.ddp_class
    if options.get("gradient_as_bucket_view") is None:
        # Spares a second set of gradients, and a copy of each per step. A vendor's class may have it, and refuse it.
        options = {**options, "gradient_as_bucket_view": base is DistributedDataParallel}
    # Only what departs from the class's own defaults: older and vendors' classes do not know every option.
    options = {key: value for key, value in options.items() if value != _DEFAULTS.get(key)}
    if kind == "mmddp" and base is DistributedDataParallel:
        wrapped: torch.nn.Module = MMDistributedDataParallel(model, **options, **ddp_arguments(device))
        return wrapped
    # The class that torch or the vendor gives, with the one method that the loop needs.
    ddp: type[torch.nn.Module] = type(base.__name__, (TrainStep, base), {})
    # MMEngine looks inside what it knows for a wrapper.
    MODEL_WRAPPERS.register_module(name=f"{base.__module__}.{base.__name__}", module=ddp, force=True)
    return ddp(model, **options, **ddp_arguments(device))


def preprocessed(model: nn.Module, data: Any, training: bool = False) -> Any:
    """A batch as the model's ``forward`` takes it, after MMEngine's ``data_preprocessor`` where the model has one.

    Args:
        model: without a wrapper.
        data: a batch on the model's device.
        training: what the preprocessor is told; it may augment then.
    """
    preprocessor: Any = getattr(model, "data_preprocessor", None)
    return data if preprocessor is None else preprocessor(data, training)


def forward(model: nn.Module, data: Any, mode: str) -> Any:
    """Call a model or its wrapper with a preprocessed batch: keyword arguments, or positional ones."""
    return model(**data, mode=mode) if isinstance(data, Mapping) else model(*data, mode=mode)


def predictions(model: nn.Module, data: Any, stage: str = "test") -> Any:
    """What a model predicts for a batch, by MMEngine's ``val_step`` or ``test_step`` where it has them.

    Args:
        model: without a wrapper.
        data: a batch on the model's device, not preprocessed.
        stage: ``val`` or ``test``.
    """
    step: Any = getattr(model, f"{stage}_step", None)
    return forward(model, preprocessed(model, data), "predict") if step is None else step(data)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside its wrapper, or itself."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of a model are spread over the ranks: then every forward pass is a collective."""
    return bool(getattr(model, SHARDED_MARK, False))
