"""Shards a model over the ranks (FSDP), by torch's ``fully_shard``.

Each rank has a part of weights, gradients and moments. The model is sharded block by block before the optimizer is
built, so that the device never holds the whole model. The weights of a block are gathered for its forward and its
backward pass, and its gradients are reduced to the ranks that have their part.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch import nn

from exp.distributed import StagedCollectives
from exp.engine.wrapper import _SHARDED_MARK, Wrapper, has_own_step, is_sharded
from exp.errors import ConfigError, UnavailableError, qualified_name
from exp.hardware.compat import supports_full_sharding

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

_PAGE = "docs/hardware/estimate.md"


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

    def move_to_device(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
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
            _broadcast_from_rank0(unit, device)
            _shard(fully_shard, unit, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
            unit.reshards_after_forward = self.reshard_after_forward
            if self.compile:  # only forward, since __call__ gathers the weights; equal blocks share the compiled code
                unit.forward = torch.compile(unit.forward)
        _broadcast_from_rank0(model, device)  # the rest
        _shard(fully_shard, model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not backend.collectives.averages:
                module.set_force_sum_reduction_for_comms(True)
        setattr(model, _SHARDED_MARK, True)
        return model

    def wrap(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """Return the model itself, which :meth:`move_to_device` has sharded."""
        return model


@torch.no_grad()
def _broadcast_from_rank0(module: nn.Module, device: torch.device) -> None:
    """Move the tensors of a module that are not sharded yet to the device, with the values of rank 0, as DDP does."""
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if not hasattr(tensor, "to_local"):
            value = tensor.contiguous()
            torch.distributed.broadcast(value, 0)
            tensor.copy_(value)


def _shard(fully_shard: Any, module: nn.Module, **options: Any) -> None:
    """Shard a module. Torch replaces its class; the new class gets the old name, which messages and checks use."""
    original_class = type(module)
    fully_shard(module, **options)
    if type(module) is not original_class:
        type(module).__module__, type(module).__qualname__ = original_class.__module__, original_class.__qualname__


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
    sharded_units: Any = getattr(model, "sharded_units", None)
    return list(_repeated(model) if sharded_units is None else sharded_units())


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


def dtensor_like(local: torch.Tensor, like: Any, mesh: Any = None) -> Any:
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


def shard_like(tensor: torch.Tensor, like: Any) -> Any:
    """Shard a whole tensor like the DTensor ``like``: this rank copies its part; no collective."""
    from torch.distributed.tensor import distribute_tensor

    part = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return part.clone()  # frees the other parts


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
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
        # As in move_to_device(): the outermost module keeps its weights between the forward and the backward pass.
        part.set_reshard_after_forward(part is not model and part.reshards_after_forward, recurse=False)
