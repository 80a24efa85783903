"""task=train: train with validation, then test the best weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from exp.console import size
from exp.contract import EXPERIMENT_PAGE
from exp.data.loader import device_loader, share_loader
from exp.data.sampler import TrainBatchSampler
from exp.engine import checkpoint
from exp.engine.building import (
    build_data,
    build_evaluator,
    build_model,
    fingerprint_of,
    make_result,
    record_environment,
)
from exp.engine.debug import Interrupted, debug_hooks, split_in_use
from exp.engine.fsdp import is_sharded, refuse_hooks
from exp.engine.hooks import MetricsHook
from exp.engine.logger import build_loggers
from exp.engine.loops import EvalLoop, TrainLoop
from exp.engine.optim import BackendOptimWrapper, build_optimizer
from exp.engine.preemption_hook import Agreement, PreemptionHook
from exp.engine.progress import Progress
from exp.engine.rate import training_rate
from exp.engine.rehearsal import explain_first_step, explain_unused, rehearse
from exp.engine.resume import compare, find_checkpoint
from exp.engine.rng import seed_everything
from exp.engine.runner import Runner
from exp.engine.saving import CheckpointHook
from exp.engine.stock_hooks import build_hooks
from exp.engine.wrapper import place_as_configured, unwrapped
from exp.errors import ConfigError, ExpError, RunError, SampleError
from exp.heartbeat import Stage, beat
from exp.launcher.outcome import is_of_peer
from exp.models.base import parameter_counts
from exp.models.dropout import DropoutStream
from exp.raised import message_of

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Training", "train"]

logger = logging.getLogger(__name__)
_WORTH_SAYING = 0.01
"""Share of the training samples; what fewer leave out is in the log alone."""


def train(session: Session) -> dict[str, Any]:
    """Train, and return the content of ``result.json`` (used on rank 0).

    Raises:
        ExpError: see the parts; an exhausted device memory comes with a batch size that keeps the global batch.
    """
    record_environment(session)
    try:
        return _train(session)
    except Interrupted as interrupted:
        step = interrupted.step
    session.say(f"debug: interrupted after step {step}; everything is built anew, and goes on from the checkpoint")
    session.start_anew()
    return _train(session)


def _train(session: Session) -> dict[str, Any]:
    data = build_data(session)
    if session.distributed.is_main:
        session.data_files = fingerprint_of(data)
    model = build_model(session, data, to_place=True)
    try:
        training = Training(session, data, model)
        rehearse(session, data, unwrapped(training.runner.model))
        return training.run()
    except SampleError as error:
        if session.begun:
            raise
        raise ConfigError(f"{message_of(error)}; see {EXPERIMENT_PAGE}") from error
    except ExpError:
        raise
    except Exception as error:  # a model may raise anything
        if "out of memory" in str(error):
            raise RunError(_out_of_memory(session)) from error
        if "Expected to have finished reduction in the prior iteration" in str(error):
            raise explain_unused(session, data, model) from error
        if not session.begun and not is_of_peer(error) and not is_sharded(model):
            explain_first_step(session, data, model)
        raise


class Training:
    """The parts of one training run: everything is built here, :meth:`run` trains.

    Args:
        session: the session.
        data: of :func:`exp.engine.building.build_data`.
        model: on the CPU.
    """

    def __init__(self, session: Session, data: Any, model: Any) -> None:
        config = session.config
        assert config.batch_size is not None  # derived where it was not given
        self.session = session
        self.data = data
        train, val, test = (split_in_use(session, data, split) for split in ("train", "val", "test"))
        if session.config.debug.train_batches is not None and not session.restarted_here:
            session.say(f"debug: {len(train)} samples to train, {len(val)} to validate, {len(test)} to test")
        self.evaluator = build_evaluator(session, data)  # after the test: its figures
        sampler = TrainBatchSampler(
            len(train),
            batch_size=config.batch_size,
            rank=session.info.rank,
            world_size=session.info.world_size,
            accumulate=config.accumulate,
            seed=config.seed,
            with_epoch=getattr(train, "needs_epoch", False),
        )
        if sampler.left_out and not session.restarted_here:
            tell = session.say if sampler.left_out >= len(train) * _WORTH_SAYING else logger.info
            tell(
                f"{sampler.left_out} of {len(train)} training samples are left out in each epoch, others each time: "
                f"global batch {sampler.global_batch_size}"
            )
        self.metrics_hook = MetricsHook(
            session.folder.metrics, config.log_every, Progress(session.console), session.started
        )
        self.checkpoint_hook = CheckpointHook(
            session.folder.checkpoints,
            config.checkpoint,
            config.patience,
            config.min_delta,
            self.evaluator.metric_name,
            self.evaluator.greater_is_better,
        )
        # The model is moved before the optimizer is built: parameters may be new objects on the device.
        model = self._placed(model)
        seed_everything(config.seed + session.info.rank, session.backend)  # ranks draw different dropout masks
        optim_wrapper = BackendOptimWrapper(
            build_optimizer(model, config.optim, session.backend.capabilities.lacking_operators),
            session.backend,
            precision=config.precision,
            accumulate=config.accumulate,
            clip_grad_norm=config.optim.clip_grad_norm,
            model=model,
        )
        hooks: Any = OmegaConf.to_container(config.hooks, resolve=True)
        judge = self.evaluator
        user_hooks = build_hooks(hooks, judge.metric_name, judge.greater_is_better, judge.names)
        if is_sharded(model):
            refuse_hooks(user_hooks)
        schedulers = OmegaConf.to_container(config.schedule.param_scheduler, resolve=True)
        self.runner = Runner(
            session,
            model,
            train_dataloader=device_loader(train, sampler, data.num_workers, session),
            train_cfg={
                "type": TrainLoop,
                "max_epochs": config.max_epochs,
                "max_steps": config.max_steps,
                "accumulate": config.accumulate,
                "val_every": config.val_every,
                "dropouts": self._dropouts(model, sampler),
            },
            optim_wrapper=optim_wrapper,
            param_scheduler=schedulers or None,
            val_dataloader=share_loader(val, data, session),
            val_cfg={"type": EvalLoop, "stage": "val"},
            val_evaluator=build_evaluator(session, data),
            test_dataloader=share_loader(test, data, session),
            test_cfg={"type": EvalLoop, "stage": "test"},
            test_evaluator=self.evaluator,
            custom_hooks=[
                self.metrics_hook,
                self.checkpoint_hook,
                PreemptionHook(Agreement(session.info.preemption_flag, session.distributed), self.checkpoint_hook),
                *debug_hooks(session, self.checkpoint_hook),
                *user_hooks,
            ],
            visualizer=_visualizer(session),
        )

    def _dropouts(self, model: Any, sampler: TrainBatchSampler) -> DropoutStream | None:
        if not self.session.config.dropout_by_sample:
            return None
        stream = DropoutStream(model, sampler, self.session.config.seed)
        if stream.left_out:
            self.session.say(
                f"dropout_by_sample=true: {', '.join(stream.left_out)} draw from the device's generator; where "
                "that is dropout, make it exp.models.dropout.Dropout"
            )
        return stream

    def _placed(self, model: Any) -> Any:
        session = self.session
        if session.info.world_size == 1:
            return model.to(session.device)
        return place_as_configured(model, session.config.wrapper, session.backend, session.device)

    def run(self) -> dict[str, Any]:
        """Resume where asked to, train, test the best weights."""
        runner, session = self.runner, self.session
        resumed_from = self._resume()
        try:
            runner.train()
            content, tested = self.checkpoint_hook.tested(runner)
            metrics = runner.test_with(content)
        finally:  # the terminal's cursor and the loaders' processes, whatever has happened
            self.metrics_hook.progress.stop()
            runner.checkpoint_writer.close()
            runner.close()
        if session.config.plots and session.distributed.is_main:
            self._draw()
        runner.visualizer.close()
        hook = self.metrics_hook
        speed = hook.samples / hook.train_seconds if hook.train_seconds else None
        # The training's own: what is measured next takes memory, too.
        memory_peak = session.distributed.gather(session.backend.usage().get("max_allocated"))
        rate = training_rate(session, self.data, speed, hook.train_seconds) if speed and session.info.rank == 0 else {}
        return make_result(
            session,
            metrics,
            self.evaluator,
            tested["validation"][self.evaluator.metric_name],
            steps=runner.iter,
            epochs=runner.epoch,
            measured_on=self.data.tested_on,
            data=self.data.record(self.session.distributed.gather),
            samples_per_second=speed,
            **rate,
            time_to_first_step_s=hook.time_to_first_step,
            memory_peak=memory_peak,
            **parameter_counts(unwrapped(runner.model)),
            left_device=None if hook.left_device is None else hook.left_device.summary(session.distributed),
            resumed_from=resumed_from,
            changed_on_resume={change.key: {"old": change.old, "new": change.new} for change in session.changed},
            **tested,
        )

    def _draw(self) -> None:
        """Pictures in ``plots/``; they are extras, so what goes wrong with them must not cost the result."""
        from exp.engine.plots import draw_training

        try:
            draw_training(self.session, self.data, self.runner.model, self.evaluator)
        except Exception as error:
            logger.exception("plots")
            self.session.say(f"plots: not drawn: {type(error).__name__}: {error}; the log of rank 0 tells more")

    def _resume(self) -> str | None:
        session = self.session
        # A start that had not begun when it was started again has saved nothing: what is there is an earlier run's.
        restarted = (session.info.restart_count > 0 or session.info.requeues > 0) and not session.pending
        restarted = restarted or session.restarted_here
        path: Path | None = None
        parameters = {name for name, _ in unwrapped(self.runner.model).named_parameters()}
        # What a restarted run has saved itself comes before what it was told to begin with.
        for wanted in ["auto"] * restarted + [session.config.resume]:
            if wanted is not None and path is None:
                path, content = find_checkpoint(session, wanted, parameters)
        if path is None:
            return None
        session.resumed_from = path
        session.changed = compare(session, content, path)
        self.runner.resume_from(content, path, self.checkpoint_hook)
        unchecked = "" if checkpoint.digest_in(path) else f" ({checkpoint.NO_DIGEST})"
        session.say(f"resume: from {path}, after step {content['meta']['step']}{unchecked}")
        for change in session.changed:
            session.say(f"  changed: {change}")
        return str(path)


def _visualizer(session: Session) -> dict[str, Any]:
    return {
        "type": "Visualizer",
        "name": session.unique_name,
        "vis_backends": build_loggers(session) or None,
        "save_dir": str(session.folder.path),
    }


def _out_of_memory(session: Session) -> str:
    from exp.estimate.trace import what_fits  # only where it is needed

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
