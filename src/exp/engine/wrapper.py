"""Wrappers, which make a model data-parallel: their interface, DDP, and where a model is moved and wrapped."""

from __future__ import annotations

import abc
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Callable, Mapping, cast

import torch
from mmengine.model import BaseModel, MMDistributedDataParallel, revert_sync_batchnorm
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exp.config.resolve import check_arguments, instantiate, resolve, to_plain
from exp.config.schema import DDP_KEYS
from exp.data.fingerprint import shortened
from exp.distributed import AveragingDataParallel, StagedDataParallel
from exp.errors import ConfigError, PlacementError, qualified_name

if TYPE_CHECKING:
    from exp.distributed import StagedCollectives
    from exp.hardware.backend import Backend
    from exp.session import Session

logger = logging.getLogger(__name__)


_SHARDED_MARK = "weights_are_sharded"
_SHOWN = 5
_DEFAULTS = {
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "gradient_as_bucket_view": False,
    "bucket_cap_mb": 25,
}
_OF_RANK = (
    "module", "device_ids", "output_device", "process_group", "device_mesh", "all_reduce", "group", "start_all_reduce",
)  # fmt: skip
_SET_BY_EXP = {
    **dict.fromkeys(_OF_RANK, "exp sets it, from rank and backend"),
    **{name: f"set wrapper.{name}" for name in DDP_KEYS},
}
"""Arguments of DDP classes that ``wrapper.options`` must not have."""


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
            and :func:`exp.engine.wrapper.wrap` returns it for DDP; or the model itself, for example with hooks on its
            gradients. Checkpoints contain the weights of the model alone, and evaluation uses the model without the
            wrapper. For a model with a ``train_step`` of its own the module also needs ``exchange_gradients()``, which
            averages the gradients before each update; see :class:`TrainStep`.
        """


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


class OwnStepDataParallel(TrainStep, AveragingDataParallel):
    """The wrapper of a model with a ``train_step`` of its own, whose backward passes DDP does not know."""


def has_own_step(model: nn.Module) -> bool:
    """Whether a model defines how it is trained: MMEngine's ``train_step``, or the forward pass within it."""
    methods = {name: getattr(model, name, None) for name in ("train_step", "_run_forward")}
    return any(
        method is not None and getattr(method, "__func__", None) is not getattr(BaseModel, name)
        for name, method in methods.items()
    )


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


def class_name(model: nn.Module) -> str:
    """The class of a model in messages: that of the user's module, if the model only adapts one."""
    module = getattr(model, "user_module", None)
    return qualified_name(model if module is None else module)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model is sharded over the ranks, so that every forward pass is a collective."""
    return bool(getattr(model, _SHARDED_MARK, False))


# -- DDP ---------------------------------------------------------------------------------------------------------------


def wrap(
    model: nn.Module, kind: str, options: dict[str, Any], backend: Backend, device: torch.device, group: Any = None
) -> nn.Module:
    """Wrap a model with DDP.

    Args:
        model: on ``device``.
        kind: ``mmddp`` (MMEngine's class, if the backend uses torch's own DDP), ``ddp`` or ``none``.
        options: keyword arguments of the DDP class, without device arguments.
        backend: has the DDP class (``collectives.ddp_class``).
        device: the device of this rank.
        group: the process group for CPU tensors (:attr:`exp.distributed.Distributed.cpu_group`).

    Returns:
        The wrapped model, which has ``train_step``; the model itself if ``kind`` is ``none``.
    """
    if kind == "none":
        return model
    base = backend.collectives.ddp_class
    # It saves a second set of gradients, and a copy of them at each step. Classes of vendors may not support it.
    options = {"gradient_as_bucket_view": base is DistributedDataParallel, **options}
    # Pass only options that differ from the defaults: classes of old torch and of vendors do not have every option.
    options = {key: value for key, value in options.items() if value != _DEFAULTS.get(key)}
    if issubclass(base, AveragingDataParallel):
        options.update(all_reduce=backend.collectives.all_reduce, group=group)
    if issubclass(base, StagedDataParallel):
        options["start_all_reduce"] = cast("StagedCollectives", backend.collectives).start_all_reduce
    wrapped: nn.Module = data_parallel_class(kind, backend)(model, **options, **backend.ddp_kwargs(device))
    return wrapped


def data_parallel_class(kind: str, backend: Backend) -> Any:
    """The class for ``wrapper=mmddp`` or ``ddp``: MMEngine's, torch's or the vendor's; it has ``train_step``."""
    base = backend.collectives.ddp_class
    if kind == "mmddp" and base is DistributedDataParallel:
        return MMDistributedDataParallel
    return type(base.__name__, (TrainStep, base), {"__module__": base.__module__})


def awaited_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, if ``model`` is DDP that waits for all their gradients in each backward pass; else none.

    With ``find_unused_parameters`` or ``static_graph`` DDP knows the parameters without a gradient.
    """
    unused_are_found = getattr(model, "find_unused_parameters", True) or getattr(model, "static_graph", False)
    parameters = {} if unused_are_found else dict(unwrapped(model).named_parameters())
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


# -- placement ---------------------------------------------------------------------------------------------------------


def place_and_wrap(model: nn.Module, session: Session, trains: bool = True) -> nn.Module:
    """Move a model to the session's device, and make it data-parallel if several ranks train it.

    Args:
        model: on the CPU; its parameters may be replaced by other objects.
        session: has device, backend and ``wrapper``.
        trains: whether the model is trained. False: it is not wrapped, because in evaluation ranks may have different
            numbers of batches.

    Raises:
        ConfigError: the wrapper does not take its options, or does not support the model.
        PlacementError: the model is not wholly on the device.
        UnavailableError: this version of torch, or the collectives, do not support the wrapper.
    """
    config: Any = session.config.wrapper
    backend, device, info = session.backend, session.device, session.info
    is_distributed, own_step = trains and info.world_size > 1, has_own_step(model)
    wrapper: Wrapper | None = None
    options = dict(to_plain(config.options))
    if trains and (is_distributed or options):  # options are checked on one rank, too
        if config._target_ is not None:
            cls = resolve("wrapper._target_", config._target_, Wrapper)
            check_arguments("wrapper.options", cls, options)
            wrapper = instantiate(cls, "wrapper.options", options) if is_distributed else None
        else:
            cls = OwnStepDataParallel if own_step else data_parallel_class(config.kind, backend)
            check_arguments("wrapper.options", cls, options, _SET_BY_EXP)
    model = model.to(device) if wrapper is None else wrapper.move_to_device(model, backend, device)
    if not is_sharded(model):
        synchronize = config.sync_batchnorm and info.world_size > 1
        model = _fit_batchnorm(model, backend, synchronize, session.print).to(device)
    check_placement(model, device, info.rank)
    if session.config.report_placement:
        logger.info(
            "placement: rank %d  local_rank %d  world_size %d  device %s  %s\n%s",
            *(info.rank, info.local_rank, info.world_size, device, session.distributed.process_group),
            _placement_report(model),
        )
    if not is_distributed:
        return model
    if wrapper is None:
        options.update({name: config[name] for name in DDP_KEYS})
        if not own_step:
            return wrap(model, config.kind, options, backend, device, session.distributed.cpu_group)
        return OwnStepDataParallel(
            model, **options, all_reduce=backend.collectives.all_reduce, group=session.distributed.cpu_group
        )
    wrapped = wrapper.wrap(model, backend, device)
    if wrapped is not model and own_step and not hasattr(wrapped, "exchange_gradients"):
        raise ConfigError(
            f"wrapper={config.kind}: {qualified_name(model)} has a train_step of its own, which "
            f"{qualified_name(wrapped)} does not run; use wrapper=ddp, or give the wrapper exchange_gradients() "
            "(docs/extend/add-a-task.md)"
        )
    return wrapped


def check_placement(model: nn.Module, device: torch.device, rank: int) -> None:
    """Refuse a model that is not wholly on ``device``, before it is wrapped.

    Raises:
        PlacementError: the message has the rank, and names, devices and shapes of the first misplaced tensors.
    """
    wrong = [
        f"{name} ({tensor.device}, shape {tuple(tensor.shape)})"
        for name, tensor in _named_tensors(model)
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index)
    ]
    if wrong:
        raise PlacementError(
            f"rank {rank}: {len(wrong)} of {len(_named_tensors(model))} parameters and buffers are not on {device}",
            "make every tensor of the model a parameter or a buffer, and do not move it after it was built: "
            + shortened(wrong, _SHOWN),
            rank=rank,
        )


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _placement_report(model: nn.Module) -> str:
    """A text about this rank's parameters: tensors by device, and the first five parameters."""
    parameters = list(model.named_parameters())
    by_device = Counter(str(tensor.device) for _, tensor in _named_tensors(model))
    lines = [
        f"  {sum(p.numel() for _, p in parameters):,} values in {len(parameters)} parameters; tensors by device: "
        + ", ".join(f"{name} {count}" for name, count in sorted(by_device.items())),
    ]
    lines += [f"  {n}: {p.device}, shape {tuple(p.shape)}, {p.dtype}" for n, p in parameters[:_SHOWN]]
    return "\n".join(lines)


def _fit_batchnorm(model: nn.Module, backend: Backend, synchronize: bool, report: Callable[[str], object]) -> nn.Module:
    """Convert batch norms to synchronized ones if wanted, or to plain ones if the backend has no synchronized ones.

    The latter is reported. Weights and running statistics are kept; some modules of the result may be new.
    """
    if backend.capabilities.sync_batchnorm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronize else model
    has = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if has or synchronize:
        report(
            f"warning: backend={backend.name} has no synchronized batch norm: each device computes statistics of its "
            "own samples; use a larger batch_size, or a norm that does not depend on the batch"
        )
    return revert_sync_batchnorm(model) if has else model
