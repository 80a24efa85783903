"""What users bring is tried before the first step, and asked again where that step fails: so their errors come at once.

exp's own models, data and metrics are not: their tests have done it.
"""

from __future__ import annotations

import contextlib
import copy
import math
from typing import TYPE_CHECKING, Any, Iterator

import torch

from exp.contract import EXPERIMENT_PAGE, asked, is_own, shown
from exp.data.loader import eval_loader
from exp.data.sampler import EvalBatchSampler, TrainBatchSampler
from exp.data.transfer import move
from exp.engine.building import build_evaluator
from exp.engine.debug import split_in_use
from exp.engine.fsdp import is_sharded
from exp.engine.rng import rng_state, set_rng_state
from exp.engine.together import Together
from exp.engine.wrapper import forward, predictions, preprocessed
from exp.errors import ConfigError, DataError, ExpError, RunError
from exp.metrics import LINE_KEYS, SampleMetric
from exp.runfolder import to_json

if TYPE_CHECKING:
    from torch import nn

    from exp.data.base import Data
    from exp.metrics import Evaluator
    from exp.session import Session

__all__ = ["call_of", "check_losses", "explain_first_step", "explain_unused", "rehearse"]

_OFF = "; rehearsal=false leaves this check out"


def rehearse(session: Session, data: Data, model: nn.Module) -> None:
    """Take the first validation batch through model and metrics, and ask the data what is asked at the end of a run.

    What belongs to the weights is adopted by a copy of the data, as an evaluation does it.

    The first test batch takes the same way where its dataset gives samples one by one, so that a bad test split does
    not show only after the training.

    Nothing of it stays: random states, modes and buffers are as before, and nothing is written. A collective: ranks
    without a batch take part. Costs nothing where model, data and metrics are exp's own.

    Args:
        session: the session.
        data: of :func:`exp.engine.building.build_data`.
        model: without a wrapper, on the session's device.

    Raises:
        ConfigError: a member is missing, raises, or gives something of another form; names member, class and page.
    """
    evaluator = build_evaluator(session, data)
    if not session.config.rehearsal or all(map(is_own, (data, model, *evaluator.metrics))):
        return
    with _undone(session, model), torch.no_grad():
        _check_record(session, data)
        _check_adoption(session, data)
        evaluator.reset()
        _take_a_batch(session, data, model.eval(), evaluator, "val")
        _compute(session, evaluator)
        if _is_looked_at(data) and not is_sharded(model):
            evaluator.reset()
            _take_a_batch(session, data, model, evaluator, "test")


def _is_looked_at(data: Data) -> bool:
    """Whether the test split is another one than that of validation, and read sample by sample."""
    test = getattr(data, "test", None)  # of a split that is missing is told elsewhere
    return test is not None and test is not data.val and not getattr(test, "takes_batches", False)


@contextlib.contextmanager
def _undone(session: Session, model: nn.Module) -> Iterator[None]:
    """Leaves random states, modes and buffers as they were."""
    state = rng_state(session.backend)
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(state, session.backend)


def _check_record(session: Session, data: Data) -> None:
    with asked("data", data, ".record(gather)"):
        record = data.record(session.distributed.gather)
    place = f"data: {shown(data)}.record must give a dict for result.json"
    if not isinstance(record, dict):
        raise ConfigError(f"{place}, not a {type(record).__name__}; see {EXPERIMENT_PAGE}")
    try:
        to_json(record)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}; see {EXPERIMENT_PAGE}") from error


def _check_adoption(session: Session, data: Data) -> None:
    """An evaluation hands these data what the weights keep of them: as well said now as after the training."""
    if session.data_state is None:
        return
    like = copy.copy(data)
    with asked("data", like, ".adopt(state())", EXPERIMENT_PAGE + _OFF):
        like.adopt(session.data_state)


def _take_a_batch(session: Session, data: Data, model: nn.Module, evaluator: Evaluator, split: str) -> None:
    dataset = split_in_use(session, data, split)
    sampler = EvalBatchSampler(len(dataset), data.eval_batch_size, session.info.rank, session.info.world_size)
    indices = next(iter(sampler), None)
    without = indices is None
    if without and not is_sharded(model):  # such weights come together in every forward pass
        return
    any_sample = torch.zeros(1, dtype=torch.int64)
    wanted = [] if indices is None else [indices]
    with asked("data", data, f".{split}[...]"):
        # In a process of its own where the loaders have theirs: files that are open here could not be read there.
        batches = eval_loader(dataset, [*wanted, any_sample] if is_sharded(model) else wanted, min(data.num_workers, 1))
        batch, *others = (move(each, session.device) for each in batches)
    # What a model's own code raises is a failure as any other: the log has its traceback.
    asking = asked("model", model, "." + call_of(batch, "predict"), inside=False)
    with asking, session.backend.autocast(session.config.precision):
        together = None
        if is_sharded(model):
            together = Together(model, session.distributed, lambda: predictions(model, (others or [batch])[0], split))
        outputs = None if without else predictions(model, batch, split)
        if together is not None:
            together.finish()
    if without:
        return
    assert indices is not None
    if outputs is None or (isinstance(outputs, torch.Tensor) and not outputs.dim()):
        found = "None" if outputs is None else "one number for all samples"
        raise ConfigError(
            f"model: {shown(model)}.{call_of(batch, 'predict')} gives {found}, not a prediction for each sample; see "
            f"{EXPERIMENT_PAGE}"
        )
    for metric in evaluator.metrics:
        with asked("metric", metric, ".update(outputs, batch)"):
            metric.update(outputs, batch)
        values = metric.values[-1] if isinstance(metric, SampleMetric) and hasattr(metric, "values") else None
        if values is not None and len(values) != len(indices):
            raise ConfigError(
                f"metric: {shown(metric)}.per_sample gives {len(values)} figures for {len(indices)} samples; see "
                f"{EXPERIMENT_PAGE}"
            )
    session.backend.end_batch(outputs)


def _compute(session: Session, evaluator: Evaluator) -> None:
    """The figures of so few samples may be nan, or not defined; that is said, and no error yet."""
    name = evaluator.metric_name
    try:
        for metric in evaluator.metrics:
            with asked("metric", metric, ".compute(distributed)", EXPERIMENT_PAGE + _OFF):
                metric.compute(session.distributed)
        value = evaluator.compute(session.distributed)[name]
    except DataError as error:
        session.say(f"warning: in the first validation batch, before any training, {error}")
        return
    if not math.isfinite(value):
        session.say(
            f"warning: {name} of the first validation batch is {value} before any training; it chooses the best "
            "weights, and must be finite over the whole split"
        )


def explain_first_step(session: Session, data: Data, model: nn.Module) -> None:
    """Where the first step has failed: find out whether model and batch are not as they must be.

    Takes the first training batch through the model once more. Nothing goes on after it, so it may change what it
    likes; but it takes no part in any collective operation, since other ranks may not have come here.

    Args:
        session: the session.
        data: of :func:`exp.engine.building.build_data`.
        model: without a wrapper, on the session's device.

    Raises:
        ConfigError: they are not; names member, class and page.
    """
    try:
        losses, call = _first_losses(session, data, model)
    except ExpError:
        raise
    except Exception:  # noqa: BLE001 - the model's own, which has been raised already
        return
    check_losses(model, call, losses)


def check_losses(model: nn.Module, call: str, losses: Any) -> None:
    """Whether a model gives what is trained on.

    Args:
        model: the model.
        call: how it was called.
        losses: what it gave.

    Raises:
        ConfigError: it does not; names member, class and page.
    """
    found = None
    if not isinstance(losses, dict):
        found = f"a {type(losses).__name__}"
    elif not any("loss" in name for name in losses):
        found = f"{list(losses)}, and no name that contains 'loss'"
    else:
        for name, value in losses.items():
            # MMEngine's own models may give lists of losses; its parse_losses takes their means.
            if not isinstance(value, (torch.Tensor, list)):
                found = f"a {type(value).__name__} as {name}"
            elif isinstance(value, torch.Tensor) and value.dim():
                found = f"a tensor of shape {tuple(value.shape)} as {name}: take its mean"
            elif name in (*LINE_KEYS, "lr", "grad_norm", "samples_per_second"):
                found = f"{name}, as metrics.jsonl calls something else: rename it"
        if found is None and _tensors(losses) and not any(value.requires_grad for value in _tensors(losses)):
            found = "losses that no gradient leads back from: something detaches them, or all parameters are frozen"
    if found is not None:
        raise ConfigError(
            f"model: {shown(model)}.{call} must give a dict of 0-dim tensors such as {{'loss': ...}}, but gives "
            f"{found}; see {EXPERIMENT_PAGE}"
        )


def explain_unused(session: Session, data: Data, model: nn.Module) -> RunError:
    """What to do where DDP waits for gradients that never come; takes the first training batch once more, as above."""
    losses, _ = _first_losses(session, data, model)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    # Not backward(): its hooks are DDP's.
    total = torch.stack(_tensors(losses)).sum()
    gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    names = [name for name, gradient in zip(trained, gradients) if gradient is None]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return RunError(
        f"model: no loss of {shown(model)} depends on {', '.join(names[:3]) or 'some parameters'}{more}, and the ranks "
        "wait for their gradients; remove or freeze them, or set wrapper.find_unused_parameters=true"
    )


def _first_losses(session: Session, data: Data, model: nn.Module) -> tuple[Any, str]:
    """What the model gives for the first training batch of this rank, and how it was called."""
    config, info = session.config, session.info
    train = split_in_use(session, data, "train")
    assert config.batch_size is not None  # derived where it was not given
    sampler = TrainBatchSampler(
        len(train),
        config.batch_size,
        info.rank,
        info.world_size,
        seed=config.seed,
        with_epoch=getattr(train, "needs_epoch", False),
    )
    with asked("data", data, ".train[...]"):
        batch = move(train[next(iter(sampler))], session.device)
    call = call_of(batch, "loss")
    model.train()
    with asked("model", model, f".{call}", inside=False), session.backend.autocast(config.precision):
        return forward(model, preprocessed(model, batch, training=True), "loss"), call


def _tensors(losses: Any) -> list[torch.Tensor]:
    return [value for name, value in losses.items() if "loss" in name and isinstance(value, torch.Tensor)]


def call_of(batch: Any, mode: str) -> str:
    """How a model is called with a batch, for messages."""
    keys = ", ".join(batch) if isinstance(batch, dict) else "..."
    return f"forward({keys}, mode='{mode}')"
