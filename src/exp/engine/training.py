"""task=train: build, check one batch, resume, train with validation, test the best weights, record."""

from __future__ import annotations

import contextlib
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from omegaconf import OmegaConf

from exp.config.resolve import is_own
from exp.console import size
from exp.data.loader import device_loader, eval_loader, move, share_loader
from exp.data.sampler import TrainBatchSampler
from exp.engine import checkpoint
from exp.engine.building import (
    about_data,
    build_data,
    build_evaluator,
    build_model,
    make_result,
    record_environment,
    split_in_use,
)
from exp.engine.device import rng_state, seed_everything, set_rng_state
from exp.engine.fsdp import is_sharded, refuse_hooks
from exp.engine.hooks import MetricsHook, Progress
from exp.engine.logger import build_loggers
from exp.engine.optim import BackendOptimWrapper, build_optimizer
from exp.engine.outputs import draw_extras, training_pictures
from exp.engine.registries import build_hooks
from exp.engine.resume import compare, find_checkpoint, restore
from exp.engine.saving import CheckpointHook
from exp.engine.trainer import EvalLoop, Trainer, TrainLoop
from exp.engine.wrapper import place_and_wrap, predictions, unwrapped
from exp.errors import EXPERIMENT_PAGE, ConfigError, DataError, ExpError, RunError, SampleError, message_of
from exp.models.base import parameter_counts
from exp.models.dropout import DropoutStream
from exp.runs.status import Stage, beat

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["build_trainer", "train"]

logger = logging.getLogger(__name__)
_WORTH_SAYING = 0.01
"""Share of the training samples; if fewer are left out, only the log has it."""


def train(session: Session, rate: Callable[..., dict[str, float]], what_fits: Callable[..., Any]) -> dict[str, Any]:
    """Train, and return the content of ``result.json`` (used on rank 0).

    Args:
        session: the session.
        rate: gives the keys of the result on the speed of a training; see :func:`exp.estimate.trace.training_rate`.
        what_fits: gives a batch size for a device whose memory is exhausted; see :func:`exp.estimate.trace.what_fits`.

    Raises:
        ExpError: see the parts; an exhausted device memory comes with a batch size that keeps the global batch.
    """
    record_environment(session)
    data = build_data(session)
    if session.distributed.is_main and session.extras.fingerprint is not None:
        session.data_files = session.extras.fingerprint()
    model = build_model(session, data, to_place=True)
    with _explained(session, what_fits):
        trainer = build_trainer(session, data, model)
        figures, checkpoints = trainer.figures, trainer.checkpoints
        assert figures is not None
        assert checkpoints is not None
        assert trainer.test_loop is not None
        if session.config.rehearsal:
            _check_one_batch(session, data, trainer)
        source, load = _resume(session, trainer)
        try:
            trainer.train(load)
            content, tested = checkpoints.tested(trainer)
            metrics = trainer.test(content)
        finally:  # the terminal's cursor and the loaders' processes, whatever has happened
            figures.progress.stop()
            trainer.close()
        evaluator = trainer.test_loop.evaluator
        draw_extras(session, lambda: training_pictures(session, trainer.model, evaluator))
        trainer.visualizer.close()
        speed = figures.samples / figures.train_seconds if figures.train_seconds else None
        # The training's own: what is measured next takes memory, too.
        memory_peak = session.distributed.gather(session.backend.usage().get("max_allocated"))
        rates = rate(session, data, speed, figures.train_seconds) if speed and session.info.rank == 0 else {}
        return make_result(
            session,
            metrics,
            evaluator,
            tested["validation"][evaluator.metric_name],
            steps=trainer.iter,
            epochs=trainer.epoch,
            measured_on=data.tested_on,
            data=about_data(session, data),
            samples_per_second=speed,
            **rates,
            time_to_first_step_s=figures.time_to_first_step,
            memory_peak=memory_peak,
            **parameter_counts(unwrapped(trainer.model)),
            left_device=None if figures.left_device is None else figures.left_device.summary(session.distributed),
            resumed_from=source,
            changed_on_resume={change.key: {"old": change.old, "new": change.new} for change in session.changed},
            **tested,
        )


def build_trainer(session: Session, data: Any, model: Any) -> Trainer:
    """The trainer of the configuration.

    Args:
        session: the session.
        data: of :func:`exp.engine.building.build_data`.
        model: on the CPU.
    """
    config, say = session.config, logger.info if session.restarted_here else session.say
    train, val, test = (split_in_use(session, data, split) for split in ("train", "val", "test"))
    if config.debug.train_batches is not None:
        say(f"debug: {len(train)} samples to train, {len(val)} to validate, {len(test)} to test")
    evaluator = build_evaluator(session, data)
    assert config.batch_size is not None  # derived if it was not given
    sampler = TrainBatchSampler(
        len(train),
        batch_size=config.batch_size,
        rank=session.info.rank,
        world_size=session.info.world_size,
        accumulate=config.accumulate,
        seed=config.seed,
        with_epoch=getattr(train, "needs_epoch", False),
    )
    if sampler.left_out:
        (say if sampler.left_out >= len(train) * _WORTH_SAYING else logger.info)(
            f"{sampler.left_out} of {len(train)} training samples are left out in each epoch, others each time: "
            f"global batch {sampler.global_batch_size}"
        )
    model = place_and_wrap(model, session)
    bare = unwrapped(model)
    seed_everything(config.seed + session.info.rank, session.backend)  # ranks draw different dropout masks
    hooks: Any = OmegaConf.to_container(config.hooks, resolve=True)
    schedulers: Any = OmegaConf.to_container(config.schedule.param_scheduler, resolve=True)
    user_hooks = build_hooks(hooks, evaluator.metric_name, evaluator.greater_is_better, evaluator.names)
    if is_sharded(bare):
        refuse_hooks(user_hooks)
    dropouts = DropoutStream(bare, sampler, config.seed) if config.dropout_by_sample else None
    if dropouts is not None and dropouts.left_out:
        session.say(
            f"dropout_by_sample=true: {', '.join(dropouts.left_out)} draw from the device's generator; where "
            "that is dropout, make it exp.models.dropout.Dropout"
        )
    loader = device_loader(train, sampler, data.num_workers, session)
    return Trainer(
        session,
        model,
        TrainLoop(loader, config.max_epochs, config.max_steps, config.accumulate, config.val_every, dropouts),
        EvalLoop(share_loader(val, data, session), build_evaluator(session, data), "val"),
        EvalLoop(share_loader(test, data, session), evaluator, "test"),
        BackendOptimWrapper(
            build_optimizer(bare, config.optim, session.backend.capabilities.lacking_operators),
            session.backend,
            precision=config.precision,
            accumulate=config.accumulate,
            clip_grad_norm=config.optim.clip_grad_norm,
            model=bare,
        ),
        schedulers,
        user_hooks,
        build_loggers(session),
        MetricsHook(session.folder.metrics, config.log_every, Progress(session.console), session.started),
        CheckpointHook(config, session.folder.checkpoints, evaluator.metric_name, evaluator.greater_is_better),
    )


def _check_one_batch(session: Session, data: Any, trainer: Trainer) -> None:
    """Take the first samples of the validation through a model or metrics of the user's, so that errors come at once.

    exp's own have been tested. Every rank takes the same samples: a forward pass of a sharded model is a collective.
    """
    model, loop = unwrapped(trainer.model), trainer.val_loop
    assert loop is not None
    if all(map(is_own, (data, model, *loop.evaluator.metrics))):
        return
    dataset: Any = loop.dataloader.dataset
    first = torch.arange(min(data.eval_batch_size, len(dataset)))
    state = rng_state(session.backend)
    # In a process of its own if the loaders have theirs: files that are open here could not be read there.
    (batch,) = (move(each, session.device) for each in eval_loader(dataset, [first], min(data.num_workers, 1)))
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        outputs = predictions(model.eval(), batch, "val")
    loop.evaluator.reset()
    loop.evaluator.update(outputs, batch)
    session.backend.end_batch(outputs)
    with contextlib.suppress(DataError):  # so few samples may have nothing that can be measured
        loop.evaluator.compute(session.distributed)
    set_rng_state(state, session.backend)


def _resume(session: Session, trainer: Trainer) -> tuple[str | None, Any]:
    """The checkpoint to continue from, and what restores it within :meth:`Trainer.train`; both None: there is none."""
    # A start that had not begun when it was started again has saved nothing: what is there is an earlier run's.
    restarted = (session.info.restart_count > 0 or session.info.requeues > 0) and not session.pending
    path: Path | None = None
    parameters = {name for name, _ in unwrapped(trainer.model).named_parameters()}
    # What a restarted run has saved itself comes before what it was told to begin with.
    for wanted in ["auto"] * (restarted or session.restarted_here) + [session.config.resume]:
        if wanted is not None and path is None:
            path, content = find_checkpoint(session, wanted, parameters)
    if path is None:
        return None, None
    source = session.resumed_from = path
    session.changed = compare(session, content, source)
    unchecked = "" if checkpoint.digest_in(source) else f" ({checkpoint.NO_DIGEST})"
    session.say(f"resume: from {source}, after step {content['meta']['step']}{unchecked}")
    for change in session.changed:
        session.say(f"  changed: {change}")
    return str(source), functools.partial(restore, trainer, content, source)


@contextlib.contextmanager
def _explained(session: Session, what_fits: Callable[..., Any]) -> Iterator[None]:
    """Errors of torch's and of the user's data, with what to do."""
    try:
        yield
    except SampleError as error:
        if session.begun:
            raise
        raise ConfigError(f"{message_of(error)}; see {EXPERIMENT_PAGE}") from error
    except ExpError:
        raise
    except Exception as error:  # a model may raise anything
        if "out of memory" in str(error):
            raise RunError(_out_of_memory(session, what_fits)) from error
        raise


def _out_of_memory(session: Session, what_fits: Callable[..., Any]) -> str:
    beat(Stage.FREE)  # the estimate takes as long as it takes
    config, total = session.config, session.backend.usage().get("total")
    fits = what_fits(config, session.backend, total)
    half = max((config.batch_size or 1) // 2, 1)
    batch, accumulate = (fits["batch_size"], fits["accumulate"]) if fits else (half, config.accumulate * 2)
    estimated = f" (estimated: {size(fits['memory'])})" if fits else ""
    shown = f" ({size(total)})" if total else ""
    return (
        f"rank {session.info.rank}: {session.device}{shown} is out of memory at batch_size={config.batch_size}; "
        f"batch_size={batch} accumulate={accumulate} keeps the global batch of {config.global_batch_size}{estimated}"
    )
