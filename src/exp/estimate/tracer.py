"""Runs training steps and validation batches of the configured model on the meta device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple

import torch
from mmengine.model import BaseModel
from mmengine.structures import BaseDataElement
from torch import nn

from exp.config.resolve import create, resolve
from exp.data.base import Data, ExampleBatch, split_of
from exp.data.loader import map_tensors, tensors_of
from exp.engine.fsdp import units_of
from exp.engine.optim import BackwardOnly, build_optimizer
from exp.errors import (
    ConfigError,
    DataError,
    ExpError,
    UnavailableError,
    first_line,
    format_user_error,
    user_code_errors,
)
from exp.estimate.memory import META, MetaAllocator, bytes_of, round_to_block
from exp.hardware.backend import Collectives
from exp.hardware.compat import TORCH_VERSION, backward_with_modes, supports_estimates
from exp.models.base import Model

if TYPE_CHECKING:
    from exp.hardware.backend import Backend


_SAMPLES = 8
"""How many samples of a split, spread evenly over it, :func:`largest_sample` compares: images may differ in size."""


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
        self.config, self.backend, self._on_card = config, backend, backend.device_type != "cpu"
        self.notes: list[str] = []
        self.example, self._resident_bytes = _example_batches(config, self.notes)
        self.model = model_on_meta(config.model, self.example.model_arguments)
        self._shards = _shards_of(config, self.model, backend)
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
            Bytes on one rank: ``total``, and by :data:`exp.estimate.memory.KINDS`.
        """
        model, config = self.model.train(), self.config
        optimizer = _optimizer_on_card(model, config.optim, self._on_card)
        allocator = self._allocator(self._shards.wrapper)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def track_gradient(parameter: torch.Tensor) -> None:
            allocator.track([parameter.grad], "gradients", self._shards.gradients)

        hooks = [parameter.register_post_accumulate_grad_hook(track_gradient) for parameter in trained]
        for _ in range(2):  # the first step creates the optimizer's state; the peak is that of the second
            allocator.peak = dict(allocator.live)
            for _ in range(min(accumulate, 2)):  # further micro-batches use as much memory as the second
                batch = as_batch(self.example.train, batch_size)
                allocator.track(batch, "batch")
                with allocator.tracking(), META:
                    model.train_step(batch, BackwardOnly(lambda: allocator, lambda: allocator, backward_with_modes))  # type: ignore[operator]
                del batch
            with allocator.tracking("optimizer", self._shards.parameters):
                if config.optim.clip_grad_norm is not None:
                    nn.utils.clip_grad_norm_(trained, config.optim.clip_grad_norm)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.remove()
        self.optimizer_bytes = bytes_of(tensors_of(optimizer.state))
        return allocator.peak

    def validate(self) -> dict[str, int] | None:
        """Peak memory of a validation batch during a training, including the optimizer's state.

        Returns:
            As :meth:`train`; None: the batch cannot be run without values, and :attr:`notes` has the reason.
        """
        allocator = self._allocator(self._shards.wrapper_in_validation)
        allocator.add_bytes("optimizer", round_to_block(self.optimizer_bytes * self._shards.parameters))
        batch = as_batch(self.example.val, self.example.eval_batch_size)
        allocator.track(batch, "batch")
        try:
            with allocator.tracking(), META, allocator, torch.no_grad():
                self.model.eval().val_step(batch)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - a model may read values, or raise any exception
            self.notes.append(f"validation is not estimated: {type(error).__name__}: {first_line(error)[:120]}")
            return None
        return allocator.peak

    def largest_batch(self, budget: int) -> int:
        """The largest batch per device whose training step needs at most ``budget`` bytes; 0: not even one sample fits.

        Memory is almost linear in the batch size: it is extrapolated from the configured batch and one twice as large,
        and the result is corrected after one trial.
        """
        size, at_size = self.config.batch_size, self.peak["total"]
        per_sample = max(self.train(2 * size)["total"] - at_size, size) / size
        largest = max(int(size + (budget - at_size) / per_sample), 0)
        excess = self.train(largest)["total"] - budget if largest else 0
        return max(largest - math.ceil(excess / per_sample), 0) if excess > 0 else largest

    def fitting_batch(self, budget: int, more_than: int = 0) -> dict[str, int] | None:
        """The largest batch per device that fits with the same global batch, by accumulating more micro-batches.

        Args:
            budget: available bytes.
            more_than: try only more micro-batches than this.

        Returns:
            ``batch_size``, ``accumulate`` and ``memory`` (bytes); None: not even one sample per micro-batch fits.
        """
        config = self.config
        samples_per_rank = config.global_batch_size // (config.nproc * config.launcher.nnodes)
        for accumulate in range(more_than + 1, samples_per_rank + 1):
            if samples_per_rank % accumulate == 0:
                total = self.train(samples_per_rank // accumulate, accumulate)["total"]
                if total <= budget:
                    return {"batch_size": samples_per_rank // accumulate, "accumulate": accumulate, "memory": total}
        return None

    def _allocator(self, wrapper_bytes: Mapping[str, int]) -> MetaAllocator:
        """An allocator with what a card holds before a pass."""
        from exp.hardware.operators import KERNELS  # needs torch >= 2.2

        capabilities, precision = self.backend.capabilities, self.config.precision
        allocator = MetaAllocator(precision, self._on_card and precision in capabilities.fused_attention)
        allocator.kernels = {name: kernel for name, kernel in KERNELS.items() if name in capabilities.lacking_operators}
        allocator.track(list(self.model.parameters()), "parameters", self._shards.parameters)
        allocator.track(list(self.model.buffers()), "buffers")
        for kind, num_bytes in {**wrapper_bytes, "data": self._resident_bytes * self._on_card}.items():
            allocator.add_bytes(kind, num_bytes)
        return allocator


class _Shards(NamedTuple):
    """How much of the model one rank holds.

    Attributes:
        parameters: share of the parameters and of the optimizer's state.
        gradients: share of each complete gradient.
        wrapper: bytes that the wrapper holds in training, by kind: DDP's buckets (as ``gradients`` if the gradients are
            views of them), or the gathered blocks of FSDP.
        wrapper_in_validation: the same in a validation, for which FSDP gathers all weights.
    """

    parameters: float
    gradients: float
    wrapper: dict[str, int]
    wrapper_in_validation: dict[str, int]


def _shards_of(config: Any, model: nn.Module, backend: Backend) -> _Shards:
    """How much of the model one rank holds.

    A wrapper class of the user counts as one that holds the whole model and has no buckets. With FSDP, at the peak two
    blocks are gathered, and one block has whole gradients. Parameters outside of blocks stay gathered, and so do their
    gradients.

    Args:
        config: validated configuration.
        model: the whole model.
        backend: its collectives name the class of DDP.
    """
    ranks, kind, options = config.nproc * config.launcher.nnodes, config.wrapper.kind, config.wrapper.options
    if ranks == 1 or kind not in ("ddp", "mmddp", "fsdp"):
        return _Shards(1.0, 1.0, {}, {})
    if kind == "fsdp":
        block_bytes = [bytes_of(block.parameters()) for block in units_of(model)]
        outside_bytes, largest = bytes_of(model.parameters()) - sum(block_bytes), max(block_bytes, default=0)
        stays_gathered = options.get("reshard_after_forward") is False
        gathered = sum(block_bytes) if stays_gathered else largest * min(len(block_bytes), 2)
        in_training = {"wrapper": 2 * outside_bytes + gathered + largest}
        return _Shards(1 / ranks, 1 / ranks, in_training, {"wrapper": bytes_of(model.parameters())})
    gradient_bytes = bytes_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    # The same rule as in exp.engine.wrapper; a vendor's DDP class is not loaded here.
    as_views = type(backend.collectives).ddp_class is Collectives.ddp_class
    wrapper_bytes = {"gradients" if as_views else "wrapper": gradient_bytes}
    return _Shards(1.0, 0.0 if as_views else 1.0, wrapper_bytes, wrapper_bytes)


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
            model = _create_for_training(config, arguments)
    except Exception:  # noqa: BLE001 - a model may raise any exception
        with torch.random.fork_rng(devices=[]):
            model = _create_for_training(config, arguments)
    return model.to("meta")


def _create_for_training(config: Any, arguments: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = create(config, BaseModel, "model", **arguments)
    if isinstance(model, Model):
        model.prepare_training()
    return model


def _optimizer_on_card(model: nn.Module, config: Any, on_card: bool) -> torch.optim.Optimizer:
    """The optimizer as it runs on a card, where torch chooses the foreach implementation by default."""
    fused = bool(config.options.get("fused"))  # fused needs a real device; like it, the loop form has few temporaries
    optimizer = build_optimizer(model, config, {f"_fused_{config.type.lower()}_"})
    for group in optimizer.param_groups:
        if fused or group.get("foreach", False) is None:
            group["foreach"] = on_card and not fused
    return optimizer


def _example_batches(config: Any, notes: list[str]) -> tuple[ExampleBatch, int]:
    """Example batches, and the bytes of data splits that the card holds during a training.

    The example is read from the data's files; if these are missing, the data class makes it from its configuration.
    """
    try:
        data: Data = create(config.data, Data, "data")
        train, val = (largest_sample(data, split, config.seed) for split in ("train", "val"))
        allocator = MetaAllocator(config.precision, fused_attention=False)
        with allocator.tracking():
            splits = [split for split in (data.train, data.val) if hasattr(split, "device_builder")]
            on_card = [split.device_builder(META, None) for split in splits]
            resident_bytes = allocator.live["total"] if on_card else 0
        return ExampleBatch(train, val, data.model_arguments(), data.eval_batch_size), resident_bytes
    except DataError as error:
        keys = {str(key): value for key, value in config.data.items() if key != "_target_"}
        example: ExampleBatch | None = resolve("data._target_", config.data["_target_"], Data).example_batch(**keys)
        if example is None:
            raise
        notes.append(f"shapes are from the keys of data, because its files are missing: {error.headline}")
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
    indices = sorted({index * len(dataset) // _SAMPLES for index in range(_SAMPLES)})
    keys = [[index, 0] if getattr(dataset, "needs_epoch", False) else index for index in indices]
    with user_code_errors("data", data):
        samples: list[Mapping[str, Any]] = [dataset[torch.tensor([key], dtype=torch.int64)] for key in keys]
    return max(samples, key=lambda batch: bytes_of(tensors_of(batch)))


def as_batch(sample: Any, size: int) -> Any:
    """A batch of ``size`` samples on the meta device.

    Args:
        sample: a batch of one: tensors (1, ...), also nested in dicts, lists and tuples. With MMEngine's data elements,
            which its ``pseudo_collate`` puts into lists, each list has one entry per sample.
        size: number of samples.

    Returns:
        The same structure with tensors (size, ...), of the same dtypes and memory formats.
    """

    def expand(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor.to("meta").expand(size, *tensor.shape[1:])) if tensor.dim() else tensor

    def of_element(value: Any) -> Any:
        """A sample's own tensors or data element, which have no axis of samples."""
        return value.to("meta") if isinstance(value, BaseDataElement) else map_tensors(to_meta, value)

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    is_list_of_samples = isinstance(sample, dict) and any(
        isinstance(item, BaseDataElement) for value in sample.values() if isinstance(value, list) for item in value
    )
    if not is_list_of_samples:
        return map_tensors(expand, sample)
    return {
        key: [of_element(value[0]) for _ in range(size)] if isinstance(value, list) else map_tensors(expand, value)
        for key, value in sample.items()
    }
