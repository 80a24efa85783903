"""A training step and a validation batch on torch's meta device, whose tensors have a shape, a type and no memory.

What is alive at the worst moment is counted as a card's allocator would count it (:class:`MemoryTracker`), in the form
that a card computes in (:class:`AsOnCard`); what a wrapper adds or divides is arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import nn

from exp.config.resolve import create, resolve
from exp.data.base import Data, ExampleBatch, split_of
from exp.data.loader import map_tensors, tensors_of
from exp.engine.optim import build_optimizer
from exp.engine.wrapper import units_of
from exp.errors import ConfigError, DataError, ExpError, UnavailableError, asked, told
from exp.hardware.collectives import Collectives
from exp.hardware.compat import TORCH_VERSION, backward_below_modes, every_operator, supports_estimates
from exp.hardware.numerics import matrix_rate

if TYPE_CHECKING:
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = [
    "HEADROOM", "KINDS", "LEAST_SECONDS", "Tracer", "as_batch", "fitting_batch", "largest_batch", "largest_sample",
    "model_on_meta", "trace_flops", "training_rate", "what_fits",
]  # fmt: skip

logger = logging.getLogger(__name__)

KINDS = ("parameters", "gradients", "optimizer", "wrapper", "buffers", "data", "batch", "activations")
"""Kinds of memory. ``activations`` is whatever a pass makes: what is saved for backward, and temporary tensors."""
HEADROOM = 0.1
"""Share of a card that is left to what is not counted, where nobody has set another."""
LEAST_SECONDS = 5.0
"""Of training; a shorter one is mostly its own beginning, and not worth the tenths of a second that counting takes."""
_LARGEST = 2**16
"""Samples; a larger batch is not looked for."""
META = torch.device("meta")
_PAGE = 512
"""Bytes; cards allocate memory in multiples of it."""
_SAMPLES = 8
"""Samples of a split that are looked at, spread evenly over it: images may have different sizes."""


def _paged(count: float) -> int:
    return math.ceil(count / _PAGE) * _PAGE


class MemoryTracker:
    """Counts storages on the meta device from the operator that makes them to the end of their last tensor.

    What an operator takes inside, such as the workspace of a convolution, is not seen; that of portable kernels is.

    Args:
        on_card: whose autocast does not reach into portable kernels.

    Attributes:
        kind: one of :data:`KINDS`, for new storages.
        share: part of new storages that counts, where a rank keeps only a shard.
        now: bytes that are alive, by kind.
        at_peak: the same when most were alive.
        kernels: portable operators (:mod:`exp.hardware.operators`) that replace those of torch, by ATen name.
    """

    def __init__(self, on_card: AsOnCard) -> None:
        self.kind, self.share, self._on_card = "activations", 1.0, on_card
        self.now = dict.fromkeys(KINDS, 0)
        self.at_peak = dict(self.now)
        self.kernels: dict[str, Callable[..., Any]] = {}
        self._alive: dict[int, tuple[str, int, Any]] = {}

    def counting(self) -> ContextManager[Any]:
        """Context in which every operator's results are counted."""
        return every_operator(self._call)

    def hold(self, kind: str, size: int) -> None:
        """Count ``size`` bytes that no operator makes, such as a wrapper's buckets."""
        self.now[kind] += size
        if sum(self.now.values()) > sum(self.at_peak.values()):
            self.at_peak = dict(self.now)

    def peak(self) -> dict[str, int]:
        """The worst moment: ``total``, and by kind."""
        return {"total": sum(self.at_peak.values()), **self.at_peak}

    def count(self, values: Any, kind: str, share: float = 1.0, known: bool = True) -> None:
        """Count storages as ``kind``.

        Args:
            values: tensors, also within lists, tuples and mappings.
            kind: one of :data:`KINDS`.
            share: part of their bytes that counts.
            known: whether storages that are counted already change their kind.
        """
        for tensor in tensors_of(values):
            if not tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = id(storage)  # torch keeps this object for as long as the storage, whoever refers to it
            if key in self._alive:
                if not known:
                    continue
                self._drop(key)
            size = _paged(storage.nbytes() * share)
            self._alive[key] = kind, size, weakref.ref(storage, functools.partial(self._drop, key))
            self.hold(kind, size)

    def _drop(self, key: int, ended: Any = None) -> None:
        kind, size, _ = self._alive.pop(key)
        self.now[kind] -= size

    def _call(self, operator: Any, arguments: Any, keywords: Any) -> Any:
        kernel = self.kernels.get(operator.overloadpacket.__name__)
        if kernel is None:
            result = operator(*arguments, **keywords)
        else:  # its own calls are not cast: the dispatcher comes to it after autocast
            with self.counting(), self._on_card.autocast(False):
                result = kernel(*arguments, **keywords)
        self.count(result, self.kind, self.share, known=False)
        return result


# What torch.autocast runs in half precision, and what in float32, by the names of torch's documentation; less what no
# model of ours comes near.
_IN_HALF = """
    __matmul__ addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d einsum
    linear matmul mm mv prelu scaled_dot_product_attention
"""
_IN_FULL = """
    __pow__ binary_cross_entropy_with_logits cdist cosine_similarity cross_entropy cumsum exp group_norm huber_loss
    kl_div l1_loss layer_norm log log1p log_softmax logsumexp mse_loss nll_loss norm normalize pow prod rsqrt
    smooth_l1_loss softmax softplus sum
"""
_HALF, _FULL = frozenset(_IN_HALF.split()), frozenset(_IN_FULL.split())
_FunctionMode: Any = getattr(torch.overrides, "TorchFunctionMode", object)  # torch >= 1.13


class AsOnCard(_FunctionMode):
    """Context in which torch's functions on the meta device take the form that they have on a card.

    The meta device has no autocast, and none of the fused forms that decide how much a step keeps.

    Args:
        precision: one of :data:`exp.hardware.backend.PRECISIONS`; :meth:`autocast` has it.
        fused_attention: whether attention without dropout is fused; with dropout it is counted unfused.
    """

    def __init__(self, precision: str, fused_attention: bool) -> None:
        super().__init__()
        self._half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._casts, self._fused = False, fused_attention
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def autocast(self, enabled: bool = True) -> Iterator[None]:
        """As torch's: weights are cast once, and kept to the end of the outermost context."""
        before, self._casts = self._casts, enabled and self._half is not None
        try:
            yield
        finally:
            self._casts = before
            if not before:
                self._weights.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self._casts and name in _HALF:
            args, kwargs = self._cast((args, kwargs), self._half)
        elif self._casts and name in _FULL and "dtype" not in kwargs:
            args, kwargs = self._cast((args, kwargs), torch.float32)
        if function is F.dropout:
            return _dropout(*args, **kwargs)
        if name == "scaled_dot_product_attention" and self._fused:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _cast(self, values: Any, dtype: Any) -> Any:
        def cast(value: torch.Tensor) -> torch.Tensor:
            if value.dtype not in {torch.float32, self._half} - {dtype}:
                return value
            if not (value.is_leaf and value.requires_grad):
                return value.to(dtype)
            if id(value) not in self._weights:
                self._weights[id(value)] = value, value.to(dtype)
            return self._weights[id(value)][1]

        return map_tensors(cast, values)


class _FusedAttention(torch.autograd.Function):
    """Keeps what fused attention keeps: its inputs, its output, and one float32 per row of the scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004 - autograd's signature
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any) -> Any:
    if dropout_p > 0.0 or query.dim() != 4:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **more)
    return _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002, ARG001
    """Keeps a mask of one byte per element, as on cards; the meta device keeps one of the input's type."""
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _sharing(config: Any, model: nn.Module, backend: Backend) -> tuple[float, float, dict[str, int]]:
    """What one rank keeps of a model. A wrapper of the user's own counts as one that keeps all, and has no buckets.

    Of blocks that are sharded, at the worst moment two are gathered, and the whole gradients of one. Parameters outside
    of blocks are gathered all the time, and so are their gradients in the end.

    Args:
        config: validated.
        model: whole.
        backend: its class of DDP.

    Returns:
        The share of parameters and of the optimizer's state; that of each gradient, once it is complete; and by kind
        the bytes that a wrapper keeps: DDP's buckets, which may stand for gradients, or sharded blocks that are
        gathered.
    """
    ranks, kind, options = config.nproc * config.launcher.nnodes, config.wrapper.kind, config.wrapper.options
    if ranks == 1 or kind not in ("ddp", "mmddp", "fsdp"):
        return 1.0, 1.0, {}
    if kind == "fsdp":
        blocks = [_bytes(block.parameters()) for block in units_of(model)]
        rest, largest = _bytes(model.parameters()) - sum(blocks), max(blocks, default=0)
        stays = options.get("reshard_after_forward") is False
        gathered = sum(blocks) if stays else largest * min(len(blocks), 2)
        return 1 / ranks, 1 / ranks, {"wrapper": 2 * rest + gathered + largest}
    gradients = _bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    as_views = config.wrapper.gradient_as_bucket_view
    if as_views is None:  # as :func:`exp.engine.wrapper.wrap` has it; a vendor's class cannot be asked here
        as_views = type(backend.collectives).ddp_class is Collectives.ddp_class
    return (1.0, 0.0, {"gradients": gradients}) if as_views else (1.0, 1.0, {"wrapper": gradients})


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _Step:
    """What a model's ``train_step`` needs of MMEngine's OptimWrapper; the optimizer's step comes after it."""

    def __init__(self, autocast: Callable[[], ContextManager[Any]]) -> None:
        self._autocast = autocast

    def optim_context(self, model: nn.Module) -> ContextManager[Any]:
        """Autocast."""
        return self._autocast()

    def update_params(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass; what it recomputes is cast as in the forward pass."""
        with self._autocast():
            backward_below_modes(loss)


def trace_flops(model: nn.Module, batch: dict[str, Any]) -> int:
    """Floating-point operations of the matrix products, convolutions and attention of a forward and backward pass.

    A multiplication and an addition are two, as torch counts them (:mod:`torch.utils.flop_counter`).

    Args:
        model: on the meta device.
        batch: likewise.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, META:
        model.train().train_step(batch, _Step(contextlib.nullcontext))  # type: ignore[operator]
    model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def model_on_meta(config: Any, arguments: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration, on the meta device; built on the CPU if its constructor needs values.

    Args:
        config: ``model`` in the configuration.
        arguments: of :meth:`exp.data.base.Data.model_arguments`.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        with META:
            model: nn.Module = create(config, BaseModel, "model", **arguments)
    except Exception:  # noqa: BLE001 - a model may raise anything
        with torch.random.fork_rng(devices=[]):
            model = create(config, BaseModel, "model", **arguments)
    return model.to("meta")


class Tracer:
    """Takes the model of a configuration through steps of any batch size, on the meta device.

    Attributes:
        model: on the meta device.
        example: what a sample looks like.
        peak: of a training step with the batch size of the configuration; see :meth:`train`.
        optimizer_bytes: of the whole optimizer's state.
        notes: what the figures do not know, a line each.

    Args:
        config: validated, with batch sizes; files of the data may be missing where their class has an example_batch.
        backend: of it; nothing of its hardware is asked for.

    Raises:
        ConfigError: model, data or optimizer cannot be made, or not be run without values.
        DataError: the data's files are missing, and their class has no example_batch.
        UnavailableError: this torch is too old.
    """

    def __init__(self, config: Any, backend: Backend) -> None:
        if not supports_estimates():
            raise UnavailableError(
                f"task=estimate needs torch 2.1 or newer, and this is {'.'.join(map(str, TORCH_VERSION))}; estimate on "
                "any other machine: it takes no card, and the figures are the same"
            )
        self.config, self.backend, self._is_card = config, backend, backend.device_type != "cpu"
        self.notes: list[str] = []
        self.example, self._resident = _example_of(config, self.notes)
        self.model = model_on_meta(config.model, self.example.model_arguments)
        self._share, self._share_of_gradients, self._held = _sharing(config, self.model, backend)
        try:
            self.peak = self.train(config.batch_size, config.accumulate)
        except ExpError:
            raise
        except Exception as error:  # a model may raise anything
            raise ConfigError(
                f"{told(error) or _line(error)}; task=estimate runs the model on tensors without values: a training "
                "step that reads values cannot be estimated"
            ) from error

    def train(self, batch_size: int, accumulate: int = 1) -> dict[str, int]:
        """The worst moment of a training step, once the optimizer has its state.

        Args:
            batch_size: samples per device and micro-batch.
            accumulate: micro-batches per optimizer step.

        Returns:
            Bytes of a rank: ``total``, and by :data:`KINDS`.
        """
        model, config = self.model.train(), self.config
        optimizer = _optimizer_of(model, config.optim, self._is_card)
        tracker, on_card = self._begin()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def keep(parameter: torch.Tensor) -> None:
            tracker.count([parameter.grad], "gradients", self._share_of_gradients)

        hooks = [parameter.register_post_accumulate_grad_hook(keep) for parameter in trained]
        for _ in range(2):  # the first makes the optimizer's state
            tracker.at_peak = dict(tracker.now)
            for _ in range(min(accumulate, 2)):  # any further one is as the second
                batch = as_batch(self.example.train, batch_size)
                tracker.count(batch, "batch")
                with tracker.counting(), META, on_card:
                    model.train_step(batch, _Step(on_card.autocast))  # type: ignore[operator]
                del batch
            tracker.kind, tracker.share = "optimizer", self._share
            with tracker.counting():
                if config.optim.clip_grad_norm is not None:
                    nn.utils.clip_grad_norm_(trained, config.optim.clip_grad_norm)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            tracker.kind, tracker.share = "activations", 1.0
        for hook in hooks:
            hook.remove()
        self.optimizer_bytes = _bytes(tensors_of(optimizer.state))
        return tracker.peak()

    def validate(self) -> dict[str, int] | None:
        """The worst moment of a validation batch, while the optimizer keeps its state; None: it cannot be run.

        Returns:
            As :meth:`train`; :attr:`notes` has the reason where it is None.
        """
        tracker, on_card = self._begin()
        tracker.hold("optimizer", _paged(self.optimizer_bytes * self._share))
        batch = as_batch(self.example.val, self.example.eval_batch_size)
        tracker.count(batch, "batch")
        try:
            with tracker.counting(), META, on_card, torch.no_grad(), on_card.autocast():
                self.model.eval().val_step(batch)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - a model may raise anything, and may read values
            self.notes.append(f"validation is not estimated: {_line(error)[:120]}")
            return None
        return tracker.peak()

    def _begin(self) -> tuple[MemoryTracker, AsOnCard]:
        """What is on the card before a pass."""
        try:  # a vendor's plug-in that is not installed, or has no card, may not know
            able = self.backend.capabilities
            fused, lacking = self.config.precision in able.fused_attention, able.lacking_operators
        except Exception:  # noqa: BLE001
            fused, lacking = True, frozenset()
        on_card = AsOnCard(self.config.precision, self._is_card and fused)
        tracker = MemoryTracker(on_card)
        if lacking:
            from exp.hardware.operators import KERNELS  # which needs torch 2.2, as such a backend does

            tracker.kernels = {name: kernel for name, kernel in KERNELS.items() if name in lacking}
        tracker.count(list(self.model.parameters()), "parameters", self._share)
        tracker.count(list(self.model.buffers()), "buffers")
        for kind, size in {**self._held, "data": self._resident * self._is_card}.items():
            tracker.hold(kind, size)
        return tracker, on_card


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _optimizer_of(model: nn.Module, config: Any, on_card: bool) -> torch.optim.Optimizer:
    """The optimizer in the form that it takes on a card, where torch takes the foreach forms of itself."""
    fused = bool(config.options.get("fused"))  # needs a device; a step without temporary tensors comes nearest
    optimizer = build_optimizer(model, config, {f"_fused_{config.type.lower()}_"})
    for group in optimizer.param_groups:
        if fused or group.get("foreach", False) is None:
            group["foreach"] = on_card and not fused
    return optimizer


def _example_of(config: Any, notes: list[str]) -> tuple[ExampleBatch, int]:
    """From the files if they are there, else from the configuration; and bytes of the splits that a card keeps."""
    try:
        data: Data = create(config.data, Data, "data")
        train, val = (largest_sample(data, split, config.seed) for split in ("train", "val"))
        tracker = MemoryTracker(AsOnCard(config.precision, fused_attention=False))
        with tracker.counting():
            splits = [split for split in (data.train, data.val) if hasattr(split, "on_device")]
            kept = [split.on_device(META, None) for split in splits]  # noqa: F841 - alive until counted
            resident = tracker.now["activations"]
        return ExampleBatch(train, val, data.model_arguments(), data.eval_batch_size), resident
    except DataError as error:
        keys = {str(key): value for key, value in config.data.items() if key != "_target_"}
        example: ExampleBatch | None = resolve("data._target_", config.data["_target_"], Data).example_batch(**keys)
        if example is None:
            raise
        notes.append(f"shapes are those of the keys of data, whose files are not here: {str(error).splitlines()[0]}")
        notes.extend(example.notes)
        return example, 0


def largest_sample(data: Data, split: str, seed: int) -> Mapping[str, Any]:
    """The largest of some samples of a split, as a batch of one.

    Args:
        data: the data set.
        split: its name.
        seed: of the augmentation.
    """
    dataset = split_of(data, split, seed)
    numbers = sorted({number * len(dataset) // _SAMPLES for number in range(_SAMPLES)})
    keys = [[number, 0] if getattr(dataset, "needs_epoch", False) else number for number in numbers]
    with asked("data", data):
        found: list[Mapping[str, Any]] = [dataset[torch.tensor([key], dtype=torch.int64)] for key in keys]
    return max(found, key=lambda batch: _bytes(tensors_of(batch)))


def as_batch(sample: Any, size: int) -> Any:
    """A batch of ``size`` samples on the meta device.

    Args:
        sample: a batch of one; tensors (1, ...) and lists of one, also within dicts, lists and tuples.
        size: of the batch.

    Returns:
        Tensors (size, ...) of the same types, and with axes in the same order in memory.
    """
    if isinstance(sample, torch.Tensor):
        return torch.empty_like(sample.to("meta").expand(size, *sample.shape[1:])) if sample.dim() else sample
    if isinstance(sample, Mapping):
        return {key: as_batch(value, size) for key, value in sample.items()}
    if not isinstance(sample, (list, tuple)):
        return sample
    if len(sample) == 1 and not isinstance(sample[0], torch.Tensor):
        return sample * size
    parts = [as_batch(value, size) for value in sample]
    return type(sample)(*parts) if hasattr(sample, "_fields") else type(sample)(parts)


def largest_batch(tracer: Tracer, budget: int) -> int:
    """The largest batch per device whose training step takes at most ``budget`` bytes; 0: not one sample.

    Memory is all but linear in the batch: it is extrapolated from one that is as large as the configured one and one
    that is twice as large, and tried once.
    """
    size, at_size = tracer.config.batch_size, tracer.peak["total"]
    per_sample = max(tracer.train(2 * size)["total"] - at_size, size) / size
    largest = min(max(int(size + (budget - at_size) / per_sample), 0), _LARGEST)
    missing = tracer.train(largest)["total"] - budget if largest else 0
    return max(largest - math.ceil(missing / per_sample), 0) if missing > 0 else largest


def fitting_batch(tracer: Tracer, budget: int, more_than: int = 0) -> dict[str, int] | None:
    """The largest batch per device that fits and keeps the global batch, by more micro-batches where need be.

    Args:
        tracer: of the configuration.
        budget: bytes.
        more_than: so many micro-batches, or fewer, are known not to fit.

    Returns:
        ``{"batch_size", "accumulate", "memory"}``; None: not even one sample at a time fits.
    """
    config = tracer.config
    share = config.global_batch_size // (config.nproc * config.launcher.nnodes)
    for accumulate in range(more_than + 1, share + 1):
        if share % accumulate == 0:
            total = tracer.train(share // accumulate, accumulate)["total"]
            if total <= budget:
                return {"batch_size": share // accumulate, "accumulate": accumulate, "memory": total}
    return None


def what_fits(config: Any, backend: Backend, memory: int | None) -> dict[str, int] | None:
    """The batch that fits, smaller than one that has run out of memory: :func:`fitting_batch`.

    Args:
        config: frozen.
        backend: of it.
        memory: bytes of the card; None: not known.

    Returns:
        None: none fits, or it cannot be estimated here; the log has the reason.
    """
    if memory is None:
        return None
    try:
        return fitting_batch(Tracer(config, backend), int(memory * (1 - HEADROOM)), more_than=config.accumulate)
    except Exception as error:  # noqa: BLE001 - the run has failed already, of something else; this is an extra
        logger.info("no estimate of what fits: %s: %s", type(error).__name__, error)
        return None


def training_rate(session: Session, data: Data, samples_per_second: float, seconds: float) -> dict[str, float]:
    """Keys of ``result.json`` about the speed of a training.

    Operations are counted once, as :func:`trace_flops` does; what is computed anew in backward counts. The device's
    rate in plain matrix products is measured by this rank alone.

    Args:
        session: of the training, over.
        data: its data set.
        samples_per_second: over all ranks.
        seconds: that it took.

    Returns:
        ``flops_per_second`` over all ranks, and ``flops_share`` of the device's rate in the precision of the training
        times the ranks. Empty: too short, a torch that does not count, a model that does not run without
        values, or a device without memory for the products.
    """
    if seconds < LEAST_SECONDS or not supports_estimates():
        return {}
    config: Any = session.config
    try:
        batch = as_batch(largest_sample(data, "train", config.seed), config.batch_size)
        flops = trace_flops(model_on_meta(config.model, data.model_arguments()), batch) / float(config.batch_size)
        rate = matrix_rate(session.backend, session.device, config.precision) * session.info.world_size
    except Exception as error:  # noqa: BLE001
        # A user's model that reads values, or a card that is full; a figure is not worth a run.
        logger.info("the rate is not measured: %s: %s", type(error).__name__, error)
        return {}
    return {"flops_per_second": flops * samples_per_second, "flops_share": flops * samples_per_second / rate}
