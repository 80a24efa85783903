"""Fully sharded data parallelism with torch's ``fully_shard``: each rank has a part of weights, gradients and moments.

The model is sharded block by block before the optimizer is built, so that the device never holds the whole model. The
weights of a block are gathered for its forward and its backward pass, and its gradients are reduced to the ranks that
have their part.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Sequence

import torch
from torch import nn

from exp.engine.distributed import StagedCollectives
from exp.engine.wrapper import SHARDED_MARK, Wrapper, is_sharded
from exp.errors import ConfigError, UnavailableError
from exp.hardware.compat import supports_full_sharding

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = [
    "FullyShard", "clip_grad_norm", "is_sharded", "local_part", "part_like", "refuse_hooks", "sharded_like",
    "sharded_parameters", "units_of", "whole",
]  # fmt: skip

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

    compiles = True

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
            ConfigError: two names of the model are the same parameter.
            UnavailableError: this version of torch, or the collectives of this backend, do not support sharding.
        """
        reason = _why_not(backend)
        if reason is not None:
            raise UnavailableError(f"wrapper=fsdp: {reason}; use wrapper=ddp (see {_PAGE})")
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
        setattr(model, SHARDED_MARK, True)
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


def _why_not(backend: Backend) -> str | None:
    if not supports_full_sharding():
        return f"torch {torch.__version__} is too old for fully_shard and its checkpoints, which need torch >= 2.7"
    if isinstance(backend.collectives, StagedCollectives):
        return f"backend={backend.name} copies tensors through the CPU here, which cannot gather the weights of blocks"
    from torch.distributed.fsdp import FSDPModule

    if not backend.collectives.averages and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        return (
            f"the collectives of backend={backend.name} have no mean, and torch {torch.__version__} cannot use the sum"
        )
    return None


def units_of(model: nn.Module) -> list[nn.Module]:
    """The submodules (blocks) that are sharded one by one; the weights of each are gathered at a time.

    Args:
        model: if it has ``sharded_units()``, that is used. Otherwise the units are the members with parameters of the
            outermost lists of modules (``nn.ModuleList``, ``nn.Sequential``) with two or more members of one class.

    Returns:
        Modules of which none contains another, and each is run by calling it.
    """
    own: Any = getattr(model, "sharded_units", None)
    if own is not None:
        return list(own())
    found: list[nn.Module] = []
    _collect(model, found)
    return found


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    repeated = len(children) > len({type(child) for child in children})
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and repeated:
        # A list cannot be called, so look at its members instead.
        found += [child for child in children if not isinstance(child, (nn.ModuleList, nn.ModuleDict))]
        children = [child for child in children if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    for child in children:
        _collect(child, found)


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
    """Shard a whole tensor like the DTensor ``like``: this rank copies its rows; no collective.

    The rows of rank r of n start at row ``r * ceil(rows / n)``, as in torch's ``Shard(0)``.
    """
    rows, mesh = len(whole), like.device_mesh
    first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return sharded_like(whole.narrow(0, first, len(like.to_local())).to(like.device, copy=True), like)


@torch.no_grad()
def clip_grad_norm(parameters: Sequence[nn.Parameter], limit: float, backend: Backend) -> torch.Tensor:
    """Scale gradients in place so that their L2 norm over all shards is at most ``limit``. A collective.

    Args:
        parameters: the parameters, all sharded.
        limit: the largest norm.
        backend: its collectives add up the squared norms of the ranks.

    Returns:
        The norm before scaling, a 0-dim tensor on the device, the same on every rank.
    """
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    square = nn.utils.get_total_norm(gradients).float().square()
    backend.collectives.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))  # like nn.utils.clip_grad_norm_
    return norm


def refuse_hooks(hooks: Iterable[Any]) -> None:
    """Refuse hooks that save or load weights of their own: they need the whole model, which no rank has.

    Raises:
        ConfigError: there is such a hook.
    """
    for hook in hooks:
        if not type(hook).__module__.startswith("exp.") and {"before_save_checkpoint", "after_load_checkpoint"} & set(
            hook.get_triggered_stages()
        ):
            raise ConfigError(
                f"hooks: {type(hook).__name__} puts weights of its own into checkpoints, and with wrapper=fsdp no rank "
                "has them whole; leave it out, or use wrapper=ddp"
            )


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
