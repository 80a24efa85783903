"""task=train: build, sanity check, resume, train with validation, test the best weights, and make the result."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from omegaconf import OmegaConf

from exp.config.resolve import is_exp_class
from exp.console import format_bytes
from exp.data.loader import TrainBatchSampler, device_loader, make_loader, to_device
from exp.distributed import rng_state, seed_everything, set_rng_state
from exp.engine.build import (
    build_data,
    build_evaluator,
    build_model,
    data_record,
    dataset_for,
    eval_split,
    fingerprint_data,
)
from exp.engine.checkpoint.resume import find_resume
from exp.engine.invariance import SplitCheck
from exp.engine.loops import EvalLoop, TrainLoop
from exp.engine.mmengine import build_hooks
from exp.engine.optim import BackendOptimWrapper, build_optimizer
from exp.engine.result import draw_pictures, make_result, training_pictures, write_samples
from exp.engine.schedules import vanished_rate
from exp.engine.trainer import Trainer
from exp.engine.wrapper import awaited_parameters, forward, is_sharded, place_and_wrap, unwrapped
from exp.errors import ConfigError, DataError, RunError, is_out_of_memory, user_code_errors
from exp.models.base import has_user_loss, has_user_part, parameter_counts
from exp.models.dropout import DropoutStream
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from exp.session import Session


logger = logging.getLogger(__name__)


def train(
    session: Session, throughput: Callable[..., dict[str, float]], fitting_batch: Callable[..., Any]
) -> dict[str, Any]:
    """Do ``task=train``; called on every rank.

    Args:
        session: the session.
        throughput: returns the entries of the result about the speed; see :func:`exp.estimate.training.training_rate`.
        fitting_batch: returns a batch size that fits into the memory; see
            :func:`exp.estimate.training.suggest_batch`.

    Returns:
        The content of ``result.json``; that of rank 0 is used.

    Raises:
        ExpError: errors of the functions that build the parts, and of the training. If the device is out of memory, the
            message (RunError) has settings with the same global batch that need less memory.
    """
    data = build_data(session)
    model = build_model(session, data, for_training=True)
    fingerprint_data(session)
    with _with_out_of_memory_advice(session, fitting_batch):
        trainer = build_trainer(session, data, model)
        metrics_hook, tests = trainer.metrics_hook, trainer.test_loop
        assert tests is not None
        if session.config.sanity_check:
            _check_one_batch(data, trainer)
        source, load = find_resume(trainer)
        try:
            trainer.train(load)
            content, tested_entries = trainer.checkpoints.select_test_weights(trainer)
            metrics = trainer.test(content)
            write_samples(session, tests.evaluator, tests.dataloader.sampler)
        finally:  # restores the terminal, and ends the loader processes, also after an error
            metrics_hook.progress.stop()
            trainer.close()
        evaluator = tests.evaluator
        data_entries = data_record(session, data)
        rate_warning = vanished_rate(session.folder.records(), evaluator.metric_name, evaluator.greater_is_better)
        if rate_warning is not None:  # printed below the table of metrics
            data_entries["warnings"] = [*data_entries.get("warnings", ()), rate_warning]
        draw_pictures(session, lambda: training_pictures(session, trainer.model, evaluator))
        speed = metrics_hook.samples / metrics_hook.train_seconds if metrics_hook.train_seconds else None
        # Read now, since throughput() below also allocates memory.
        memory_peak = session.distributed.gather(session.backend.usage().get("max_allocated"))
        rates = throughput(session, data, speed, metrics_hook.train_seconds) if speed and session.info.rank == 0 else {}
        return make_result(
            session,
            metrics,
            evaluator,
            tested_entries["validation"][evaluator.metric_name],
            steps=trainer.iter,
            epochs=trainer.epoch,
            measured_on=data.test_split_name,
            data=data_entries,
            samples_per_second=speed,
            **rates,
            time_to_first_step_s=metrics_hook.time_to_first_step,
            memory_peak=memory_peak,
            **parameter_counts(unwrapped(trainer.model)),
            rank_times=None if trainer.rank_times is None else trainer.rank_times.summary(),
            steps_replayed=None if trainer.optim_wrapper.replay is None else len(trainer.optim_wrapper.replay.checked),
            cpu_fallbacks=metrics_hook.fallback_counter.summary(session.distributed),
            resumed_from=source,
            warnings=session.warnings,
            changed_on_resume={change.key: {"old": change.old, "new": change.new} for change in session.changed},
            **tested_entries,
        )


def build_trainer(session: Session, data: Any, model: Any) -> Trainer:
    """Build the trainer of the configuration.

    Args:
        session: the session.
        data: of :func:`exp.engine.build.build_data`.
        model: of :func:`exp.engine.build.build_model`, on the CPU.

    Raises:
        ConfigError: a split, a metric, the optimizer, a schedule or a hook does not match the configuration.
        DataError: a split is empty, or has fewer samples than one global batch.
        PlacementError: the model is not wholly on the device.
        UnavailableError: a class cannot be imported, or the wrapper does not support this machine.
    """
    config = session.config
    train = dataset_for(session, data, "train")
    evaluator = build_evaluator(session, data)
    assert config.batch_size is not None  # validate() has derived it
    sampler = TrainBatchSampler(
        len(train),
        batch_size=config.batch_size,
        rank=session.info.rank,
        world_size=session.info.world_size,
        accumulate=config.accumulate,
        seed=config.seed,
        with_epoch=getattr(train, "needs_epoch", False),
        parts=session.parts,
    )
    if sampler.left_out:
        logger.info("each epoch leaves out %d training samples, different ones each time", sampler.left_out)
    model = place_and_wrap(model, session)
    bare = unwrapped(model)
    seed_everything(config.seed + session.info.rank, session.backend)  # ranks draw different dropout masks
    hooks: Any = OmegaConf.to_container(config.hooks, resolve=True)
    user_hooks = build_hooks(hooks, evaluator.metric_name, evaluator.greater_is_better, evaluator.names)
    if config.sanity_check and has_user_loss(bare):
        user_hooks.append(SplitCheck(session))
    dropouts = DropoutStream(bare, sampler, config.seed) if config.dropout_by_sample else None
    if dropouts is not None and dropouts.left_out:
        session.print(
            f"dropout_by_sample=true: {', '.join(dropouts.left_out)} still draw from the device's generator; replace "
            "torch's dropout there by exp.models.dropout.Dropout"
        )
    loader = device_loader(train, sampler, data.num_workers, session)
    trainer = Trainer(
        session,
        model,
        BackendOptimWrapper(
            build_optimizer(bare, config.optim, session.backend.capabilities.lacking_operators),
            session.backend,
            precision=config.precision,
            accumulate=config.accumulate,
            clip_grad_norm=config.optim.clip_grad_norm,
            model=bare,
            awaited=awaited_parameters(model),
            loss_weight=sampler.weights[session.info.rank],
        ),
        TrainLoop(loader, config.max_epochs, config.max_steps, config.accumulate, config.val_every, dropouts),
        EvalLoop(session, model, eval_split(session, data, "val"), build_evaluator(session, data), "val"),
        EvalLoop(session, model, eval_split(session, data, "test"), evaluator, "test"),
        user_hooks,
    )
    savers = trainer.user_hooks_overriding("before_save_checkpoint", "after_load_checkpoint")
    if savers and is_sharded(bare):
        raise ConfigError(
            f"hooks: {', '.join(savers)}: these put weights of their own into checkpoints, and with wrapper=fsdp no "
            "rank has them whole",
            "leave them out, or use wrapper=ddp",
            key="hooks",
        )
    return trainer


def _check_one_batch(data: Any, trainer: Trainer) -> None:
    """Sanity check: evaluate one validation batch before training, so that errors in the user's code come at once.

    Skipped if data, model and metrics are exp's own. The losses of a plain module are computed, too. All ranks use the
    same samples, because a forward pass of a sharded model is a collective.
    """
    model, loop = unwrapped(trainer.model), trainer.val_loop
    assert loop is not None
    if all(map(is_exp_class, (data, model, *loop.evaluator.metrics))) and not has_user_part(model):
        return
    dataset: Any = loop.dataloader.dataset
    first = torch.arange(min(data.eval_batch_size, len(dataset)))
    session, state = trainer.session, rng_state(trainer.backend)
    with user_code_errors("data", data):
        # In a loader process, if the other loaders have some: files opened in this process may not be readable there.
        (batch,) = make_loader(dataset, [first], min(data.num_workers, 1))
    if getattr(model, "user_module", None) is not None:
        with torch.no_grad(), session.backend.autocast(session.config.precision):
            forward(model.eval(), to_device(batch, session.device), "loss")
    loop.evaluator.reset()
    EvalLoop(session, model.eval(), loop.dataloader, loop.evaluator, "val").run_iter(0, batch)
    with contextlib.suppress(DataError):  # these few samples may have no value of a metric
        loop.evaluator.compute(session.distributed)
    set_rng_state(state, session.backend)


@contextlib.contextmanager
def _with_out_of_memory_advice(session: Session, fitting_batch: Callable[..., Any]) -> Iterator[None]:
    """Context that adds advice to errors about the device's memory."""
    try:
        yield
    except Exception as error:  # a model may raise anything
        if not is_out_of_memory(error):
            raise
        report_stage(Stage.FREE)  # no time limit for the estimate
        config, total = session.config, session.backend.usage().get("total")
        fits = fitting_batch(config, session.backend, total) or {}
        assert config.batch_size is not None  # validate() has derived it
        share = config.batch_size * config.accumulate  # samples of a step on this rank
        smaller = (candidate for candidate in range(config.batch_size // 2, 0, -1) if share % candidate == 0)
        batch = fits.get("batch_size", next(smaller, None))
        advice = "use less memory per sample: a smaller model, a lower precision, more processes"
        if session.parts:
            advice = f"give this rank a smaller share than {session.parts[session.info.rank]} samples of a micro-batch"
        elif batch is not None:
            estimated = f" (estimated: {format_bytes(fits['memory'])})" if fits else ""
            effect = f"keeps the global batch of {config.global_batch_size}{estimated}"
            advice = f"batch_size={batch} accumulate={share // batch} {effect}"
        rank, device = session.info.rank, f"{session.device} ({format_bytes(total)})" if total else session.device
        finding = f"rank {rank}: {device} is out of memory at batch_size={config.batch_size}"
        raise RunError(finding, advice, rank=rank) from error
