"""The Trainer, which MMEngine's hooks use as their runner, and the content of its checkpoints.

What hooks of MMEngine find in it is in :class:`exp.engine.mmengine.RunnerInterface`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch
from mmengine.hooks import Hook, ParamSchedulerHook
from omegaconf import OmegaConf

from exp import console
from exp.config.diff import training_config
from exp.data.loader import to_device
from exp.distributed import rng_state
from exp.engine.checkpoint.policy import CheckpointHook
from exp.engine.checkpoint.reader import list_checkpoints, load_shards
from exp.engine.checkpoint.writer import CheckpointWriter
from exp.engine.hooks import LossMeter, MetricsHook, OverfitHook
from exp.engine.loops import EvalLoop, TrainLoop
from exp.engine.mmengine import RunnerInterface, rank_logger
from exp.engine.preemption import PreemptionHook
from exp.engine.rank_times import RankTimes
from exp.engine.replay import StepReplay
from exp.engine.schedules import build_schedulers
from exp.engine.wrapper import is_sharded, unwrapped
from exp.errors import ConfigError, RunError, qualified_name
from exp.runs.heartbeat import Stage, report_stage
from exp.task import resume_command

if TYPE_CHECKING:
    from exp.engine.optim import BackendOptimWrapper
    from exp.session import Session


logger = logging.getLogger(__name__)


class Trainer(RunnerInterface):
    """Trains and tests one model on the session's device; the ``runner`` of MMEngine's hooks.

    Args:
        session: has device, backend, process group, configuration and run folder.
        model: on the device, wrapped or not (:func:`exp.engine.wrapper.place_and_wrap`).
        optim_wrapper: optimizer of the model's parameters.
        train_loop: has the training batches and the length of the training.
        val_loop: the validation; None: there is none.
        test_loop: the test; None: there is none.
        hooks: the user's hooks. The Trainer adds MMEngine's ParamSchedulerHook and the hooks of the engine, and calls
            all in the order of their priorities.

    Raises:
        ConfigError: a scheduler or a visualization backend is unknown, or does not take its settings.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        optim_wrapper: BackendOptimWrapper,
        train_loop: TrainLoop,
        val_loop: EvalLoop | None = None,
        test_loop: EvalLoop | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.session, self.device, self.backend = session, session.device, session.backend
        self.distributed_group = group = session.distributed
        self.rank, self.world_size, self.distributed = group.rank, group.world_size, group.world_size > 1
        self.seed, self.deterministic = int(session.config.seed), torch.are_deterministic_algorithms_enabled()
        self.model, self.model_name = model, type(unwrapped(model)).__name__
        self.optim_wrapper: Any = optim_wrapper
        self.train_loop, self.val_loop, self.test_loop = train_loop, val_loop, test_loop
        for loop in filter(None, (val_loop, test_loop)):
            loop.runner = self
        self.losses = LossMeter()
        self.rank_times = RankTimes(model, session, train_loop.accumulate) if self.distributed else None
        optim_wrapper.rank_times = self.rank_times
        if session.config.debug.replay_every:
            optim_wrapper.replay = StepReplay(session, model, optim_wrapper, train_loop.dropouts)
        self.work_dir, self.log_dir = str(session.folder.path), str(session.folder.logs)
        self.experiment_name, self.logger = session.unique_name, rank_logger(session.unique_name)
        self.share_with_mmengine(hooks)
        schedulers: Any = OmegaConf.to_container(session.config.schedule.param_scheduler, resolve=True)
        self.param_schedulers = build_schedulers(schedulers, self)
        metric_args = () if val_loop is None else (val_loop.evaluator.metric_name, val_loop.evaluator.greater_is_better)
        self.metrics_hook = MetricsHook(session)
        self.checkpoints = CheckpointHook(session.config, session.folder.checkpoints, *metric_args)
        preemption = PreemptionHook(session.info, group, session.store, self.checkpoints)
        overfit = [OverfitHook()] if session.config.debug.overfit else []
        for hook in (ParamSchedulerHook(), self.metrics_hook, self.checkpoints, preemption, *overfit, *hooks):
            self.register_hook(hook)
        self.checkpoint_writer = CheckpointWriter(self.backend, group, is_sharded(unwrapped(model)), session.run_id)

    # -- train, evaluate ---------------------------------------------------------------------------------------------

    def train(self, load: Callable[[], object] | None = None) -> None:
        """Train and validate, epoch by epoch; an optimizer step has ``accumulate`` micro-batches.

        An epoch that ends early because of ``max_steps`` is validated like any other, but does not count as completed.
        So a resumed run with a larger ``max_steps`` continues within this epoch.

        Args:
            load: restores the state of a checkpoint; called after the ``before_run`` of hooks. None: a new training.
        """
        loop, dropouts, times = self.train_loop, self.train_loop.dropouts, self.rank_times
        self._resume = load is not None
        self.call_hook("before_run")
        if load is not None:
            load()
        self.optim_wrapper.initialize_count_status(self.model, loop.iter * loop.accumulate, -1)
        self.optim_wrapper.count()
        self.call_hook("before_train")
        if any(hasattr(hook, "before_clipping") for hook in self.hooks):
            self.optim_wrapper.before_clipping.append(lambda: self.call_hook("before_clipping"))
        if any(hasattr(hook, "after_clipping") for hook in self.hooks):
            self.optim_wrapper.after_clipping.append(lambda: self.call_hook("after_clipping"))
        if dropouts is not None:
            self.optim_wrapper.during_backward = dropouts.during_backward
        if loop.validation_due:
            self._validate()
        bare: Any = unwrapped(self.model)
        start_epoch, end_step = (getattr(bare, name, None) for name in ("start_epoch", "end_step"))  # not MMEngine's
        if self.world_size > 1 and end_step is not None:
            collectives = self.backend.collectives
            # A function, which a copy of the model shares; a bound method would be copied with its object.
            bare.all_reduce = lambda value: collectives.all_reduce(value)
        while not loop.finished and not loop.stop_training:
            self.call_hook("before_train_epoch")
            if start_epoch is not None:
                start_epoch(loop.epoch)
            self.model.train()
            batches = iter(loop.dataloader)
            index = loop.sampler.samples // loop.sampler.global_batch_size
            while index < loop.steps_per_epoch and loop.iter < loop.max_iters and not loop.stop_training:
                try:
                    for micro in range(loop.accumulate):
                        report_stage(Stage.DATA, loop.iter + 1)
                        if times is not None:
                            times.start("data")
                        batch = to_device(next(batches), self.device)
                        if times is not None:
                            times.stop()
                        if micro == 0:
                            self.call_hook("before_train_iter", batch_idx=index, data_batch=batch)
                        report_stage(Stage.FORWARD)
                        if dropouts is not None:
                            dropouts.begin(loop.iter, micro)
                        if self.optim_wrapper.replay is not None and micro == loop.accumulate - 1:
                            self.optim_wrapper.replay.begin(batch, loop.iter + 1)
                        if times is not None:
                            times.start("forward")
                        outputs = self.model.train_step(batch, optim_wrapper=self.optim_wrapper)  # type: ignore[operator]
                        self.losses.add(outputs)
                finally:
                    if dropouts is not None:
                        dropouts.end()
                if times is not None:
                    times.end_step()
                loop.sampler.advance()
                self._check_updates()
                if end_step is not None:
                    end_step(loop.iter + 1, loop.max_iters)
                report_stage(Stage.HOOKS)
                self.session.start_run()  # after the first step, which would have failed if the memory were too small
                self.call_hook("after_train_iter", batch_idx=index, data_batch=batch, outputs=outputs)
                del batch, outputs  # free their memory before the next batch or a validation
                loop.iter += 1
                index += 1
                if loop.val_every is not None and loop.iter % loop.val_every == 0 and not loop.stop_training:
                    self._validate()
            del batches
            if loop.stop_training:
                break
            if index == loop.steps_per_epoch:
                self.call_hook("after_train_epoch")
                loop.epoch += 1
                loop.sampler.set_position(loop.epoch, 0)
            if loop.val_every is None or loop.iter == loop.max_iters:
                self._validate()
        report_stage(Stage.FREE)  # no time limit for what follows, which is done once
        self.session.start_run()  # for a resumed run without a step left
        self.call_hook("after_train")
        self.call_hook("after_run")

    def _check_updates(self) -> None:
        """Refuse a step without an update of the weights, and other numbers than one if micro-batches accumulate.

        Raises:
            ConfigError: the model's own ``train_step`` does so in the first step.
            RunError: in a later one.
        """
        passes, updates = self.optim_wrapper.count()
        accumulate, weighted = self.train_loop.accumulate, self.optim_wrapper.loss_weight != 1.0
        if not updates or (weighted and not passes) or (accumulate > 1 and (passes, updates) != (accumulate, 1)):
            raise (RunError if self.session.is_started else ConfigError)(
                f"{qualified_name(unwrapped(self.model))}.train_step has made {passes} backward passes and "
                f"{updates} updates of the weights in step {self.iter + 1}, with accumulate={accumulate}; it must call "
                f"update_params {'once' if accumulate > 1 else 'at least once'} per micro-batch"
            )

    def _validate(self) -> None:
        if self.val_loop is not None and self.train_loop.validated != self.iter:
            self.train_loop.validated = self.iter
            self.val_loop.run()
            self.model.train()

    def test(self, content: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Test the model; returns the metrics by name.

        Args:
            content: the checkpoint whose weights are loaded before; None: keep the weights of the model.
        """
        assert self.test_loop is not None
        self._resume = False
        self.call_hook("before_run")
        if content is not None:
            model = unwrapped(self.model)
            best = load_shards(content, model)
            self.call_hook("after_load_checkpoint", checkpoint=best)
            model.load_state_dict(best["state_dict"])
        metrics = self.test_loop.run()
        self.call_hook("after_run")
        return metrics

    def divergence_advice(self) -> tuple[str, list[str]]:
        """Advice for a diverged training and, if there is a checkpoint, the command that resumes with a lower rate.

        A collective, because it waits for the checkpoint that is being written.

        Returns:
            The arguments ``advice`` and ``details`` of an error.
        """
        session = self.session
        try:
            self.checkpoint_writer.wait()
        except Exception:
            logger.exception("the last checkpoint is not saved")  # only logged: not the reason for the failure
        session.distributed.barrier()
        advice, details = "lower optim.lr, set optim.clip_grad_norm, or use precision=fp32", []
        checkpoints = list_checkpoints(session.folder.checkpoints)
        if checkpoints:
            which, source, resumed_from = "newest", "auto", session.resumed_from
            if len(checkpoints) > 1 and resumed_from is not None and checkpoints[0].samefile(resumed_from):
                # This run has resumed from the newest, and diverged.
                which, source = "last but one", console.display_path(checkpoints[1])
            rate = f"optim.lr={session.config.optim.lr / 2:.4g}"
            command = resume_command(session.config, session.folder, f"resume={source}", rate)
            details = [f"to resume from the {which} checkpoint with half the learning rate: {command}"]
        return advice, details

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and delete the data loaders, so that their processes end now.

        If the garbage collector deletes the loaders, each takes five seconds, because it deletes their queues before
        torch can ask the processes to end.
        """
        self.checkpoint_writer.close()
        for loop in (self.train_loop, self.val_loop, self.test_loop):
            if loop is not None:
                del loop.dataloader

    # -- the content of a checkpoint --------------------------------------------------------------------------------

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Replace floating-point buffers by their mean over ranks, such as running statistics. A collective.

        Ranks with more samples of each batch count more. These are the buffers of the model, and of copies of it that
        are attributes of hooks. All are averaged at once, in float64 on the CPU: then the mean of equal values is
        exactly this value, so constants do not change, and every backend supports it. Integer buffers, such as counts
        of steps, are equal on all ranks already.
        """
        if self.world_size == 1:
            return
        hook_models = [
            value for hook in self.hooks for value in vars(hook).values() if isinstance(value, torch.nn.Module)
        ]
        models = (unwrapped(self.model), *hook_models)
        buffers = {id(buffer): buffer for model in models for buffer in model.buffers() if buffer.is_floating_point()}
        if buffers:
            values = torch.cat([buffer.cpu().double().reshape(-1) for buffer in buffers.values()])
            weight = self.train_loop.sampler.weights[self.rank]
            means = self.distributed_group.sum(values * weight) / self.world_size
            sizes = [buffer.numel() for buffer in buffers.values()]
            for buffer, mean in zip(buffers.values(), means.split(sizes)):
                buffer.copy_(mean.to(buffer.dtype).view_as(buffer))  # convert on the CPU: some devices have no float64

    def training_checkpoint(self, step: int, best: Mapping[str, Any], validation_due: bool = False) -> dict[str, Any]:
        """Everything that a training needs to resume exactly. A collective: rank 0 gets what differs between ranks.

        Args:
            step: optimizer steps completed.
            best: state of the :class:`exp.engine.checkpoint.policy.CheckpointHook`.
            validation_due: whether a resumed run starts with a validation.

        Returns:
            The checkpoint; its tensors are not copied.
        """
        self.average_buffers()
        by_rank = self.distributed_group.gather_to_main((rng_state(self.backend), self.losses.state()))
        content = {
            **self.weights(step),
            "optimizer": self.optim_wrapper.state_dict(),
            "param_schedulers": [scheduler.state_dict() for scheduler in self.param_schedulers],
            "message_hub": self.message_hub_state(),
            "rng": [rng for rng, _ in by_rank],
            "losses": [losses for _, losses in by_rank],
            "best": dict(best),
        }
        content["meta"]["validation_due"] = validation_due
        if self.distributed_group.is_main:  # as in MMEngine, since hooks may write files there
            self.run_save_hooks(content)
        return content

    def weights(self, step: int) -> dict[str, Any]:
        """A checkpoint of the weights alone: state dict, state of the data, configuration and position.

        Args:
            step: optimizer steps completed.
        """
        session, loop = self.session, self.train_loop
        meta = {
            "format": 1,
            "experiment": session.config.name,
            "step": step,
            "iter": step,  # the name in MMEngine's hooks
            "epoch": loop.epoch,
            "samples": loop.sampler.samples,
            "steps_per_epoch": loop.steps_per_epoch,
            "stopped": loop.stop_training,
            "global_batch_size": session.config.global_batch_size,
            "world_size": self.world_size,
            "parts": loop.sampler.parts,
            "seed": self.seed,
        }
        data_entries = {"data": session.data_state, "data_files": session.data_files}
        return {
            "meta": meta,
            "state_dict": unwrapped(self.model).state_dict(),
            **{key: value for key, value in data_entries.items() if value is not None},
            "config": training_config(session.config),
        }

    def run_save_hooks(self, content: dict[str, Any]) -> None:
        """Call ``before_save_checkpoint``; if a hook replaces weights, record the classes of hooks in ``meta``."""
        before = dict(content["state_dict"])
        self.call_hook("before_save_checkpoint", checkpoint=content)
        after = content["state_dict"]
        if any(after.get(key) is not value for key, value in before.items()):
            content["meta"]["weights_of_hooks"] = self.user_hooks_overriding("before_save_checkpoint")
