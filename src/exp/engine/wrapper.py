"""Moves a model to its device, and makes it data-parallel: by DDP, sharded (FSDP), or by a wrapper of the user's.

The options of the wrapper come from the configuration, the device arguments from the backend. With torch's
``fully_shard`` each rank has a part of weights, gradients and moments. The model is sharded block by block before the
optimizer is built, so that the device never holds the whole model. The weights of a block are gathered for its forward
and its backward pass, and its gradients are reduced to the ranks that have their part.
"""

from __future__ import annotations

import abc
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Iterator, Mapping

import torch
from mmengine.model import BaseModel, MMDistributedDataParallel, revert_sync_batchnorm
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from exp.config.resolve import as_plain, check_arguments, make, resolve
from exp.config.schema import DDP_KEYS
from exp.data.places import shortened
from exp.distributed import AveragingDataParallel, StagedCollectives
from exp.errors import ConfigError, PlacementError, UnavailableError, qualified_name
from exp.hardware.backend import ddp_arguments
from exp.hardware.compat import supports_full_sharding

if TYPE_CHECKING:
    from exp.hardware.backend import Backend
    from exp.session import Session

logger = logging.getLogger(__name__)

_SHOWN = 5
_SHARDED_MARK = "weights_are_sharded"
_PAGE = "docs/hardware/estimate.md"

_DEFAULTS = {
    "find_unused_parameters": False,
    "broadcast_buffers": True,
    "gradient_as_bucket_view": False,
    "bucket_cap_mb": 25,
}
_SET_BY_EXP = {
    **dict.fromkeys(
        ("module", "device_ids", "output_device", "process_group", "device_mesh", "all_reduce", "group"),
        "exp sets it, from rank and backend",
    ),
    **{name: f"set wrapper.{name}" for name in DDP_KEYS},
}
"""Arguments of DDP classes that ``wrapper.options`` must not have."""


class Wrapper(abc.ABC):
    """The base class of wrappers, which make a model data-parallel.

    A configuration names a subclass in ``wrapper._target_``; its constructor's arguments are the keys of
    ``wrapper.options``. If ``compile`` is one of them, :meth:`place` compiles the model; else the whole model is
    compiled before. In a training with several ranks, each rank makes one object, and calls its :meth:`place` and then
    its :meth:`wrap`, each once.
    """

    def place(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
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
            and :func:`wrap` returns it for DDP; or the model itself, for example with hooks on its gradients.
            Checkpoints contain the weights of the model alone, and evaluation uses the model without the wrapper.
            For a model with a ``train_step`` of its own the module also needs ``exchange_gradients()``, which averages
            the gradients before each update; see :class:`TrainStep`.
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


class OwnStepDataParallel(TrainStep, AveragingDataParallel):
    """The wrapper of a model with a ``train_step`` of its own, whose backward passes DDP does not know."""


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
    several, own_step = trains and info.world_size > 1, has_own_step(model)
    made: Wrapper | None = None
    options = dict(as_plain(config.options))
    if trains and (several or options):  # options are checked on one rank, too
        if config._target_ is not None:
            cls = resolve("wrapper._target_", config._target_, Wrapper)
            check_arguments("wrapper.options", cls, options)
            made = make(cls, "wrapper.options", options) if several else None
        else:
            cls = OwnStepDataParallel if own_step else data_parallel_class(config.kind, backend)
            check_arguments("wrapper.options", cls, options, _SET_BY_EXP)
    model = model.to(device) if made is None else made.place(model, backend, device)
    if not is_sharded(model):
        model = fit_batchnorm(model, session, config.sync_batchnorm and info.world_size > 1).to(device)
    check_placement(model, device, info.rank)
    if session.config.report_placement:
        logger.info(placement_report(model, session))
    if not several:
        return model
    if made is None:
        options.update({name: config[name] for name in DDP_KEYS})
        if not own_step:
            return wrap(model, config.kind, options, backend, device)
        return OwnStepDataParallel(
            model, **options, all_reduce=backend.collectives.all_reduce, group=session.distributed.cpu_group
        )
    wrapped = made.wrap(model, backend, device)
    if wrapped is not model:
        if own_step and not hasattr(wrapped, "exchange_gradients"):
            raise ConfigError(
                f"wrapper={config.kind}: {qualified_name(model)} has a train_step of its own, which "
                f"{qualified_name(wrapped)} does not run; use wrapper=ddp, or give the wrapper exchange_gradients() "
                "(docs/extend/add-a-task.md)"
            )
        MODEL_WRAPPERS.register_module(name=qualified_name(wrapped), module=type(wrapped), force=True)  # see wrap()
    return wrapped


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def check_placement(model: nn.Module, device: torch.device, rank: int) -> None:
    """Refuse a model that is not wholly on ``device``, before it is wrapped.

    Raises:
        PlacementError: the message has the rank, and names, devices and shapes of the first misplaced tensors.
    """
    wrong = [
        f"{name} ({tensor.device}, shape {tuple(tensor.shape)})"
        for name, tensor in _tensors(model)
        if tensor.device.type != device.type or device.index not in (None, tensor.device.index)
    ]
    if wrong:
        raise PlacementError(
            f"rank {rank}: {len(wrong)} of {len(_tensors(model))} parameters and buffers are not on {device}; make "
            "every tensor of the model a parameter or a buffer, and do not move it after it was built: "
            + shortened(wrong, _SHOWN)
        )


def placement_report(model: nn.Module, session: Session) -> str:
    """A text about this rank's parameters: tensors by device, the first five parameters, and the process group."""
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
    """Convert batch norms to synchronized ones if wanted, or to plain ones if the backend has no synchronized ones.

    The latter is reported. Weights and running statistics are kept.

    Args:
        model: the model with its weights.
        session: its backend knows whether it supports synchronized batch norm.
        synchronize: convert every batch norm (``wrapper.sync_batchnorm``).

    Returns:
        The model; some of its modules may be new.
    """
    if session.backend.capabilities.sync_batchnorm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if synchronize else model
    has = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if has or synchronize:
        session.say(
            f"warning: backend={session.backend.name} has no synchronized batch norm: each device computes statistics "
            "of its own samples; use a larger batch_size, or a norm that does not depend on the batch"
        )
    return revert_sync_batchnorm(model) if has else model


def wrap(model: nn.Module, kind: str, options: dict[str, Any], backend: Backend, device: torch.device) -> nn.Module:
    """Wrap a model with DDP.

    Args:
        model: on ``device``.
        kind: ``mmddp`` (MMEngine's class, if the backend uses torch's own DDP), ``ddp`` or ``none``.
        options: keyword arguments of the DDP class, without device arguments.
        backend: has the DDP class (``collectives.ddp_class``).
        device: the device of this rank.

    Returns:
        The wrapped model, which has ``train_step``; the model itself if ``kind`` is ``none``.
    """
    if kind == "none":
        return model
    # It saves a second set of gradients, and a copy of them at each step. Classes of vendors may not support it.
    options = {"gradient_as_bucket_view": backend.collectives.ddp_class is DistributedDataParallel, **options}
    # Pass only options that differ from the defaults: classes of old torch and of vendors do not have every option.
    options = {key: value for key, value in options.items() if value != _DEFAULTS.get(key)}
    wrapped: nn.Module = data_parallel_class(kind, backend)(model, **options, **ddp_arguments(device))
    return wrapped


def data_parallel_class(kind: str, backend: Backend) -> Any:
    """The class for ``wrapper=mmddp`` or ``ddp``: MMEngine's, torch's or the vendor's; it has ``train_step``."""
    base = backend.collectives.ddp_class
    if kind == "mmddp" and base is DistributedDataParallel:
        return MMDistributedDataParallel
    # MMEngine unwraps models only of registered wrapper classes.
    ddp = type(base.__name__, (TrainStep, base), {"__module__": base.__module__})
    MODEL_WRAPPERS.register_module(name=f"{base.__module__}.{base.__name__}", module=ddp, force=True)
    return ddp


def awaited_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by name, if ``model`` is DDP that waits for all their gradients in each backward pass; else none.

    With ``find_unused_parameters`` or ``static_graph`` DDP knows the parameters without a gradient.
    """
    unused_are_found = getattr(model, "find_unused_parameters", True) or getattr(model, "static_graph", False)
    parameters = {} if unused_are_found else dict(unwrapped(model).named_parameters())
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


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


# -- sharded over the ranks --------------------------------------------------------------------------------------------


class FullyShard(Wrapper):
    """``wrapper=fsdp``: the model is sharded over all ranks.

    Args:
        precision: of the run; ``fp16`` is refused.
        reshard_after_forward: free the weights of a block after its forward pass, and gather them again for its
            backward pass. False: keep them, which halves the communication, but needs memory for all weights.
        compile: compile each block by itself; the communication between blocks is not compiled.

    Raises:
        ConfigError: ``precision`` is ``fp16``.
    """

    def __init__(
        self,
        precision: str = "fp32",
        reshard_after_forward: bool = True,
        compile: bool = False,  # noqa: A002 - the name of the key
    ) -> None:
        if precision == "fp16":
            raise ConfigError(
                "wrapper=fsdp does not support precision=fp16, because the loss scaler would see the shards of one "
                "rank only; use precision=bf16, or wrapper=ddp"
            )
        self.reshard_after_forward = reshard_after_forward
        self.compile = compile

    def place(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """Shard a model in place; at most one block is whole on the device.

        Args:
            model: on the CPU; every rank takes the weights of rank 0.
            backend: the backend of this worker.
            device: the device of this rank.

        Raises:
            ConfigError: two names of the model are the same parameter, or it has a ``train_step`` of its own.
            UnavailableError: this version of torch, or the collectives of this backend, do not support sharding.
        """
        if not supports_full_sharding() or isinstance(backend.collectives, StagedCollectives):
            raise UnavailableError(
                f"wrapper=fsdp needs torch >= 2.7 (this is {torch.__version__}), and collectives that do not copy "
                f"tensors through the CPU; use wrapper=ddp (see {_PAGE})"
            )
        if has_own_step(model):
            raise ConfigError(
                f"wrapper=fsdp: {qualified_name(model)} has a train_step of its own, whose passes through parts of the "
                "model cannot be sharded; use wrapper=ddp"
            )
        units = units_of(model)
        _refuse_tied(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        unit: Any
        for unit in units:
            _from_rank_0(unit, device)
            _shard(fully_shard, unit, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
            unit.reshards_after_forward = self.reshard_after_forward
            if self.compile:  # only forward, since __call__ gathers the weights; equal blocks share the compiled code
                unit.forward = torch.compile(unit.forward)
        _from_rank_0(model, device)  # the rest
        _shard(fully_shard, model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not backend.collectives.averages:
                module.set_force_sum_reduction_for_comms(True)
        setattr(model, _SHARDED_MARK, True)
        return model

    def wrap(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """Return the model itself, which :meth:`place` has sharded."""
        return model


@torch.no_grad()
def _from_rank_0(module: nn.Module, device: torch.device) -> None:
    """Move the tensors of a module that are not sharded yet to the device, with the values of rank 0, as DDP does."""
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if not hasattr(tensor, "to_local"):
            value = tensor.contiguous()
            torch.distributed.broadcast(value, 0)
            tensor.copy_(value)


def _shard(fully_shard: Any, module: nn.Module, **options: Any) -> None:
    """Shard a module. Torch replaces its class; the new class gets the old name, which messages and checks use."""
    own = type(module)
    fully_shard(module, **options)
    if type(module) is not own:
        type(module).__module__, type(module).__qualname__ = own.__module__, own.__qualname__


def _refuse_tied(model: nn.Module) -> None:
    """Refuse tied weights: after sharding, the two names would be different parameters.

    Raises:
        ConfigError: two names are the same parameter.
    """
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names.setdefault(parameter, name) != name:
            raise ConfigError(
                f"wrapper=fsdp: {names[parameter]} and {name} of the model are the same parameter (tied weights), "
                f"which cannot be sharded; use wrapper=ddp (see {_PAGE})"
            )


def units_of(model: nn.Module) -> list[nn.Module]:
    """The submodules (blocks) that are sharded; a pass gathers the weights of one block at a time.

    Args:
        model: if it has ``sharded_units()``, that is used. Otherwise the units are the members with parameters of the
            outermost lists of modules (``nn.ModuleList``, ``nn.Sequential``) with two or more members of one class.

    Returns:
        Modules of which none contains another, and each is run by calling it.
    """
    own: Any = getattr(model, "sharded_units", None)
    return list(_repeated(model) if own is None else own())


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    repeated = len(children) > len({type(child) for child in children})
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and repeated
    for child in children:
        if is_list and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these cannot be called
            yield child
        else:
            yield from _repeated(child)


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """The parameters of a sharded model by name: DTensors, of which this rank has a part.

    A forward pass may have left some of them whole; they are resharded first.
    """
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
    return dict(model.named_parameters())


def local_part(value: Any) -> Any:
    """This rank's part of a sharded tensor; any other value unchanged."""
    return value.to_local() if hasattr(value, "to_local") else value


def sharded_like(local: torch.Tensor, like: Any, mesh: Any = None) -> Any:
    """Make a DTensor with the shape and sharding of ``like`` from this rank's part; no collective.

    Args:
        local: this rank's part.
        like: a DTensor.
        mesh: device mesh of the result; None: that of ``like``.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, mesh or like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_like(whole: torch.Tensor, like: Any) -> Any:
    """Shard a whole tensor like the DTensor ``like``: this rank copies its part; no collective."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()  # frees the other parts


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Context in which a sharded model has whole weights on every rank, for evaluation; a collective at its start.

    In evaluation ranks may have different numbers of batches, so a forward pass must not be a collective. Does nothing
    if the model is not sharded.

    Args:
        model: the model, not wrapped.
    """
    parts: list[Any] = [module for module in model.modules() if is_sharded(model) and hasattr(module, "unshard")]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        part.reshard()
        # As in place(): the outermost module keeps its weights between the forward and the backward pass.
        part.set_reshard_after_forward(part is not model and part.reshards_after_forward, recurse=False)
