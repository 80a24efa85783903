"""The typed schema of the configuration: every key, its type, its default and its unit.

The YAML files in ``conf/`` choose values; this file says which values there can be (:mod:`exp.config.compose` sees
to that). Keys of tasks stand with them, those of models and data with their families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from omegaconf import MISSING

__all__ = [
    "FLOAT32", "PRECISIONS", "BackendConfig", "CheckpointConfig", "DebugConfig", "ExpConfig", "FiguresConfig",
    "LauncherConfig", "LoggerConfig", "OptimConfig", "RecordConfig", "ScheduleConfig", "SubmititConfig", "SweepConfig",
    "WrapperConfig",
]  # fmt: skip

PRECISIONS = ("fp32", "bf16", "fp16", "tf32", "efp")
FLOAT32 = ("fp32", "tf32", "efp")
"""Those that store all values as float32; ``tf32`` multiplies them with mantissas of 10 bits, ``efp`` as the device's
compiler sees fit."""

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class BackendConfig:
    """Hardware family (:class:`exp.hardware.backend.Backend`)."""

    _target_: str = MISSING
    name: str = MISSING
    process_group: Optional[str] = None
    """What ``torch.distributed`` is given; null: the backend's own choice."""
    allow_fallback: bool = False
    """Where the device's own collectives are missing: carry its tensors over gloo, by copies through the CPU."""
    simulate: bool = False
    """Simulated devices instead of real ones, where the backend has them: a dry run of a cluster job on any machine."""
    env: Dict[str, str] = field(default_factory=dict)
    """Environment of the workers, set before torch is imported."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Settings that only this backend understands."""


@dataclass
class LauncherConfig:
    """How worker processes are started (:mod:`exp.launcher`)."""

    _target_: str = MISSING
    nnodes: int = 1
    rdzv_endpoint: Optional[str] = None
    """``host:port`` where the agents of several nodes meet; null on one node: nothing listens on a network."""
    max_restarts: int = 0
    """How often all workers are restarted, from the newest checkpoint, after one of them died."""
    timeout_s: int = 1800
    """Longest wait for a collective operation or for missing nodes, in seconds."""
    step_timeout_s: Optional[float] = None
    """All ranks standing still for so many seconds, within training or evaluation, means that one hangs; null: 20 times
    the slowest that was seen, at least 60; 0: never."""


@dataclass
class SubmititConfig(LauncherConfig):
    """A job on Slurm, by way of submitit (:class:`exp.launcher.submitit.SubmititLauncher`); see sbatch(1)."""

    cluster: str = "slurm"
    """``slurm``; ``debug`` (or ``local``): in this process, without Slurm."""
    nodes: int = 1
    """Nodes of one run, with ``nproc`` workers each."""
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    time_minutes: int = 60
    """Time limit of a job. One that reaches it saves its state and is queued again."""
    gres: Optional[str] = None
    """Generic resources of each node, such as ``gpu:8``."""
    gpus_per_node: Optional[int] = None
    cpus_per_node: Optional[int] = None
    mem_gib: Optional[float] = None
    """Memory of each node, in GiB."""
    constraint: Optional[str] = None
    nodelist: Optional[str] = None
    exclude: Optional[str] = None
    exclusive: bool = False
    """Share no node with other jobs."""
    job_name: Optional[str] = None
    """null: the experiment's name."""
    setup: List[str] = field(default_factory=list)
    """Lines of the batch script before the workers start, such as ``module load ...``."""
    extra: Dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch: their names without dashes in front, and true for those without a value."""
    srun_args: List[str] = field(default_factory=list)
    """Further arguments of srun, which starts the task of each node."""
    signal_delay_s: int = 90
    """How long before the time limit Slurm sends the signal upon which a run saves its state."""
    max_requeues: int = 100
    """How often a job is queued again before it counts as failed."""
    array_parallelism: int = 256
    """Jobs of a sweep that run at a time."""
    wait: bool = True
    """Follow the job to its end, which Ctrl-C does not end; false: only submit it."""
    dry_run: bool = False
    """Only print the batch script."""
    poll_s: float = 2.0
    """Seconds between two looks at the queue."""


@dataclass
class SweepConfig:
    """What concerns all the jobs of a sweep (``-m``)."""

    resume: bool = False
    """Leave out the jobs that ``output_dir`` holds completed, and continue those that it holds unfinished."""
    parallel_jobs: Optional[int] = None
    """Jobs on this machine at a time; null: as many as its devices, or the processor's cores, have room for."""
    plots: bool = True
    """Draw the results and write ``report.html`` when all jobs have ended."""


@dataclass
class WrapperConfig:
    """How the model is wrapped for data-parallel training. Device arguments come from the backend only."""

    kind: str = MISSING
    """``mmddp``, ``ddp`` or ``none``; of a wrapper of one's own: what results call it."""
    _target_: Optional[str] = None
    """A subclass of :class:`exp.engine.wrapper.Wrapper`; null: of exp's own kinds, which have the keys below."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Its own keys."""
    find_unused_parameters: bool = False
    broadcast_buffers: bool = False
    """Give every rank rank 0's buffers before each forward pass."""
    gradient_as_bucket_view: Optional[bool] = None
    """Gradients share memory with the buckets in which they are exchanged; null: where the DDP class is torch's."""
    static_graph: bool = False
    """The graph is the same in every step: DDP then allows activation checkpointing, and reuses its plan."""
    bucket_cap_mb: int = 25
    """Size of a bucket of gradients, in MiB."""
    sync_batchnorm: bool = False
    """Synchronize every batch norm over the devices, where the backend can."""


@dataclass
class OptimConfig:
    """Optimizer: ``type`` is a class of torch.optim, or one registered in MMEngine's OPTIMIZERS."""

    type: str = "Adam"
    lr: float = 1e-3
    """Learning rate for the global batch, whatever the number of devices."""
    weight_decay: float = 0.0
    """As the optimizer means it: added to the gradient (Adam, SGD) or decoupled from it (AdamW)."""
    clip_grad_norm: Optional[float] = None
    """Largest L2 norm of all gradients; null: no clipping."""
    backbone_lr_scale: float = 1.0
    """The backbone's learning rate is this times ``lr``."""
    layer_decay: float = 1.0
    """And for each layer of the backbone below its last this times that of the layer above."""
    decay_norm_and_bias: bool = True
    """Whether weight decay is also for norms, biases (stacked ones, too), layer scales, tokens, and what the model's
    ``no_weight_decay()`` names."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""


@dataclass
class ScheduleConfig:
    """Learning-rate schedule: MMEngine parameter schedulers, as MMEngine users write them."""

    param_scheduler: List[Dict[str, Any]] = field(default_factory=list)
    warmup_steps: int = 0
    """Optimizer steps of a linear warm-up, for the schedules that have one: ``warmup_cosine`` and ``warmup_poly``."""


@dataclass
class LoggerConfig:
    """Where metrics go besides ``metrics.jsonl``: trackers, and MMEngine visualisation backends."""

    trackers: Dict[str, Any] = field(default_factory=dict)
    """By name, {_target_: <path of a class>, <arguments>}: each receives the run's figures in a thread of rank 0
    (:class:`exp.trackers.Tracker`)."""
    patience_s: float = 30.0
    """How long the end of a run waits for a tracker that has not received everything, in seconds."""
    vis_backends: List[Dict[str, Any]] = field(default_factory=list)
    """As MMEngine users write them, {type: <name>, <arguments>}; or, as {_target_: <path of a class>, <arguments>}, of
    one's own (:class:`exp.engine.logger.Logger`)."""
    requires: List[str] = field(default_factory=list)
    """Packages that they need, checked before anything starts."""


@dataclass
class CheckpointConfig:
    """Which checkpoints are written and kept."""

    every_epochs: int = 1
    """0: only at the end."""
    every_steps: int = 0
    """Also within an epoch; 0: never."""
    keep_last: int = 2
    keep_best: bool = True


@dataclass
class DebugConfig:
    """Short ways to see whether an experiment works: ``debug=one_batch``, ``debug=overfit``."""

    train_batches: Optional[int] = None
    """Global batches of the training split that are used, their samples spread evenly over it; null: all."""
    val_batches: Optional[int] = None
    """Batches per rank of the validation split, likewise."""
    test_batches: Optional[int] = None
    """Batches per rank of the test split, likewise."""
    overfit: bool = False
    """Validate and test on the training batches, which are the same in every epoch, and stop where the loss has fallen
    to a hundredth."""
    restart_after: Optional[int] = None
    """Optimizer steps after which everything is built anew, and goes on from the checkpoint, as after a preemption."""


@dataclass
class FiguresConfig:
    """What the pictures of a run are to be like."""

    format: str = "png"
    """``png``, ``pdf`` or ``svg``: the latter two beside PNG files, which reports and trackers show."""
    width: Optional[float] = None
    """Inches; where a picture becomes narrower, its letters shrink, to 6 points. null: its own."""
    height: Optional[float] = None
    """Inches; null: in proportion to the width."""
    dpi: int = 110
    """Pixels per inch of curves and charts. Pictures of images keep their pixels."""


@dataclass
class RecordConfig:
    """What exp notes of how a configuration came about; filled in while it is frozen, not to be set."""

    chosen: Dict[str, str] = field(default_factory=dict)
    """The choice in each config group."""
    follows: Dict[str, str] = field(default_factory=dict)
    """Keys of model and data that were taken from another key, and which: they follow it when a run is used again."""
    trained_in: Optional[str] = None
    """eval, predict, features: the run folder whose configuration this one began with."""
    differs: List[str] = field(default_factory=list)
    """What is not as in that run."""
    published_differs: List[str] = field(default_factory=list)
    """What is not as in the experiment that published figures are of."""
    weights: Dict[str, Any] = field(default_factory=dict)
    """Of weights by name: repository, commit, digests of the files, licence (:mod:`exp.hub`)."""


@dataclass
class ExpConfig:
    """The root of the configuration."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    launcher: Any = MISSING
    """How workers are started (:class:`exp.launcher.base.Launcher`, whose ``keys`` are its keys)."""
    wrapper: WrapperConfig = field(default_factory=WrapperConfig)
    task: Any = MISSING
    """What to do (:class:`exp.task.Task`, whose fields are its keys)."""
    model: Any = MISSING
    data: Any = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    figures: FiguresConfig = field(default_factory=FiguresConfig)

    name: str = MISSING
    """Name of the experiment; each file of ``conf/experiment`` sets it."""
    published: Dict[int, Dict[str, float]] = field(default_factory=dict)
    """Published test metrics by horizon, shown beside the run's own."""
    published_source: Optional[str] = None
    """Where they are published."""
    published_for: Optional[str] = None
    """``data.name`` of the data that they were measured on."""

    nproc: int = 1
    """Worker processes per node, one per device."""
    seed: int = 2023
    dropout_by_sample: bool = False
    """Masks of dropout from (seed, step, sample) instead of each device's generator (:mod:`exp.models.dropout`)."""
    precision: str = "fp32"
    """``fp32``, ``bf16``, ``fp16``, ``tf32``: float32 whose products have mantissas of 10 bits, or ``efp``: float32 as
    the device's compiler sees fit."""
    compile: bool = False
    """Have torch (2.3 and later) compile the model's forward and backward pass, where the device can."""
    batch_size: Optional[int] = None
    """Samples per device and micro-batch. Give this or ``global_batch_size``; the other is derived."""
    global_batch_size: Optional[int] = None
    """Samples per optimizer step over all devices: ``batch_size * world_size * accumulate``."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    max_epochs: Optional[int] = 10
    """Passes over the training split; null: as many as ``max_steps`` takes."""
    max_steps: Optional[int] = None
    """Optimizer steps after which training stops, if ``max_epochs`` does not stop it before."""
    val_every: Optional[int] = None
    """Optimizer steps between validations; null: after each epoch."""
    patience: Optional[int] = None
    """Early stopping: validations without a better metric; null: never."""
    metric: Optional[str] = None
    """Which of the figures that are measured chooses the best model, stops a training early, and is what a sweep is
    judged by; null: the data's own."""
    metrics: List[Any] = field(default_factory=list)
    """Further metrics, each as {_target_: <path of a class>, <arguments>} (:class:`exp.metrics.Metric`)."""
    min_delta: float = 1e-4
    """Relative improvement that counts as better for ``patience``. Validation is exact here, so without it the tiny
    gains of a vanishing learning rate would count for ever."""
    resume: Optional[str] = None
    """``auto``: continue from the newest checkpoint in ``output_dir``; a path: from that checkpoint or run folder."""
    resume_changed_data: bool = False
    """Continue although the data, or their settings, are no longer those that the training began with."""
    init_from: Optional[str] = None
    """Checkpoint whose weights the model starts from (ours or the authors', .pth or .safetensors), or a run folder;
    eval, predict and features of a run folder take model and data from there, too. ``hf:<owner>/<name>[@revision]`` and
    ``timm:<name>`` are fetched (``pip install 'exp-accelerators[hub]'``)."""
    init_partial: bool = False
    """train: start from ``init_from`` even where more than a new head is not in it."""
    output_dir: str = MISSING
    overwrite: bool = False
    """Once this run has started, remove what an earlier one has computed in ``output_dir``."""
    log_every: int = 20
    """Steps between two readings of the loss."""
    rehearsal: bool = True
    """Before the first step, take one validation batch through a model, data or metrics that are not exp's own; nothing
    of it stays."""
    plots: bool = True
    """Draw curves, and for images what the best weights say about some of them, when training has ended."""
    report_placement: bool = False
    """Write each rank's parameters, devices and group to its log."""
    hooks: List[Dict[str, Any]] = field(default_factory=list)
    """Further MMEngine hooks."""
    plugins: List[str] = field(default_factory=list)
    """Modules and packages whose classes the configuration may name (:mod:`exp.config.resolve`), imported by each
    worker at its start. Counts on the command line only."""
    record: Any = None
    """:class:`RecordConfig`, once it is typed."""
