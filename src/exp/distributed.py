"""A worker's device and process group: kernels, seeds, random generators; rank, world size, and collectives.

The DDP wrapper exchanges the gradients. All other values that ranks exchange (metrics, random states, errors) are small
CPU values. They use a process group that supports CPU tensors, never that of the device.

If the device's own collectives are missing, gradients and sums are copied to the CPU and exchanged over gloo; this is
called staging. Other functions of ``torch.distributed`` do not accept tensors of the device then. Staging is slow, so
it is used only if the configuration asks for it or allows it. Every rank logs it, and counts the copied bytes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError, ExpError, RunError, UnavailableError
from exp.hardware.backend import PROCESS_GROUP_VARIABLE, Collectives, device_backend
from exp.hardware.compat import (
    TORCH_VERSION,
    plain_attention,
    supports_compilation,
    supports_gradient_hooks,
    supports_portable_operators,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from exp.hardware.backend import Backend

logger = logging.getLogger(__name__)

GLOO_STAGED = "gloo, staged through the CPU"
"""Name of the fallback in messages and records."""
_LARGEST_DIFFERENCE = 1e-2
"""Allowed difference between compiled and eager results, relative to the largest value: products may have mantissas of
10 bits."""


@dataclass(eq=False)
class Distributed:
    """Rank, world size, and collectives for CPU values, which do nothing if there is one process.

    Attributes:
        rank: global rank of this process.
        world_size: number of processes.
        cpu_group: the process group for CPU tensors; None: the default group.
        fallback: result of :func:`negotiate_fallback`.
        process_group: name of the process-group backend for the device's tensors, for messages and records.
    """

    rank: int = 0
    world_size: int = 1
    cpu_group: Any = None
    fallback: dict[str, Any] | None = None
    process_group: str = "none"

    @classmethod
    def create(
        cls, backend: Backend, store: Store, rank: int, world_size: int, timeout: timedelta, mixed: bool = False
    ) -> Distributed:
        """Make the process group of ``backend``, and a gloo group for CPU values unless it has one beside the device's.

        Args:
            backend: the backend of this worker; its ``collectives`` are replaced if the fallback is used.
            store: key-value store that all ranks can reach.
            rank: global rank of this process.
            world_size: number of processes.
            timeout: of all collectives.
            mixed: whether ranks may have other backends: then tensors of every device go through the CPU.

        Raises:
            UnavailableError: the device's collectives are missing on a rank, and no fallback is allowed.
        """
        if mixed:
            used = {"wanted": backend.collectives.process_group, "used": GLOO_STAGED}
            fallback: dict[str, Any] | None = {**used, "reason": "launcher.mixed=true"}
        else:
            fallback = negotiate_fallback(backend, store, rank, world_size)
        process_group = backend.process_group()
        if fallback is not None:
            backend.collectives, process_group = StagedCollectives(), GLOO_STAGED
        device = backend.device_type
        how: Any = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        backend.collectives.init(process_group, device, **how)
        group = None
        if not dist.is_initialized():
            # The vendor has its own collectives, outside torch.distributed; CPU values use gloo.
            dist.init_process_group("gloo", **how)
        elif fallback is not None or not _composite_has_cpu() or device_backend(process_group, device) == "gloo":
            # Not the group of the gradients: if a rank hangs in their exchange, values of others must not meet it.
            group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(rank, world_size, group, fallback, process_group)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Add up a CPU tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(value, group=self.cpu_group)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Collect ``value`` of every rank, by rank; small picklable objects only."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.cpu_group)
        return gathered

    def gather_to_main(self, value: Any) -> list[Any]:
        """Like :meth:`gather`, on rank 0; other ranks get an empty list, so that nothing grows with their square."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size if self.is_main else []
        dist.gather_object(value, gathered or None, dst=0, group=self.cpu_group)
        return gathered

    def on_main(self, function: Callable[[], object]) -> None:
        """Call a function on rank 0. If it raises an ExpError, every rank raises it, so that none waits. A collective.

        Raises:
            ExpError: the error of the function.
        """
        trouble = None
        try:
            if self.is_main:
                function()
        except ExpError as error:
            trouble = error
        trouble = self.gather(trouble)[0]
        if trouble is not None:
            raise trouble

    def barrier(self) -> None:
        """Wait for all ranks. An all-reduce, because torch's own barrier may pick a wrong device."""
        self.sum(torch.zeros(1))


def process_group_source(backend: Backend) -> str:
    """Where the name of the process group (:meth:`exp.hardware.backend.Backend.process_group`) is set, for messages."""
    if backend.requested_process_group:
        return "backend.process_group"
    return PROCESS_GROUP_VARIABLE if os.environ.get(PROCESS_GROUP_VARIABLE) else "the backend"


def negotiate_fallback(backend: Backend, store: Store, rank: int, world_size: int) -> dict[str, Any] | None:
    """Decide before any process group is made, and alike on all ranks, whether device tensors go through the CPU.

    They do if the configuration (or ``TORCH_DISTRIBUTED_BACKEND``) names gloo, and gloo does not support the device;
    and, with ``backend.allow_fallback``, if the device's own collectives are missing on a rank.

    Args:
        backend: the backend of this worker.
        store: key-value store that all ranks can reach.
        rank: global rank of this process.
        world_size: number of processes.

    Returns:
        ``{"wanted", "used", "reason"}``, the same on every rank; None: no fallback.

    Raises:
        UnavailableError: the collectives are missing on a rank, and no fallback is allowed; raised on every rank.
    """
    requested = backend.process_group()
    if backend.device_type == "cpu" or backend.collectives.gloo:
        return None
    if device_backend(requested, backend.device_type) == "gloo":
        used = {"wanted": backend.collectives.process_group, "used": GLOO_STAGED}
        return {**used, "reason": f"{process_group_source(backend)} names {requested}"}
    store.set(f"collectives/{rank}", backend.collectives.missing(requested, backend.device_type) or "")
    failures = [store.get(f"collectives/{other}").decode() for other in range(world_size)]
    missing = [f"rank {other}: {verdict}" for other, verdict in enumerate(failures) if verdict]
    if not missing:
        return None
    if not backend.allow_fallback:
        raise UnavailableError(
            f"process group '{requested}' cannot be made: {missing[0]}",
            "install what is missing, or copy tensors "
            "through the CPU, which is slow, with backend.allow_fallback=true or backend.process_group=gloo",
        )
    return {"wanted": requested, "used": GLOO_STAGED, "reason": "; ".join(missing)}


def _composite_has_cpu() -> bool:
    """Whether the default process group also has a backend for CPU tensors (torch 2.0 and later)."""
    if "cpu:gloo" in dist.get_backend():
        return True
    config = getattr(dist, "get_backend_config", None)
    return config is not None and "cpu:gloo" in str(config())


@torch.no_grad()
def _through_cpu(tensor: torch.Tensor, collective: Callable[..., object], **options: Any) -> None:
    """Run a collective on a CPU copy of a tensor of any device, and copy the result back."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    collective(host, **options)
    tensor.copy_(host)


class StagedCollectives(Collectives):
    """Collectives that copy tensors through the CPU; the default process group is gloo."""

    def __init__(self) -> None:
        super().__init__("gloo")
        self._thread: ThreadPoolExecutor | None = None

    def init(self, process_group: str, device_type: str, **how: Any) -> None:
        """Make the default process group."""
        dist.init_process_group("gloo", **how)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        _through_cpu(tensor, dist.all_reduce)
        self.staged_bytes += 2 * tensor.numel() * tensor.element_size() * (tensor.device.type != "cpu")

    def start_all_reduce(self, tensor: torch.Tensor) -> Future[tuple[torch.Tensor, Any]]:
        """Begin a sum over all ranks, in a thread: the copy to the CPU waits for the device, and this thread goes on.

        Args:
            tensor: on any device; it must not change any more, and may be overwritten.

        Returns:
            Gives the sum on the CPU and the work after which it is complete; sums complete in the order of the calls.
        """
        self.staged_bytes += 2 * tensor.numel() * tensor.element_size() * (tensor.device.type != "cpu")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        return self._thread.submit(_start_sum, tensor)

    @property
    def ddp_class(self) -> type:
        """The class that copies gradients through the CPU, if possible during the backward pass."""
        return StagedDataParallel if supports_gradient_hooks() else AveragingDataParallel


def _start_sum(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
    host = tensor.to("cpu")
    return host, dist.all_reduce(host, async_op=True)


class AveragingDataParallel(nn.Module):
    """Data-parallel training that averages gradients before each update, not in the backward pass.

    So a step may have any number of forward and backward passes, of any part of the model. Each rank has buffers of its
    own. A parameter without a gradient counts as zero; if no rank has a gradient, it stays without one.

    Args:
        module: the model on its device; its parameters and buffers are overwritten by those of rank 0.
        device_ids: ignored, as all other arguments of DDP that its callers set.
        output_device: ignored.
        broadcast_buffers: must be False.
        find_unused_parameters: ignored: a parameter may always be unused.
        bucket_cap_mb: largest size of the tensors that are averaged together, in MiB.
        all_reduce: sums a tensor of the device over all ranks, in place (:class:`exp.hardware.backend.Collectives`).
        group: the process group for CPU tensors; None: the default group.

    Raises:
        ConfigError: ``broadcast_buffers`` is set.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        bucket_cap_mb: int = 25,
        *,
        all_reduce: Callable[[torch.Tensor], None],
        group: Any = None,
    ) -> None:
        super().__init__()
        if broadcast_buffers:
            raise ConfigError(
                "wrapper.broadcast_buffers=true: gradients are averaged without DDP here, so each rank has buffers of "
                "its own",
                "leave it out",
            )
        self.module, self.group = module, group
        self._all_reduce = all_reduce
        self._bucket_bytes = bucket_cap_mb * 2**20
        for tensor in (*module.parameters(), *module.buffers()):
            _through_cpu(tensor, dist.broadcast, src=0, group=group)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """Average the gradients over all ranks, in place; called before each update.

        Raises:
            RunError: another rank makes fewer updates in this step.
        """
        for bucket in self._in_buckets(self._with_gradients()):
            flat = _flat_gradients(bucket)
            self._all_reduce(flat)
            _set_gradients(bucket, flat)

    def _with_gradients(self) -> list[nn.Parameter]:
        """The parameters of which any rank has a gradient, in an order that is the same on all ranks."""
        parameters = [*self.module.parameters()]
        having = self._sum_flags(True, [parameter.grad is not None for parameter in parameters])
        return [parameter for parameter, ranks in zip(parameters, having) if ranks]

    def _in_buckets(self, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Divide parameters into lists of one dtype and at most the configured size, in their order."""
        buckets: list[list[nn.Parameter]] = []
        size = 0
        for parameter in parameters:
            size += parameter.numel() * parameter.element_size()
            if not buckets or size > self._bucket_bytes or buckets[-1][0].dtype != parameter.dtype:
                buckets.append([])
                size = parameter.numel() * parameter.element_size()
            buckets[-1].append(parameter)
        return buckets

    def end_step(self) -> None:
        """Check that all ranks have made the same number of updates in this step. A collective.

        Raises:
            RunError: they have not.
        """
        self._sum_flags(False, [False] * sum(1 for _ in self.module.parameters()))

    def _sum_flags(self, updates: bool, flags: list[bool]) -> list[int]:
        """Number of ranks with each flag; refuses ranks of which only some update the weights now."""
        counts = torch.tensor([updates, *flags], dtype=torch.int32)  # on the CPU, so no rank waits for its device
        dist.all_reduce(counts, group=self.group)
        updating, *having = counts.tolist()
        if updating != updates * dist.get_world_size():
            raise RunError(
                f"this rank updates the weights {'more' if updates else 'less'} often in a step than another rank",
                "the train_step of the model must make as many updates on every rank",
            )
        return having


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The gradients one after the other, in one dimension; zeros for a parameter without one."""
    return torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters])


def _set_gradients(parameters: Sequence[nn.Parameter], sums: torch.Tensor) -> None:
    """Set the gradients to means over ranks; ``sums``: of what :func:`_flat_gradients` returns; are overwritten."""
    sums.div_(dist.get_world_size())
    for parameter, mean in zip(parameters, sums.split([parameter.numel() for parameter in parameters])):
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(mean.view_as(parameter))


class StagedDataParallel(AveragingDataParallel):
    """Averages gradients through the CPU, while the backward pass computes others.

    Gradients are divided into buckets, last layers first, which are the same on all ranks, whatever their devices. The
    sum of a bucket begins when its gradients and those of all buckets before it are complete; so all ranks begin the
    sums in the same order. What has not begun in the backward pass of a :meth:`forward`, begins in
    :meth:`exchange_gradients`.

    Args:
        module: the model on its device.
        start_all_reduce: :meth:`StagedCollectives.start_all_reduce`.
        group: a process group for CPU tensors other than the default one, which has the gradients.
        **options: of :class:`AveragingDataParallel`.
    """

    def __init__(
        self, module: nn.Module, *, start_all_reduce: Callable[[torch.Tensor], Any], group: Any, **options: Any
    ) -> None:
        super().__init__(module, group=group, **options)
        self._start_all_reduce = start_all_reduce
        self._buckets = self._in_buckets([each for each in module.parameters() if each.requires_grad][::-1])
        self._sums: list[Any] = []  # of the buckets that have begun
        self._complete: list[set[nn.Parameter]] = [set() for _ in self._buckets]
        self._synchronizes, self._is_armed = True, False
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                hook: Any = functools.partial(self._arrive, number)
                parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; the next backward pass exchanges gradients, unless in :meth:`no_sync`."""
        self._is_armed = self._synchronizes and torch.is_grad_enabled()
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of forward passes whose gradients are only accumulated, as that of DDP."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    @torch.no_grad()
    def _arrive(self, number: int, parameter: nn.Parameter) -> None:
        """Begin the sums of the buckets that are complete with this parameter's gradient.

        Raises:
            RunError: the gradient changes after its sum has begun.
        """
        if not self._is_armed:
            return
        if number < len(self._sums):
            raise RunError(
                "a gradient was computed twice in one step, and its first value is exchanged already",
                "use one backward pass per step, without reentrant checkpointing of shared weights",
            )
        self._complete[number].add(parameter)
        while len(self._sums) < len(self._buckets):
            bucket = self._buckets[len(self._sums)]
            if len(self._complete[len(self._sums)]) < len(bucket):
                break
            self._sums.append(self._start_all_reduce(_flat_gradients(bucket)))

    @torch.no_grad()
    def exchange_gradients(self) -> None:
        """Average the gradients over all ranks, in place; called before each update.

        Raises:
            RunError: another rank makes fewer updates in this step.
        """
        self._is_armed = False
        parameters = dict.fromkeys(self._with_gradients())
        for bucket in self._buckets[len(self._sums) :]:
            self._sums.append(self._start_all_reduce(_flat_gradients(bucket)))
        for bucket, started in zip(self._buckets, self._sums):
            sums, work = started.result()
            work.wait()
            _set_gradients(bucket, sums.to(bucket[0].device))
            for parameter in bucket:
                if parameter not in parameters:  # no rank has a gradient
                    parameter.grad = None
        frozen_at_first = parameters.keys() - {parameter for bucket in self._buckets for parameter in bucket}
        for bucket in self._in_buckets(parameter for parameter in parameters if parameter in frozen_at_first):
            flat = _flat_gradients(bucket)
            self._all_reduce(flat)
            _set_gradients(bucket, flat)
        self._sums.clear()
        for complete in self._complete:
            complete.clear()


# -- the device --------------------------------------------------------------------------------------------------------


class Kernels(contextlib.ExitStack):
    """The kernels of operators that a device lacks, as far as its backend lists them, to avoid CPU fallbacks.

    These operators get portable kernels (:mod:`exp.hardware.operators`, imported only if needed). If the device has no
    fused attention in this precision, attention uses the plain form. Both apply to the whole process, for as long as
    this object lives.

    Args:
        backend: the backend of this worker, with the device selected.
        device: the device of this worker.
        precision: one of :data:`exp.config.schema.PRECISIONS`.

    Attributes:
        portable: ATen names of the operators that have a portable kernel.
    """

    def __init__(self, backend: Backend, device: torch.device, precision: str) -> None:
        super().__init__()
        self.portable: frozenset[str] = frozenset()
        if not supports_portable_operators():
            return
        if precision not in backend.capabilities.fused_attention:
            self.enter_context(plain_attention())
            logger.info("attention without fused kernels: %s has none in %s", device, precision)
        missing = backend.capabilities.lacking_operators
        if missing:
            from exp.hardware.operators import PortableKernels

            self.library = PortableKernels(device.type, missing)
            self.portable = frozenset(self.library.names)
            text = "%s lacks %d overloads of operators; %d have portable kernels now"
            logger.info(text, device, len(missing), len(self.portable))


def check_compilation(backend: Backend, device: torch.device) -> None:
    """Refuse ``compile=true`` if torch cannot compile for this device, before the data are read.

    Unless the backend rules it out, torch compiles the forward and backward pass of a few common layers. This fails if
    something is missing, such as a compiler, or a code generator for this type of device. The result and the gradients
    must equal those of the same layers without compilation.

    Also sets the number of torch's compile processes to the number of this worker's threads, unless the user has set
    ``TORCHINDUCTOR_COMPILE_THREADS``; by default each worker would start up to one per core.

    Args:
        backend: the backend of this worker, with the device selected.
        device: the device of this worker.

    Raises:
        ConfigError: torch cannot compile, or compiled code gives other results; the message has the reason.
    """
    if not supports_compilation():
        reason: str | None = f"it needs torch 2.3 or later, and this is {'.'.join(map(str, TORCH_VERSION))}"
    else:
        reason = backend.capabilities.uncompiled or _why_not_compiled(device)
    if reason is not None:
        raise ConfigError(f"compile=true on {device} ({backend.name}): {reason}", "set compile=false")


def _why_not_compiled(device: torch.device) -> str | None:
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        from torch._inductor import config  # not the variable: the fork server has imported torch._inductor already

        config.compile_threads = torch.get_num_threads()
    plain = _outputs_and_grads(_reference_layers, device)
    try:
        compiled = _outputs_and_grads(torch.compile(_reference_layers), device)
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        cause = getattr(error, "inner_exception", error)  # up to torch 2.6 the outer error does not have the reason
        first = str(cause).strip().splitlines() or [""]
        return f"torch cannot compile here: {type(cause).__name__}: {first[0]}"
    for name, expected in plain.items():
        off = float((compiled.get(name, expected + math.inf) - expected).abs().max() / expected.abs().max())
        if not off <= _LARGEST_DIFFERENCE:
            return f"compiled code gives wrong results here: {name} differs by {off:.3g} of its largest value"
    return None


def _reference_layers(tokens: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A 0-dim loss of layer norm, GELU, attention and softmax over ``tokens`` (B, N, C)."""
    hidden = F.gelu(F.layer_norm(tokens @ weight, scale.shape, scale))
    mixed = (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden
    return F.mse_loss(mixed.mean(1).log_softmax(-1), tokens[:, 0])


def _outputs_and_grads(layers: Callable[..., torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The loss and the gradients of the layers for fixed inputs, on the CPU, by name."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens": (4, 8, 16), "weight": (16, 16), "scale": (16,)}
    inputs: Any = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    loss = layers(*(tensor.requires_grad_() for tensor in inputs.values()))
    loss.backward()
    return {
        "the loss": loss.detach().cpu(),
        **{f"the gradient of {k}": tensor.grad.cpu() for k, tensor in inputs.items()},
    }


def seed_everything(seed: int, backend: Backend) -> None:
    """Seed Python, NumPy, torch's CPU generator and the device's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    seed_all = getattr(backend.torch_module, "manual_seed_all", None) or getattr(
        backend.torch_module, "manual_seed", None
    )
    if seed_all is not None:
        seed_all(seed)


def device_state(backend: Backend) -> torch.Tensor | None:
    """State of the device's random generator, a uint8 CPU tensor; None if the device has no generator of its own."""
    if not hasattr(backend.torch_module, "get_rng_state"):
        return None
    state: torch.Tensor = backend.torch_module.get_rng_state()
    return state.cpu()


def rng_state(backend: Backend) -> dict[str, Any]:
    """The states of the random generators of torch, the device, Python and NumPy in this process, as plain data."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": device_state(backend),
        "device_type": backend.device_type,
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def set_rng_state(state: Mapping[str, Any], backend: Backend) -> None:
    """Restore the states that :func:`rng_state` returned; that of a device only on the same type of device."""
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and state.get("device_type", backend.device_type) == backend.device_type:
        backend.torch_module.set_rng_state(state["device"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
