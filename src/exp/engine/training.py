"""task=train: build, sanity check, resume, train with validation, test the best weights, and make the result.

If the configuration or the data of a resumed training differ from those in the checkpoint, the differences are listed,
or refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Container, Iterator, Mapping

import torch
from omegaconf import OmegaConf

from exp.config.differences import Change, changes, refusal, trains_on
from exp.config.resolve import as_plain, is_own
from exp.config.schema import OptimConfig
from exp.console import format_bytes
from exp.data.loader import device_loader, eval_loader, share_loader
from exp.data.places import differences, shortened
from exp.data.sampler import TrainBatchSampler
from exp.distributed import rng_state, seed_everything, set_rng_state
from exp.engine import building, checkpoint
from exp.engine.building import build_data, build_evaluator, build_model, make_result, split_in_use
from exp.engine.invariance import SplitCheck, has_foreign_loss
from exp.engine.optim import BackendOptimWrapper, build_optimizer, parameter_groups, vanished_rate
from exp.engine.outputs import draw_extras, training_pictures
from exp.engine.trainer import EvalLoop, Trainer, TrainLoop
from exp.engine.wrapper import awaited_parameters, is_sharded, place_and_wrap, unwrapped
from exp.errors import CheckpointError, ConfigError, DataError, RunError, is_out_of_memory, user_code_errors
from exp.models.base import parameter_counts
from exp.models.dropout import DropoutStream
from exp.runs.files import seal_of
from exp.runs.heartbeat import Stage, report_stage

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session

logger = logging.getLogger(__name__)
_PARTS = ("meta", "state_dict", "config", "optimizer", "param_schedulers", "rng", "best")


def train(session: Session, rate: Callable[..., dict[str, float]], what_fits: Callable[..., Any]) -> dict[str, Any]:
    """Do ``task=train``; called on every rank.

    Args:
        session: the session.
        rate: returns the entries of the result about the speed; see :func:`exp.estimate.training_rate`.
        what_fits: returns a batch size that fits into the device's memory; see :func:`exp.estimate.what_fits`.

    Returns:
        The content of ``result.json``; that of rank 0 is used.

    Raises:
        ExpError: errors of the functions that build the parts, and of the training. If the device is out of memory, the
            message (RunError) has settings with the same global batch that need less memory.
    """
    data = build_data(session)
    if session.distributed.is_main and session.extras.fingerprint is not None:
        session.data_files = session.extras.fingerprint()
    model = build_model(session, data, to_place=True)
    with _explained(session, what_fits):
        trainer = build_trainer(session, data, model)
        figures, tests = trainer.figures, trainer.test_loop
        assert tests is not None
        if session.config.rehearsal:
            _check_one_batch(session, data, trainer)
        source, load = _resume(session, trainer)
        try:
            trainer.train(load)
            content, tested = trainer.checkpoints.tested(trainer)
            metrics = trainer.test(content)
        finally:  # restores the terminal, and ends the loader processes, also after an error
            figures.progress.stop()
            trainer.close()
        evaluator = tests.evaluator
        about = building.about_data(session, data)
        said = vanished_rate(session.folder.records(), evaluator.metric_name, evaluator.greater_is_better)
        if said is not None:  # printed below the table of metrics
            about["warnings"] = [*about.get("warnings", ()), said]
        draw_extras(session, lambda: training_pictures(session, trainer.model, evaluator))
        trainer.visualizer.close()
        speed = figures.samples / figures.train_seconds if figures.train_seconds else None
        # Read now, since rate() below also allocates memory.
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
            data=about,
            samples_per_second=speed,
            **rates,
            time_to_first_step_s=figures.time_to_first_step,
            memory_peak=memory_peak,
            **parameter_counts(unwrapped(trainer.model)),
            left_device=figures.left_device.summary(session.distributed),
            resumed_from=source,
            warnings=session.warnings,
            changed_on_resume={change.key: {"old": change.old, "new": change.new} for change in session.changed},
            **tested,
        )


def build_trainer(session: Session, data: Any, model: Any) -> Trainer:
    """Build the trainer of the configuration.

    Args:
        session: the session.
        data: of :func:`exp.engine.building.build_data`.
        model: of :func:`exp.engine.building.build_model`, on the CPU.

    Raises:
        ConfigError: a split, a metric, the optimizer, a schedule or a hook does not match the configuration.
        DataError: a split is empty, or has fewer samples than one global batch.
        PlacementError: the model is not wholly on the device.
        UnavailableError: a class cannot be imported, or the wrapper does not support this machine.
    """
    config = session.config
    train, val, test = (split_in_use(session, data, split) for split in ("train", "val", "test"))
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
    )
    if sampler.left_out:
        logger.info("each epoch leaves out %d training samples, different ones each time", sampler.left_out)
    model = place_and_wrap(model, session)
    bare = unwrapped(model)
    seed_everything(config.seed + session.info.rank, session.backend)  # ranks draw different dropout masks
    hooks: Any = OmegaConf.to_container(config.hooks, resolve=True)
    user_hooks = building.build_hooks(hooks, evaluator.metric_name, evaluator.greater_is_better, evaluator.names)
    if config.rehearsal and has_foreign_loss(bare):
        user_hooks.append(SplitCheck(session))
    dropouts = DropoutStream(bare, sampler, config.seed) if config.dropout_by_sample else None
    if dropouts is not None and dropouts.left_out:
        session.say(
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
        ),
        TrainLoop(loader, config.max_epochs, config.max_steps, config.accumulate, config.val_every, dropouts),
        EvalLoop(session, model, share_loader(val, data, session), build_evaluator(session, data), "val"),
        EvalLoop(session, model, share_loader(test, data, session), evaluator, "test"),
        user_hooks,
    )
    savers = trainer.hooks_at("before_save_checkpoint", "after_load_checkpoint") if is_sharded(bare) else []
    if savers:
        raise ConfigError(
            f"hooks: {', '.join(savers)}: these put weights of their own into checkpoints, and with wrapper=fsdp no "
            "rank has them whole; leave them out, or use wrapper=ddp"
        )
    return trainer


def _check_one_batch(session: Session, data: Any, trainer: Trainer) -> None:
    """Sanity check: evaluate one validation batch before training, so that errors in the user's code come at once.

    Skipped if data, model and metrics are exp's own. All ranks use the same samples, because a forward pass of a
    sharded model is a collective.
    """
    model, loop = unwrapped(trainer.model), trainer.val_loop
    assert loop is not None
    if all(map(is_own, (data, model, *loop.evaluator.metrics))):
        return
    dataset: Any = loop.dataloader.dataset
    first = torch.arange(min(data.eval_batch_size, len(dataset)))
    state = rng_state(session.backend)
    with user_code_errors("data", data):
        # In a loader process, if the other loaders have some: files opened in this process may not be readable there.
        (batch,) = eval_loader(dataset, [first], min(data.num_workers, 1))
    loop.evaluator.reset()
    EvalLoop(session, model.eval(), loop.dataloader, loop.evaluator, "val").run_iter(0, batch)
    with contextlib.suppress(DataError):  # these few samples may have no value of a metric
        loop.evaluator.compute(session.distributed)
    set_rng_state(state, session.backend)


@contextlib.contextmanager
def _explained(session: Session, what_fits: Callable[..., Any]) -> Iterator[None]:
    """Context that adds advice to errors about the device's memory."""
    try:
        yield
    except Exception as error:  # a model may raise anything
        if not is_out_of_memory(error):
            raise
        raise RunError(_out_of_memory(session, what_fits)) from error


def _out_of_memory(session: Session, what_fits: Callable[..., Any]) -> str:
    report_stage(Stage.FREE)  # no time limit for the estimate
    config, total = session.config, session.backend.usage().get("total")
    fits = what_fits(config, session.backend, total) or {}
    assert config.batch_size is not None  # validate() has derived it
    share = config.batch_size * config.accumulate  # samples of a step on this rank
    smaller = (each for each in range(config.batch_size // 2, 0, -1) if share % each == 0)
    batch = fits.get("batch_size", next(smaller, None))
    advice = "use less memory per sample: a smaller model, a lower precision, more processes"
    if batch is not None:
        estimated = f" (estimated: {format_bytes(fits['memory'])})" if fits else ""
        kept = f"keeps the global batch of {config.global_batch_size}{estimated}"
        advice = f"batch_size={batch} accumulate={share // batch} {kept}"
    device = f"{session.device} ({format_bytes(total)})" if total else session.device
    return f"rank {session.info.rank}: {device} is out of memory at batch_size={config.batch_size}; {advice}"


# -- resume ------------------------------------------------------------------------------------------------------------


def _resume(session: Session, trainer: Trainer) -> tuple[str | None, Any]:
    """The checkpoint to resume from, and the function ``load`` for :meth:`Trainer.train`; (None, None) if none."""
    # If this run was restarted before it began, it has saved nothing; checkpoints in the folder are of an earlier run.
    restarted = session.info.restart_count > 0 and not session.pending
    path: Path | None = None
    parameters = {name for name, _ in unwrapped(trainer.model).named_parameters()}
    # A restarted run first looks for its own checkpoints, then for the one in config.resume.
    for wanted in ["auto"] * restarted + [session.config.resume]:
        if wanted is not None and path is None:
            path, content = _find_checkpoint(session, wanted, parameters)
    if path is None:
        return None, None
    source = session.resumed_from = path
    session.changed = _compare(session, content, source)
    unchecked = "" if seal_of(source) else f" ({checkpoint.NO_DIGEST})"
    session.say(f"resume: from {source}, after step {content['meta']['step']}{unchecked}")
    for change in session.changed:
        session.say(f"  changed: {change}")
    return str(source), functools.partial(_restore, trainer, content, source)


def _find_checkpoint(session: Session, wanted: str, parameters: Container[str]) -> tuple[Path | None, Any]:
    """Find the checkpoint to resume from. Rank 0 chooses, so that all ranks take the same. A collective.

    Args:
        session: the session.
        wanted: ``auto``, a checkpoint or a run folder.
        parameters: names of the model's parameters.

    Returns:
        Its path and content; both None if ``auto`` finds none.

    Raises:
        ConfigError: the checkpoint that the user has named cannot be read or resumed, or none of those in the folder
            can.
    """
    named = wanted != "auto" and Path(wanted).is_file()
    folder = session.folder.checkpoints if wanted == "auto" else Path(wanted) / "checkpoints"
    candidates = [Path(wanted)] if named else checkpoint.list_checkpoints(folder)
    path: Path | None = None
    content: Any = None
    trouble: str | None = None
    trusted: bool = session.config.checkpoint.trusted
    for each in candidates if session.distributed.is_main else ():
        try:
            content, trouble = checkpoint.read(each, mapped=True, whole=False, trusted=trusted), None
            lacking = [key for key in _PARTS if not isinstance(content, Mapping) or key not in content]
            odd = [] if lacking else checkpoint.not_finite(content["state_dict"], parameters)
            if lacking:
                trouble = f"{each} is not a training checkpoint of exp: it has no {', '.join(lacking)}"
            elif odd:
                trouble = f"{each} has weights that are not finite: {shortened(odd, 1)}"
        except CheckpointError as error:
            trouble = str(error)
        if trouble is None:
            path = each
            break
        if not named:
            session.say(f"resume: skipped: {trouble.splitlines()[0]}")
    path, trouble = session.distributed.gather((path, trouble))[0]
    if named and trouble is not None:
        raise ConfigError(
            f"resume: {trouble}; use an older one, or resume=auto, or start from its weights with init_from={wanted}"
        )
    if path is None:
        if trouble is not None:
            raise ConfigError(
                f"resume={wanted}: none of the {len(candidates)} checkpoints in {folder} can be used: "
                f"{trouble.splitlines()[0]}; restore one, or begin anew with another output_dir or overwrite=true"
            )
        if wanted != "auto":
            raise ConfigError(f"resume={wanted} is neither a checkpoint nor a run folder with one")
        session.say(f"resume=auto: no checkpoint in {folder}; starting a new training")
        return None, None
    return path, content if session.distributed.is_main else checkpoint.read(path, True, whole=False, check=False)


def _compare(session: Session, content: Mapping[str, Any], source: Path) -> tuple[Change, ...]:
    """Compare configuration and data of this run with those in a checkpoint. A collective.

    Args:
        session: the session.
        content: the checkpoint.
        source: its path, for messages.

    Returns:
        The changes that are allowed.

    Raises:
        ConfigError: a key has changed that must stay the same within one training.
        DataError: the data files have changed, and ``resume_changed_data`` is false.
    """
    config = session.config
    found = changes(content["config"], as_plain(config))
    if found.refused:
        raise ConfigError(refusal(found.refused, source))
    files, own = content.get("data_files"), session.data_files  # the latter is known on rank 0 only
    others = [] if files is None or own is None else differences(files, own)
    others = session.distributed.gather(others)[0]
    if not others:
        return found.allowed
    shown = shortened(others, 3)
    if not config.resume_changed_data:
        raise DataError(
            f"resume: {source} was trained on other data: {shown}; restore them, start a new training from its weights "
            f"with init_from={source} and another output_dir, or continue with these data with resume_changed_data=true"
        )
    return (*found.allowed, Change("contents of data", "as the training began", shown))


def _restore(runner: Any, found: dict[str, Any], source: Path) -> None:
    """Restore the state of a training checkpoint.

    Args:
        runner: the trainer, with loops and schedulers.
        found: of :func:`_find_checkpoint`, after :func:`_compare`; is emptied, so that its memory is free.
        source: the path of the checkpoint, for messages.

    Raises:
        CheckpointError: the optimizer's state in it does not match this model.
        RuntimeError: the weights in it do not match this model.
        ConfigError: a hook that has changed weights in it is missing, or the schedule does not allow the new settings.
    """
    content: Mapping[str, Any] = dict(found)
    found.clear()
    meta, session, loop = content["meta"], runner.session, runner.train_loop
    lacking = sorted(set(meta.get("weights_of_hooks", ())) - set(runner.hooks_at("before_save_checkpoint")))
    if lacking:
        raise ConfigError(
            f"resume: {source} was trained with the hooks {', '.join(lacking)}, which have put their own weights into "
            "the checkpoint; set the same hooks, or start a new training from its weights with init_from"
        )
    model = unwrapped(runner.model)
    order = saved_order(model, content)
    content = checkpoint.complete(content, model, order)
    runner.call_hook("after_load_checkpoint", checkpoint=content)
    for key, value in content.get("message_hub", {}).items():
        runner.message_hub.update_info(key, value)
    model.load_state_dict(content["state_dict"])
    # With other data the epoch may be shorter.
    samples = min(meta["samples"], loop.steps_per_epoch * meta["global_batch_size"])
    loop.restore(meta["epoch"], meta["step"], samples, meta["validation_due"])
    carry_over(runner, content, order, _takes_another_course(runner, meta))
    if meta["stopped"] and not trains_on(session.changed):
        loop.stop_training = True
        session.say("resume: this training was stopped early; with a larger patience it would continue")
    runner.losses.load(content.get("losses", ()), runner.rank, runner.world_size, runner.device)
    states = content["rng"]
    if runner.world_size == len(states):
        set_rng_state(states[runner.rank], runner.backend)
    else:
        seed_everything(session.config.seed + runner.rank + 1000003 * meta["step"], runner.backend)
        logger.warning("resumed at world size %d, not %d: random states are new", runner.world_size, len(states))
    runner.checkpoints.load_state_dict(content["best"])
    runner.checkpoints.take_over_best(runner, source)


def saved_order(model: nn.Module, content: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters of a model in the order of the optimizer's state in a checkpoint.

    The order depends on the parameter groups, and so on the settings of the optimizer in the checkpoint.

    Args:
        model: the model, not wrapped.
        content: the checkpoint.

    Raises:
        CheckpointError: the groups in the checkpoint do not match the model.
    """
    settings = OmegaConf.merge(OmegaConf.structured(OptimConfig), content["config"]["optim"])
    groups = [group["params"] for group in parameter_groups(model, settings)]
    if [len(group) for group in groups] != [len(group["params"]) for group in content["optimizer"]["param_groups"]]:
        raise CheckpointError(
            "resume: the optimizer's state is of another model; use init_from to start from the weights"
        )
    return [parameter for group in groups for parameter in group]


def _follows_validations(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "need_val_args", False))


def _takes_another_course(runner: Any, meta: Mapping[str, Any]) -> bool:
    """Whether optimizer or schedule have other settings than in the checkpoint.

    Another length of the training counts as another setting of the schedules, which may depend on it, unless all of
    them only follow validations.
    """
    keys = {change.key for change in runner.session.changed}
    if any(key.startswith(("optim.", "schedule.")) for key in keys):
        return True
    other_length = {"max_epochs", "max_steps"} & keys or meta["steps_per_epoch"] != runner.train_loop.steps_per_epoch
    return bool(other_length) and not all(map(_follows_validations, runner.param_schedulers))


def carry_over(runner: Any, content: Mapping[str, Any], order: list[nn.Parameter], anew: bool) -> None:
    """Restore the optimizer's state from a checkpoint, and the learning rates and positions of the schedules.

    If settings have changed (``anew``), the learning rates are those that the new settings give at this step.

    Args:
        runner: the trainer, with optimizer and schedulers at step 0, and the loop at the position to resume from.
        content: the checkpoint.
        order: of :func:`saved_order`.
        anew: whether optimizer or schedule have other settings than in the checkpoint.

    Raises:
        ConfigError: settings have changed, and a schedule depends on the validations so far.
    """
    wrapper, schedulers, saved = runner.optim_wrapper, runner.param_schedulers, content["optimizer"]
    if anew and any(map(_follows_validations, schedulers)):
        raise ConfigError(
            "resume: the schedule depends on the validations so far (ReduceOnPlateau), so optim, schedule, max_epochs, "
            "max_steps and the number of samples must not change; set them as they were, or start a new training from "
            "the weights with init_from"
        )
    trained = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    place = {parameter: index for index, parameter in enumerate(trained)}
    groups = wrapper.optimizer.state_dict()["param_groups"] if anew else saved["param_groups"]
    # Copies, since torch keeps the tensors as they are on the CPU, and these are mapped from a file.
    state = {
        place[order[index]]: {
            name: each.clone() if isinstance(each, torch.Tensor) and each.device.type == "cpu" else each
            for name, each in value.items()
        }
        for index, value in saved["state"].items()
    }
    wrapper.load_state_dict({**saved, "state": state, "param_groups": groups})
    if anew:
        _replay(schedulers, runner.train_loop)
    else:
        for scheduler, each in zip(schedulers, content["param_schedulers"]):
            scheduler.load_state_dict(each)


def _replay(schedulers: list[Any], loop: Any) -> None:
    """Step the schedulers like MMEngine's ParamSchedulerHook, up to the position from which the training resumes.

    With data of another size, the epochs so far would have had another number of steps. Schedules by step make this
    number of steps, so that they end with the last epoch; if ``max_steps`` ends the training, they make the number of
    steps taken.
    """
    length, steps = loop.steps_per_epoch, loop.iter + (0 if loop.ends_by_steps else loop.ahead)
    for step in range(1, max(steps, loop.epoch * length) + 1 if schedulers else 0):
        epoch, rest = divmod(step, length)
        for scheduler in sorted(schedulers, key=lambda each: bool(each.by_epoch)):
            if (not rest and epoch <= loop.epoch) if scheduler.by_epoch else step <= steps:
                scheduler.step()
