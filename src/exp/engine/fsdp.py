"""Fully sharded data parallelism, by torch's ``fully_shard``: each rank keeps a part of weights, gradients and moments.

The model is sharded block by block before the optimizer is built, so that the device never holds it whole: a block's
weights come together for its forward and its backward pass, and its gradients go to the ranks that keep them.
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
        reshard_after_forward: let go of a block's weights after its forward pass, and gather them again for its
            backward pass; false: half the gathering, and the whole model's weights on each device in between.
        compile: compile each block; what gathers and scatters stays between them.

    Raises:
        ConfigError: the precision does not go with sharding.
    """

    compiles = True

    def __init__(
        self,
        precision: str = "fp32",
        reshard_after_forward: bool = True,
        compile: bool = False,  # noqa: A002 - as the key is called
    ) -> None:
        if precision == "fp16":
            raise ConfigError(
                "wrapper=fsdp does not go with precision=fp16, whose loss scaler would see one rank's shards only; use "
                "precision=bf16, or wrapper=ddp"
            )
        self.reshard_after_forward = reshard_after_forward
        self.compile = compile

    def place(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """Shard a model; a block at a time is whole on the device.

        Raises:
            ConfigError: two names of the model are one parameter.
            UnavailableError: this torch, or the collectives of this backend, cannot.
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
            if self.compile:  # not the call, in which torch gathers: equal blocks share what is compiled
                unit.forward = torch.compile(unit.forward)
        _from_rank_0(model, device)  # the rest
        _shard(fully_shard, model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not backend.collectives.averages:
                module.set_force_sum_reduction_for_comms(True)
        setattr(model, SHARDED_MARK, True)
        return model

    def wrap(self, model: nn.Module, backend: Backend, device: torch.device) -> nn.Module:
        """The model itself, which :meth:`place` has sharded."""
        return model


@torch.no_grad()
def _from_rank_0(module: nn.Module, device: torch.device) -> None:
    """Bring what of a module is not sharded yet to the device, with rank 0's values, as DDP does it."""
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        if not hasattr(tensor, "to_local"):
            value = tensor.contiguous()
            torch.distributed.broadcast(value, 0)
            tensor.copy_(value)


def _shard(fully_shard: Any, module: nn.Module, **options: Any) -> None:
    """Shard a module. It gets a class of torch's, which goes by the name of its own: messages and checks name that."""
    own = type(module)
    fully_shard(module, **options)
    if type(module) is not own:
        type(module).__module__, type(module).__qualname__ = own.__module__, own.__qualname__


def _refuse_tied(model: nn.Module) -> None:
    """A parameter of two names would be sharded once, and be two after the first step, or in a checkpoint.

    Raises:
        ConfigError: there is one.
    """
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names.setdefault(parameter, name) != name:
            raise ConfigError(
                f"wrapper=fsdp: {names[parameter]} and {name} of the model are one parameter, which cannot be sharded "
                f"with both; use wrapper=ddp (see {_PAGE})"
            )


def _why_not(backend: Backend) -> str | None:
    if not supports_full_sharding():
        return f"torch {torch.__version__} is too old for fully_shard and its checkpoints, which take torch >= 2.7"
    if isinstance(backend.collectives, StagedCollectives):
        return f"backend={backend.name} carries tensors through the CPU here: no way to gather weights at every block"
    from torch.distributed.fsdp import FSDPModule

    if not backend.collectives.averages and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        return (
            f"the collectives of backend={backend.name} have no mean, and torch {torch.__version__} cannot take the sum"
        )
    return None


def units_of(model: nn.Module) -> list[nn.Module]:
    """The submodules whose weights come together at a time.

    Args:
        model: where it has ``sharded_units()``, that says which; else they are the members of the outermost lists of
            modules (``nn.ModuleList``, ``nn.Sequential``) of which at least two are of one class and have parameters.
            None is part of another, and each is run by calling it.
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
        # A list cannot be run: what is called is below it.
        found += [child for child in children if not isinstance(child, (nn.ModuleList, nn.ModuleDict))]
        children = [child for child in children if isinstance(child, (nn.ModuleList, nn.ModuleDict))]
    for child in children:
        _collect(child, found)


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """The parameters of a sharded model by name: DTensors, of which this rank has a part.

    A forward pass may have left some of them whole; what they are is their rank's part again after this.
    """
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()
    return dict(model.named_parameters())


def local_part(value: Any) -> Any:
    """Of a sharded tensor what this rank has of it; anything else as it is."""
    return value.to_local() if hasattr(value, "to_local") else value


def sharded_like(local: torch.Tensor, like: Any, mesh: Any = None) -> Any:
    """This rank's part of a tensor that is sharded as ``like``, on that one's mesh or another."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, mesh or like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_like(whole: torch.Tensor, like: Any) -> Any:
    """This rank's rows of a tensor: those of rank r of n begin at row ``r * ceil(rows / n)``."""
    rows, mesh = len(whole), like.device_mesh
    first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
    return sharded_like(whole.narrow(0, first, len(like.to_local())).to(like.device, copy=True), like)


@torch.no_grad()
def clip_grad_norm(parameters: Sequence[nn.Parameter], limit: float, backend: Backend) -> torch.Tensor:
    """Scale gradients so that their L2 norm over all shards is ``limit`` at most; a collective.

    Args:
        parameters: all of them sharded.
        limit: the largest norm.
        backend: adds up over the ranks.

    Returns:
        The norm before, 0-dim, on the device; the same on every rank.
    """
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device)
    square = nn.utils.get_total_norm(gradients).float().square()
    backend.collectives.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))  # as torch's own
    return norm


def refuse_hooks(hooks: Iterable[Any]) -> None:
    """Hooks that keep or save weights of their own see the whole model, which no rank has.

    Raises:
        ConfigError: one of them does.
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
    """Evaluate a sharded model with whole weights on every rank: ranks have different numbers of samples, and a pass
    that gathers is a collective. Nothing is done where weights are whole already.

    Args:
        model: without a wrapper.
    """
    parts: list[Any] = [module for module in model.modules() if is_sharded(model) and hasattr(module, "unshard")]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        part.reshard()
        # The outermost module's weights stay between the two passes.
        part.set_reshard_after_forward(part is not model and part.reshards_after_forward, recurse=False)
