"""``task=estimate``: estimates memory and FLOPs of a training before it runs. Needs no worker and no device.

A training step and a validation batch run on torch's meta device, whose tensors have a shape and a dtype, no data.
:class:`PaperCard` counts the peak memory as a card's allocator would, and gives functions the form that they have on a
card (autocast, fused attention). The buffers and shards of DDP and FSDP are added by calculation.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterable, Mapping

import torch
from mmengine.model import BaseModel
from torch import nn

from exp import console
from exp.config.resolve import create, import_plugins, resolve
from exp.console import format_bytes, format_flops
from exp.data.base import Data, ExampleBatch, split_of
from exp.data.loader import map_tensors, tensors_of
from exp.engine.fsdp import units_of
from exp.engine.optim import build_optimizer
from exp.errors import (
    EXIT_OK,
    ConfigError,
    DataError,
    ExpError,
    UnavailableError,
    first_line,
    format_user_error,
    user_code_errors,
)
from exp.hardware.backend import Collectives
from exp.hardware.compat import TORCH_VERSION, backward_with_modes, dispatch_mode, supports_estimates
from exp.hardware.matmul import matrix_rate
from exp.hardware.registry import create_backend
from exp.launcher.execute import print_header
from exp.launcher.freeze import freeze
from exp.models.base import parameter_counts
from exp.report.tables import Table, as_rich
from exp.runs.folder import empty_result

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = ["LEAST_SECONDS", "PaperCard", "Tracer", "trace_flops", "training_rate", "what_fits", "write_estimate"]

logger = logging.getLogger(__name__)

KINDS = ("parameters", "gradients", "optimizer", "wrapper", "buffers", "data", "batch", "activations")
"""Kinds of memory. ``activations`` are all tensors of a pass: those saved for the backward pass, and temporary ones."""
LEAST_SECONDS = 5.0
"""Trainings shorter than this get no FLOP rate: start-up dominates them, and counting takes some tenths of a second."""
META = torch.device("meta")
_PAGE = 512
"""Cards allocate memory in multiples of this number of bytes."""
_SAMPLES = 8
"""How many samples of a split, spread evenly over it, :func:`largest_sample` compares: images may differ in size."""


def _paged(count: float) -> int:
    return math.ceil(count / _PAGE) * _PAGE


# Functions that torch.autocast runs in half precision and in float32, from torch's documentation; functions that
# exp's models do not use are left out.
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


class PaperCard(_FunctionMode):
    """Counts the memory of storages on the meta device; as a context, gives torch functions their form on a card.

    The meta device has neither autocast nor fused attention, and both change how much a step saves for backward. Like
    ``torch.autocast``, the context casts each weight once, and keeps the copy until it ends. Storages count from their
    creation until their last tensor is freed. Memory that an operator uses internally, such as the workspace of a
    convolution, is not counted; the temporary tensors of portable kernels are.

    Args:
        precision: one of :data:`exp.hardware.backend.PRECISIONS`.
        fused_attention: whether attention is fused; with dropout it never is.

    Attributes:
        kernels: portable kernels (:mod:`exp.hardware.operators`) that replace operators of torch, by ATen name.
        now: bytes that are alive, by kind, and their ``total``.
        at_peak: bytes that were alive at the peak, likewise.
    """

    def __init__(self, precision: str, fused_attention: bool) -> None:
        super().__init__()
        self.now = dict.fromkeys((*KINDS, "total"), 0)
        self.at_peak = dict(self.now)
        self._alive: dict[int, tuple[str, int, Any]] = {}
        self._half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._fused = fused_attention
        self.kernels: dict[str, Callable[..., Any]] = {}
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def counting(self, kind: str = "activations", share: float = 1.0) -> ContextManager[Any]:
        """Context in which the results of every operator are counted as ``kind``, with a ``share`` of their bytes."""
        return dispatch_mode(functools.partial(self._call, kind, share))

    def __exit__(self, *error: Any) -> None:
        self._weights.clear()
        super().__exit__(*error)

    def hold(self, kind: str, size: int) -> None:
        """Count ``size`` bytes that no operator allocates, such as DDP's gradient buckets."""
        self.now[kind] += size
        self.now["total"] += size
        if self.now["total"] > self.at_peak["total"]:
            self.at_peak = dict(self.now)

    def count(self, values: Any, kind: str, share: float = 1.0, known: bool = True) -> None:
        """Count storages as ``kind``.

        Args:
            values: tensors, also nested in lists, tuples and mappings.
            kind: one of :data:`KINDS`.
            share: share of their bytes that counts.
            known: whether storages that are counted already get the new kind; otherwise they keep theirs.
        """
        for tensor in filter(lambda tensor: tensor.is_meta, tensors_of(values)):
            storage = tensor.untyped_storage()
            key = id(storage)  # torch keeps one Python object per storage as long as the storage lives
            if key in self._alive and not known:
                continue
            self._drop(key)
            size = _paged(storage.nbytes() * share)
            self._alive[key] = kind, size, weakref.ref(storage, functools.partial(self._drop, key))
            self.hold(kind, size)

    def _drop(self, key: int, ended: Any = None) -> None:
        kind, size, _ = self._alive.pop(key, ("activations", 0, None))
        self.hold(kind, -size)

    def _call(self, kind: str, share: float, operator: Any, arguments: Any, keywords: Any) -> Any:
        kernel = self.kernels.get(operator.overloadpacket.__name__)
        if kernel is None:
            result = operator(*arguments, **keywords)
        else:  # the dispatcher calls a kernel after autocast, so operators inside it are not cast
            with self.counting(kind, share), torch._C.DisableTorchFunction():
                result = kernel(*arguments, **keywords)
        mask = operator.overloadpacket.__name__ == "bernoulli_"  # of dropout, which has a byte per element on a card
        self.count(result, kind, share / result.element_size() if mask else share, known=mask)
        return result

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if self._half and (name in _HALF or (name in _FULL and "dtype" not in kwargs)):
            args, kwargs = self._cast((args, kwargs), self._half if name in _HALF else torch.float32)
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


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **more: Any) -> Any:
    """Attention with the fused kernel, where there is one: it saves its inputs, its output and a number per row."""
    if dropout_p > 0.0 or query.dim() != 4:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **more)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


def _sharing(config: Any, model: nn.Module, backend: Backend) -> tuple[float, float, dict[str, int], dict[str, int]]:
    """How much of the model one rank holds.

    A wrapper class of the user counts as one that holds the whole model and has no buckets. With FSDP, at the peak two
    blocks are gathered, and one block has whole gradients. Parameters outside of blocks stay gathered, and so do their
    gradients.

    Args:
        config: validated configuration.
        model: the whole model.
        backend: tells whether DDP is torch's own class.

    Returns:
        Share of the parameters and of the optimizer's state; share of each complete gradient; and by kind the bytes
        that the wrapper holds: DDP's buckets (as ``gradients`` if the gradients are views of them), or the gathered
        blocks of FSDP; and the same in a validation, for which FSDP gathers all weights.
    """
    ranks, kind, options = config.nproc * config.launcher.nnodes, config.wrapper.kind, config.wrapper.options
    if ranks == 1 or kind not in ("ddp", "mmddp", "fsdp"):
        return 1.0, 1.0, {}, {}
    if kind == "fsdp":
        blocks = [_bytes(block.parameters()) for block in units_of(model)]
        rest, largest = _bytes(model.parameters()) - sum(blocks), max(blocks, default=0)
        stays = options.get("reshard_after_forward") is False
        gathered = sum(blocks) if stays else largest * min(len(blocks), 2)
        in_training = {"wrapper": 2 * rest + gathered + largest}
        return 1 / ranks, 1 / ranks, in_training, {"wrapper": _bytes(model.parameters())}
    gradients = _bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    # The same rule as in exp.engine.wrapper; a vendor's DDP class is not loaded here.
    as_views = type(backend.collectives).ddp_class is Collectives.ddp_class
    held = {"gradients" if as_views else "wrapper": gradients}
    return 1.0, 0.0 if as_views else 1.0, held, held


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _step(autocast: ContextManager[Any]) -> Any:
    """Stands in for MMEngine's OptimWrapper in ``train_step``: runs the backward pass, and calls no optimizer.

    Args:
        autocast: context of the forward pass; used in the backward pass, too, for activations that it recomputes.
    """

    def update_params(loss: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        with autocast:
            backward_with_modes(loss)

    return SimpleNamespace(optim_context=lambda _model: autocast, update_params=update_params)


def trace_flops(model: nn.Module, batch: dict[str, Any]) -> int:
    """Floating-point operations of one forward and backward pass.

    Only matrix products, convolutions and attention count; a multiply-add is two operations, as in torch
    (:mod:`torch.utils.flop_counter`).

    Args:
        model: model on the meta device.
        batch: batch on the meta device.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, META:
        model.train().train_step(batch, _step(contextlib.nullcontext()))  # type: ignore[operator]
    model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def model_on_meta(config: Any, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model on the meta device; if its constructor needs values, create it on the CPU and move it.

    Args:
        config: ``model`` in the configuration.
        arguments: result of :meth:`exp.data.base.Data.model_arguments`.

    Raises:
        ConfigError: the model cannot be created.
    """
    try:
        with META:
            model: nn.Module = create(config, BaseModel, "model", **arguments)
    except Exception:  # noqa: BLE001 - a model may raise any exception
        with torch.random.fork_rng(devices=[]):
            model = create(config, BaseModel, "model", **arguments)
    return model.to("meta")


class Tracer:
    """Runs training steps of the configured model on the meta device, with any batch size, and measures peak memory.

    Attributes:
        model: the model, on the meta device.
        example: batches of one sample, with the model's arguments.
        peak: peak memory of a training step with the configured batch size; see :meth:`train`.
        optimizer_bytes: bytes of the optimizer's state for the whole model, not divided by shards.
        notes: warnings about the estimate, one line each.

    Args:
        config: validated configuration, with batch sizes. Files of the data may be missing if the data class has an
            ``example_batch``.
        backend: backend of the configuration; its hardware is not used.

    Raises:
        ConfigError: model, data or optimizer cannot be created, or a training step needs values.
        DataError: files of the data are missing, and the data class has no ``example_batch``.
        UnavailableError: this torch version is too old.
    """

    def __init__(self, config: Any, backend: Backend) -> None:
        if not supports_estimates():
            raise UnavailableError(
                f"task=estimate needs torch 2.3 or newer, and this is {'.'.join(map(str, TORCH_VERSION))}; run it on "
                "any other machine: it needs no card, and the results are the same"
            )
        self.config, self.backend, self._is_card = config, backend, backend.device_type != "cpu"
        self.notes: list[str] = []
        self.example, self._resident = _example_of(config, self.notes)
        self.model = model_on_meta(config.model, self.example.model_arguments)
        self._share, self._share_of_gradients, self._held, self._held_in_validation = _sharing(
            config, self.model, backend
        )
        try:
            self.peak = self.train(config.batch_size, config.accumulate)
        except ExpError:
            raise
        except Exception as error:  # a model may raise any exception
            raise ConfigError(
                f"{format_user_error(error) or first_line(error)}; task=estimate runs the model on tensors without "
                "values: a training step that reads values cannot be estimated"
            ) from error

    def train(self, batch_size: int, accumulate: int = 1) -> dict[str, int]:
        """Peak memory of a training step, after the optimizer has created its state.

        Args:
            batch_size: samples per device and micro-batch.
            accumulate: micro-batches per optimizer step.

        Returns:
            Bytes on one rank: ``total``, and by :data:`KINDS`.
        """
        model, config = self.model.train(), self.config
        optimizer = _optimizer_of(model, config.optim, self._is_card)
        card = self._card(self._held)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def keep(parameter: torch.Tensor) -> None:
            card.count([parameter.grad], "gradients", self._share_of_gradients)

        hooks = [parameter.register_post_accumulate_grad_hook(keep) for parameter in trained]
        for _ in range(2):  # the first step creates the optimizer's state; the peak is that of the second
            card.at_peak = dict(card.now)
            for _ in range(min(accumulate, 2)):  # further micro-batches use as much memory as the second
                batch = as_batch(self.example.train, batch_size)
                card.count(batch, "batch")
                with card.counting(), META:
                    model.train_step(batch, _step(card))  # type: ignore[operator]
                del batch
            with card.counting("optimizer", self._share):
                if config.optim.clip_grad_norm is not None:
                    nn.utils.clip_grad_norm_(trained, config.optim.clip_grad_norm)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.remove()
        self.optimizer_bytes = _bytes(tensors_of(optimizer.state))
        return card.at_peak

    def validate(self) -> dict[str, int] | None:
        """Peak memory of a validation batch during a training, including the optimizer's state.

        Returns:
            As :meth:`train`; None: the batch cannot be run without values, and :attr:`notes` has the reason.
        """
        card = self._card(self._held_in_validation)
        card.hold("optimizer", _paged(self.optimizer_bytes * self._share))
        batch = as_batch(self.example.val, self.example.eval_batch_size)
        card.count(batch, "batch")
        try:
            with card.counting(), META, card, torch.no_grad():
                self.model.eval().val_step(batch)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - a model may read values, or raise any exception
            self.notes.append(f"validation is not estimated: {type(error).__name__}: {first_line(error)[:120]}")
            return None
        return card.at_peak

    def _card(self, held_by_wrapper: Mapping[str, int]) -> PaperCard:
        """A card with what is on it before a pass."""
        from exp.hardware.operators import KERNELS  # needs torch >= 2.2

        able, precision = self.backend.capabilities, self.config.precision
        card = PaperCard(precision, self._is_card and precision in able.fused_attention)
        card.kernels = {name: kernel for name, kernel in KERNELS.items() if name in able.lacking_operators}
        card.count(list(self.model.parameters()), "parameters", self._share)
        card.count(list(self.model.buffers()), "buffers")
        for kind, held in {**held_by_wrapper, "data": self._resident * self._is_card}.items():
            card.hold(kind, held)
        return card


def _optimizer_of(model: nn.Module, config: Any, on_card: bool) -> torch.optim.Optimizer:
    """The optimizer as it runs on a card, where torch chooses the foreach implementation by default."""
    fused = bool(config.options.get("fused"))  # fused needs a real device; like it, the loop form has few temporaries
    optimizer = build_optimizer(model, config, {f"_fused_{config.type.lower()}_"})
    for group in optimizer.param_groups:
        if fused or group.get("foreach", False) is None:
            group["foreach"] = on_card and not fused
    return optimizer


def _example_of(config: Any, notes: list[str]) -> tuple[ExampleBatch, int]:
    """Example batches, and the bytes of data splits that the card holds during a training.

    The example is read from the data's files; if these are missing, the data class makes it from its configuration.
    """
    try:
        data: Data = create(config.data, Data, "data")
        train, val = (largest_sample(data, split, config.seed) for split in ("train", "val"))
        card = PaperCard(config.precision, fused_attention=False)
        with card.counting():
            kept = [
                split.device_builder(META, None) for split in (data.train, data.val) if hasattr(split, "device_builder")
            ]
            resident = card.now["total"] if kept else 0
        return ExampleBatch(train, val, data.model_arguments(), data.eval_batch_size), resident
    except DataError as error:
        keys = {str(key): value for key, value in config.data.items() if key != "_target_"}
        example: ExampleBatch | None = resolve("data._target_", config.data["_target_"], Data).example_batch(**keys)
        if example is None:
            raise
        notes.append(f"shapes are from the keys of data, because its files are missing: {str(error).splitlines()[0]}")
        notes.extend(example.notes)
        return example, 0


def largest_sample(data: Data, split: str, seed: int) -> Mapping[str, Any]:
    """The largest of some samples of a split, in bytes, as a batch of one.

    Args:
        data: the data set.
        split: name of the split.
        seed: seed of the augmentation.
    """
    dataset = split_of(data, split, seed)
    numbers = sorted({number * len(dataset) // _SAMPLES for number in range(_SAMPLES)})
    keys = [[number, 0] if getattr(dataset, "needs_epoch", False) else number for number in numbers]
    with user_code_errors("data", data):
        found: list[Mapping[str, Any]] = [dataset[torch.tensor([key], dtype=torch.int64)] for key in keys]
    return max(found, key=lambda batch: _bytes(tensors_of(batch)))


def as_batch(sample: Any, size: int) -> Any:
    """A batch of ``size`` samples on the meta device.

    Args:
        sample: a batch of one: tensors (1, ...), also nested in dicts, lists and tuples.
        size: number of samples.

    Returns:
        The same structure with tensors (size, ...), of the same dtypes and memory formats.
    """

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor.to("meta").expand(size, *tensor.shape[1:])) if tensor.dim() else tensor

    return map_tensors(repeated, sample)


def largest_batch(tracer: Tracer, budget: int) -> int:
    """The largest batch per device whose training step needs at most ``budget`` bytes; 0: not even one sample fits.

    Memory is almost linear in the batch size: it is extrapolated from the configured batch and one twice as large, and
    the result is corrected after one trial.
    """
    size, at_size = tracer.config.batch_size, tracer.peak["total"]
    per_sample = max(tracer.train(2 * size)["total"] - at_size, size) / size
    largest = max(int(size + (budget - at_size) / per_sample), 0)
    missing = tracer.train(largest)["total"] - budget if largest else 0
    return max(largest - math.ceil(missing / per_sample), 0) if missing > 0 else largest


def fitting_batch(tracer: Tracer, budget: int, more_than: int = 0) -> dict[str, int] | None:
    """The largest batch per device that fits with the same global batch, by accumulating more micro-batches.

    Args:
        tracer: tracer of the configuration.
        budget: available bytes.
        more_than: try only more micro-batches than this.

    Returns:
        ``batch_size``, ``accumulate`` and ``memory`` (bytes); None: not even one sample per micro-batch fits.
    """
    config = tracer.config
    share = config.global_batch_size // (config.nproc * config.launcher.nnodes)
    for accumulate in range(more_than + 1, share + 1):
        if share % accumulate == 0:
            total = tracer.train(share // accumulate, accumulate)["total"]
            if total <= budget:
                return {"batch_size": share // accumulate, "accumulate": accumulate, "memory": total}
    return None


def what_fits(config: Any, backend: Backend, memory: int | None, headroom: float) -> dict[str, int] | None:
    """The batch that fits, after the configured one has run out of memory.

    Args:
        config: frozen configuration.
        backend: backend of the configuration.
        memory: memory of the card in bytes; None: unknown.
        headroom: share of ``memory`` that is kept free for what is not counted.

    Returns:
        As :func:`fitting_batch`; None: no batch fits, ``memory`` is unknown, or the estimate fails, which is logged.
    """
    if memory is None:
        return None
    try:
        return fitting_batch(Tracer(config, backend), int(memory * (1 - headroom)), more_than=config.accumulate)
    except Exception as error:  # noqa: BLE001 - the run has failed already; the estimate must not hide that error
        logger.info("no estimate of what fits: %s: %s", type(error).__name__, error)
        return None


def training_rate(session: Session, data: Data, samples_per_second: float, seconds: float) -> dict[str, float]:
    """FLOP rate of a training, as keys of ``result.json``.

    Operations are counted as in :func:`trace_flops`; activations that are recomputed in the backward pass count again.
    This rank alone measures the device's rate of plain matrix products.

    Args:
        session: session of the training, which is over.
        data: the data set.
        samples_per_second: rate over all ranks.
        seconds: duration of the training.

    Returns:
        ``flops_per_second`` over all ranks, and ``flops_share``: that rate divided by the device's rate of matrix
        products in the same precision times the number of ranks. Empty if the training was shorter than
        :data:`LEAST_SECONDS`, torch is too old, the model needs values, or the device has no memory left.
    """
    if seconds < LEAST_SECONDS or not supports_estimates():
        return {}
    config: Any = session.config
    try:
        batch = as_batch(largest_sample(data, "train", config.seed), config.batch_size)
        flops = trace_flops(model_on_meta(config.model, data.model_arguments()), batch) / float(config.batch_size)
        rate = matrix_rate(session.backend, session.device, config.precision) * session.info.world_size
    except Exception as error:  # noqa: BLE001
        # The model may read values, or the card may be full: a missing rate must not fail the run.
        logger.info("the rate is not measured: %s: %s", type(error).__name__, error)
        return {}
    return {"flops_per_second": flops * samples_per_second, "flops_share": flops * samples_per_second / rate}


def write_estimate(composed: ExpConfig, overrides: list[str]) -> int:
    """Estimate, print the result, and write it to ``result.json`` in a run folder.

    Args:
        composed: composed configuration.
        overrides: overrides of the user.

    Returns:
        The exit code.

    Raises:
        ConfigError: a value is wrong, or the model cannot be run without values.
        DataError: the data cannot be read, or are missing and their class has no ``example_batch``.
        UnavailableError: this torch version is too old.
    """
    run = freeze(composed, overrides)
    config: Any = run.config
    task = config.task
    import_plugins(config.plugins)
    backend = create_backend(config.backend)
    tracer = Tracer(config, backend)
    model, passes = tracer.model, {"training": tracer.peak, "validation": tracer.validate()}
    peak = max(each["total"] for each in passes.values() if each is not None)
    per_sample = trace_flops(model, as_batch(tracer.example.train, config.batch_size)) / config.batch_size
    weights = _bytes(tensors_of(model.state_dict()))
    # Default: the memory of the smallest card on this host, from the vendor's monitor.
    here = (int(row["memory_total"]) for row in backend.monitor() if row.get("memory_total"))
    memory = min(here, default=None) if task.memory_gib is None else int(task.memory_gib * 2**30)
    budget = None if memory is None else int(memory * (1 - task.headroom))
    found = {  # docs/hardware/estimate.md describes the keys
        "eval_batch_size": tracer.example.eval_batch_size,
        **parameter_counts(model),
        "flops_per_sample": per_sample,
        "flops_per_step": per_sample * config.global_batch_size,
        "memory": passes,
        "memory_peak": peak,
        "checkpoint_bytes": weights + tracer.optimizer_bytes,
        "weights_bytes": weights,
        "card_memory": memory,
        "fits": None if budget is None else peak <= budget,
        "largest_batch_size": None if budget is None else largest_batch(tracer, budget),
        "advice": None if budget is None else fitting_batch(tracer, budget),
        "notes": tracer.notes,
    }
    result = {**empty_result(config), "status": "completed", "measured_on": "paper", "estimate": found}
    result["memory_peak"] = [peak] * result["world_size"]
    run.write()
    try:
        run.folder.commit_pending(config.overwrite)
        run.folder.write_result(result)
    finally:
        run.release()
    print_header(run)
    _show(config, found)
    return EXIT_OK


def _show(config: Any, found: Mapping[str, Any]) -> None:
    """Print an estimate; ``found`` is ``estimate`` in ``result.json``."""
    batches = {"training": config.batch_size, "validation": found["eval_batch_size"]}
    passes = {f"{name}, batch {batches[name]}": each for name, each in found["memory"].items() if each is not None}
    rows = [{"memory of each rank": kind, **{title: format_bytes(each[kind]) for title, each in passes.items()}}
            for kind in (*KINDS, "total") if any(each[kind] for each in passes.values())]  # fmt: skip
    lines = [
        "parameters: {parameters:,}, {trained_parameters:,} of them trained".format(**found),
        f"operations: {format_flops(found['flops_per_sample'])}FLOP per sample, "
        f"{format_flops(found['flops_per_step'])}FLOP per step",
        f"checkpoint: {format_bytes(found['checkpoint_bytes'])}; weights alone {format_bytes(found['weights_bytes'])}",
    ]
    if found["card_memory"] is not None:
        lines.append(f"card: {format_bytes(found['card_memory'])}, less headroom: {_fit(config, found)}")
    terminal = console.make_console()
    terminal.print(as_rich(Table.of(rows)))
    terminal.print("\n".join([*lines, *(f"note: {note}" for note in found["notes"])]), soft_wrap=True, markup=False)


def _fit(config: Any, found: Mapping[str, Any]) -> str:
    advice = found["advice"]
    if advice is None:
        return "not even a batch of 1 fits; try wrapper=fsdp, precision=bf16 or a smaller model"
    fits, largest = "fits" if found["fits"] else "does NOT fit", found["largest_batch_size"]
    kept = f"batch_size={advice['batch_size']} accumulate={advice['accumulate']} keeps the global batch"
    more = f"; {kept} ({format_bytes(advice['memory'])})" * (advice["accumulate"] != config.accumulate)
    return f"it {fits}; at most batch_size={largest} per device{more}"
