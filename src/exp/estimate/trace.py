"""A training step and a validation batch on tensors without memory, and what is alive at their worst moment."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterator, Mapping

import torch
from torch import nn

from exp.data.transfer import tensors_of
from exp.engine.rehearsal import call_of, check_losses
from exp.engine.wrapper import forward, predictions, preprocessed
from exp.errors import ConfigError, ExpError
from exp.estimate.as_on_card import AsOnCard
from exp.estimate.sharing import Sharing, sharing_of
from exp.estimate.subject import Subject, optimizer_of
from exp.estimate.tracker import MemoryTracker, paged
from exp.raised import place_of, told

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["Tracer", "trace_flops"]


@dataclass(frozen=True)
class Peak:
    """The worst moment of a pass.

    Attributes:
        total: bytes.
        by_kind: the same by :data:`exp.estimate.tracker.KINDS`.
    """

    total: int
    by_kind: dict[str, int]


class _Step:
    """What a model's ``train_step`` needs of MMEngine's OptimWrapper: here the optimizer comes after it."""

    def __init__(self, autocast: Callable[[], ContextManager[Any]]) -> None:
        self._autocast = autocast

    def optim_context(self, model: nn.Module) -> ContextManager[Any]:
        """Autocast."""
        return self._autocast()

    @contextlib.contextmanager
    def accumulation(self) -> Iterator[None]:
        """Nothing to do."""
        yield

    def update_params(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass; where it computes activations anew, it does so as the forward pass did."""
        with self._autocast():
            loss.backward()


class Tracer:
    """Takes the model of a configuration through steps of any batch size.

    Args:
        config: validated, with batch sizes.
        backend: of it; nothing of its hardware is asked for.

    Raises:
        ConfigError: model, data or optimizer cannot be made, or not be run without values.
        DataError: see :class:`exp.estimate.subject.Subject`.
    """

    def __init__(self, config: Any, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self.optimizer_bytes = 0
        self.subject, self.peak = self._begin()
        self.notes = self.subject.notes

    def _begin(self) -> tuple[Subject, Peak]:
        """Make the model on the meta device; on the CPU, where its code reads values of what it makes besides."""
        config = self.config
        first: Exception | None = None
        for on_meta in (True, False):
            subject = None
            try:
                subject = Subject(config, on_meta)
                self.subject = subject
                return subject, self.train(config.batch_size, config.accumulate)
            except Exception as error:  # a model may raise anything
                if isinstance(error, ExpError) and not _reads_values(error):
                    raise
                first = first or error
        assert first is not None
        if not _reads_values(first):
            self._explain(subject, first)
            raise first
        raise ConfigError(
            f"task=estimate runs the model on tensors without values, and {type(first).__name__} came of it: "
            f"{str(first).splitlines()[0]}{place_of(first)}; a training step that reads values cannot be estimated"
        ) from first

    def _explain(self, subject: Subject | None, error: Exception) -> None:
        """Raise the error of a training step or a prediction as a training would tell it, where it is the user's."""
        if subject is not None:
            batch, losses = subject.train_batch(self.config.batch_size), None
            # Its own error is the one that is told below.
            with subject.context(), contextlib.suppress(Exception):
                losses = forward(subject.model, preprocessed(subject.model, batch, training=True), "loss")
            if losses is not None:
                check_losses(subject.model, call_of(batch, "loss"), losses)
        line = told(error)
        if line is not None:
            raise ConfigError(line) from error

    @property
    def sharing(self) -> Sharing:
        """What each rank keeps of the model."""
        return sharing_of(self.config, self.subject.model, self.backend)

    def train(self, batch_size: int, accumulate: int = 1) -> Peak:
        """The worst moment of a training step, once the optimizer has its state.

        Args:
            batch_size: samples per device and micro-batch.
            accumulate: micro-batches per optimizer step.
        """
        subject, config, sharing = self.subject, self.config, self.sharing
        model = subject.model.train()
        optimizer = optimizer_of(model, config.optim, self.backend.device_type != "cpu")
        as_on_card = self._as_on_card()
        tracker, hooks = self._tracker(as_on_card), []
        tracker.count(model.parameters(), "parameters", sharing.share)
        tracker.count(model.buffers(), "buffers")
        tracker.hold("wrapper", sharing.held)
        tracker.hold("data", self._held_on_card())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def keep(parameter: torch.Tensor) -> None:
            tracker.count([parameter.grad], "gradients", sharing.share_of_gradients)

        for parameter in trained:
            hooks.append(parameter.register_post_accumulate_grad_hook(keep))
        tracker.hold("gradients", sharing.held_gradients)
        try:
            for _ in range(2):  # the first makes the optimizer's state
                tracker.restart()
                for _ in range(min(accumulate, 2)):  # any further one is as the second
                    batch = subject.train_batch(batch_size)
                    tracker.count(tensors_of(batch), "batch")
                    with tracker, subject.context(), as_on_card:
                        model.train_step(batch, _Step(as_on_card.autocast))  # type: ignore[operator]
                    del batch
                tracker.kind, tracker.share = "optimizer", sharing.share
                with tracker:
                    if config.optim.clip_grad_norm is not None:
                        nn.utils.clip_grad_norm_(trained, config.optim.clip_grad_norm)
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                tracker.kind, tracker.share = "activations", 1.0
            self.optimizer_bytes = _bytes_of(optimizer)
        finally:
            for hook in hooks:
                hook.remove()
            optimizer.zero_grad(set_to_none=True)
        by_kind = dict(tracker.at_peak)
        by_kind["wrapper"] += max(0, sharing.exchanged - by_kind["activations"] // sharing.units)
        return Peak(sum(by_kind.values()), by_kind)

    def validate(self) -> Peak | None:
        """The worst moment of a validation batch, while the optimizer keeps its state; None: it reads values."""
        subject, sharing = self.subject, self.sharing
        model, as_on_card = subject.model.eval(), self._as_on_card()
        tracker = self._tracker(as_on_card)
        tracker.count(model.parameters(), "parameters", sharing.share)
        tracker.count(model.buffers(), "buffers")
        tracker.hold("wrapper", sharing.held)
        tracker.hold("data", self._held_on_card())
        tracker.hold("gradients", sharing.held_gradients)
        tracker.hold("optimizer", paged(int(self.optimizer_bytes * sharing.share)))
        batch = subject.val_batch()
        tracker.count(tensors_of(batch), "batch")
        try:
            with tracker, subject.context(), as_on_card, torch.no_grad(), as_on_card.autocast():
                outputs = predictions(model, batch, "val")
        except Exception as error:  # a model may raise anything
            if not _reads_values(error):
                self._explain(None, error)
                raise
            self.notes.append(f"validation is not estimated: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            return None
        del outputs
        return Peak(tracker.peak, dict(tracker.at_peak))

    def _as_on_card(self) -> AsOnCard:
        return AsOnCard(self.config.precision, _fuses(self.backend, self.config.precision))

    def _held_on_card(self) -> int:
        return self.subject.held if self.backend.device_type != "cpu" else 0

    def _tracker(self, as_on_card: AsOnCard) -> MemoryTracker:
        kernels = _portable_kernels(self.backend)
        return MemoryTracker(kernels={name: as_on_card.below_autocast(kernel) for name, kernel in kernels.items()})


def _reads_values(error: BaseException) -> bool:
    """Whether an error comes of tensors that have no values; one of ours is made of such an error, then."""
    cause = error.__cause__ if isinstance(error, ExpError) else error
    return cause is not None and re.search(r"\bmeta\b", str(cause), re.IGNORECASE) is not None


def _fuses(backend: Backend, precision: str) -> bool:
    """Whether the backend's cards fuse attention; one that has to ask a card that is not here is taken to do so."""
    try:
        return backend.device_type != "cpu" and backend.fused_attention(precision)
    except Exception:  # noqa: BLE001 - of a vendor's plug-in that is not installed, or has no card
        return True


def _portable_kernels(backend: Backend) -> Mapping[str, Callable[..., Any]]:
    """What runs in the place of operators that the backend's cards lack; none where that only a card could tell."""
    try:
        lacking = backend.lacking_operators()
    except Exception:  # noqa: BLE001 - of a vendor's plug-in that is not installed, or has no card
        return {}
    if not lacking:
        return {}
    from exp.operators import KERNELS

    return {name: kernel for name, kernel in KERNELS.items() if name in lacking}


def _bytes_of(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def trace_flops(model: nn.Module, batch: dict[str, Any], context: ContextManager[Any]) -> int:
    """Floating-point operations of the matrix products, convolutions and attention of a forward and backward pass.

    A multiplication and an addition are two, as torch counts them (:mod:`torch.utils.flop_counter`).

    Args:
        model: on the meta device.
        batch: likewise.
        context: in which it runs (:meth:`exp.estimate.subject.Subject.context`).
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter, context:
        model.train().train_step(batch, _Step(contextlib.nullcontext))  # type: ignore[operator]
    model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())
