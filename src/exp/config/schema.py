"""The typed schema of the configuration: every key, its type, its default and its unit.

The YAML files in ``conf/`` choose values; :mod:`exp.config.compose` checks them against this schema. The keys of tasks
and of Slurm are declared beside them, and those of models and data beside their families.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from omegaconf import MISSING

from exp.runs.record import Record

PRECISIONS = ("fp32", "bf16", "fp16", "tf32", "efp")
FLOAT32 = ("fp32", "tf32", "efp")
"""Precisions that store all values as float32. ``tf32`` rounds the inputs of matrix products and convolutions to
mantissas of 10 bits; with ``efp`` the device's compiler chooses how to compute products."""
DDP_KEYS = ("find_unused_parameters", "broadcast_buffers", "bucket_cap_mb")
"""Keys of ``wrapper`` that are arguments of DDP."""

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class BackendConfig:
    """Hardware family (:class:`exp.hardware.backend.Backend`)."""

    _target_: str = MISSING
    name: str = MISSING
    process_group: Optional[str] = None
    """Process-group backend for ``torch.distributed``, such as ``gloo``; null: the default of this backend."""
    allow_fallback: bool = False
    """If the device's own collectives are missing, use gloo, with copies of the tensors on the CPU. Slow."""
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
    """Number of nodes; on the command line also a range, ``2:4``: nodes may come and go, between these numbers."""
    min_nnodes: Optional[int] = None
    """Least number of nodes of a job whose nodes come and go; ``nnodes`` is the largest. null: the number is fixed."""
    rdzv_endpoint: Optional[str] = None
    """``host:port`` of the rendezvous of several nodes; null is for one node, where nothing listens on the network."""
    max_restarts: int = 0
    """How often all workers are restarted from the newest checkpoint after one of them has died."""
    timeout_s: int = 1800
    """Longest wait for a collective operation or for missing nodes, in seconds."""
    step_timeout_s: Optional[float] = None
    """Hang detector, in training and evaluation: the run ends if no rank has made progress for so many seconds. null:
    0.9 of ``timeout_s``, with one process off; 0: off."""
    share: Optional[float] = None
    """Weight of each rank of this node: the samples of a batch are divided over all ranks in the ratio of their
    weights, for cards that are not equally fast. Each of several nodes sets its own. null: equal parts."""
    shares: List[float] = field(default_factory=list)
    """The weight of each rank of this node, by local rank, instead of ``share``."""
    mixed: bool = False
    """Nodes with cards of different vendors in one job: each has its own ``backend``, ``nproc``, share of a batch and
    ``data.num_workers``. Gradients are exchanged through the CPU (docs/hardware/mixed.md)."""
    in_process: bool = False
    """launcher=local: run the worker in this process, which has a terminal: for ``breakpoint()`` and debuggers."""


@dataclass
class SweepConfig:
    """Settings of a whole sweep (``-m``)."""

    resume: bool = False
    """Skip the jobs that are complete in ``output_dir``, and resume those that are unfinished."""
    parallel_jobs: Optional[int] = None
    """Jobs that run on this machine at the same time; null: as many as its devices, or CPU cores, allow."""
    plots: bool = True
    """Draw the results and write ``report.html`` when all jobs have ended."""


@dataclass
class WrapperConfig:
    """How the model is wrapped for data-parallel training. The device arguments of DDP come from the backend."""

    kind: str = MISSING
    """``mmddp``, ``ddp``, ``fsdp`` or ``none``; for another wrapper (``_target_``) its name in the results."""
    _target_: Optional[str] = None
    """A subclass of :class:`exp.engine.wrapper.Wrapper`; null for DDP. ``find_unused_parameters``,
    ``broadcast_buffers`` and ``bucket_cap_mb`` are for DDP."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of the class in ``_target_``; without it, further ones of the DDP class, such as
    ``static_graph``."""
    find_unused_parameters: bool = False
    broadcast_buffers: bool = False
    """Copy the buffers of rank 0 to every rank before each forward pass."""
    bucket_cap_mb: int = 25
    """Size of a bucket of gradients, in MiB."""
    sync_batchnorm: bool = False
    """Synchronize every batch norm over the devices, if the backend supports it."""


@dataclass
class OptimConfig:
    """Optimizer: ``type`` is a class of torch.optim, one registered in MMEngine's OPTIMIZERS, or a dotted path."""

    type: str = "Adam"
    lr: float = 1e-3
    """Learning rate for the global batch, whatever the number of devices."""
    weight_decay: float = 0.0
    """Depends on the optimizer: added to the gradient (Adam, SGD) or decoupled from it (AdamW)."""
    clip_grad_norm: Optional[float] = None
    """Largest L2 norm of all gradients together; null: no clipping."""
    backbone_lr_scale: float = 1.0
    """Learning rate of the backbone, as a multiple of ``lr``."""
    layer_decay: float = 1.0
    """Learning rate of each layer of the backbone, as a multiple of that of the next (later) layer."""
    decay_norm_and_bias: bool = True
    """Whether weight decay also applies to norms, biases, layer scales, tokens, and the parameters in the model's
    ``no_weight_decay()``."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""


@dataclass
class ScheduleConfig:
    """Learning-rate schedule, as a list of MMEngine's parameter schedulers, in MMEngine's own syntax."""

    param_scheduler: List[Dict[str, Any]] = field(default_factory=list)
    warmup_steps: int = 0
    """Optimizer steps of the linear warm-up in the schedules ``warmup_cosine`` and ``warmup_poly``."""


@dataclass
class LoggerConfig:
    """Trackers: where metrics and pictures go in addition to the run folder."""

    trackers: Dict[str, Any] = field(default_factory=dict)
    """Trackers by name, each {_target_: <path of a class>, <arguments>} (:class:`exp.trackers.base.Tracker`). Each
    receives the metrics of the run in a thread of rank 0."""
    patience_s: float = 30.0
    """How long the end of a run waits for a tracker that has not received everything, in seconds."""
    requires: List[str] = field(default_factory=list)
    """Packages that trackers need; checked before the run starts."""


@dataclass
class CheckpointConfig:
    """Which checkpoints are written, kept and read."""

    every_epochs: int = 1
    """Epochs between two checkpoints; 0: only at the end of training."""
    every_steps: int = 0
    """Optimizer steps between two checkpoints, in addition to ``every_epochs``; 0: none."""
    keep_last: int = 2
    """Number of the newest checkpoints to keep."""
    keep_best: bool = True
    """Keep the weights of the best validation in ``best.pth``, and test those."""
    trusted: bool = False
    """Read checkpoints of exp also if they have no digest, or are not the files that their run wrote there."""


@dataclass
class DebugConfig:
    """Quick checks of an experiment: ``debug=one_batch``, ``debug=overfit``."""

    train_batches: Optional[int] = None
    """Global batches of the training split to use, with samples spread evenly over the split; null: all."""
    eval_batches: Optional[int] = None
    """Batches per rank of the validation split and of the test split, likewise."""
    overfit: bool = False
    """Validate and test on the training batches, which are the same in every epoch, and stop when the loss is below 1 %
    of its first value."""
    replay_every: Optional[int] = None
    """Every so many optimizer steps, compute a step again and compare all bits, to find a card that corrupts results;
    null: never (docs/hardware/checks.md)."""


@dataclass
class FiguresConfig:
    """Format and size of the pictures of a run."""

    format: str = "png"
    """``png``, ``pdf`` or ``svg``. PDF and SVG are written in addition to PNG, which reports and trackers show."""
    width: Optional[float] = None
    """Width in inches, with the height in proportion; null: that of each picture. In a narrower picture the text
    shrinks, down to 6 points."""
    dpi: int = 110
    """Pixels per inch of curves and charts. Pictures of images keep their pixels."""


@dataclass
class ReferenceConfig:
    """Metrics of a publication, beside which those of a run are shown; the file of an experiment sets them."""

    metrics: Dict[int, Dict[str, float]] = field(default_factory=dict)
    """Test metrics by name, for each value of the key of ``data`` on which they depend
    (:class:`exp.plugins.Plugin`)."""
    data: Optional[str] = None
    """``data.name`` of the data on which they were measured."""
    source: Optional[str] = None
    """The publication."""


@dataclass
class ExpConfig:
    """The root of the configuration."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    launcher: Any = MISSING
    """How workers are started; the keys are those of the class's ``keys`` (:class:`exp.launcher.base.Launcher`)."""
    wrapper: WrapperConfig = field(default_factory=WrapperConfig)
    task: Any = MISSING
    """What to do; the keys are the fields of the class (:class:`exp.task.Task`)."""
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
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    nproc: int = 1
    """Worker processes per node, one per device."""
    seed: int = 2023
    dropout_by_sample: bool = False
    """Compute dropout masks from (seed, step, sample) instead of the device's random generator, so that they do not
    depend on the number of devices (:mod:`exp.models.dropout`)."""
    precision: str = "fp32"
    """``fp32``; ``bf16`` or ``fp16`` (mixed precision); ``tf32``: float32 with products of 10-bit mantissas; or
    ``efp``: float32, with the arithmetic of products chosen by the device's compiler."""
    compile: bool = False
    """Compile the model's forward and backward pass with torch 2.3 or later; an error if the device does not
    support it."""
    batch_size: Optional[int] = None
    """Samples per device and micro-batch. Give this or ``global_batch_size``; the other is derived. With
    ``launcher.share`` or ``launcher.shares`` it is the largest part of a rank, and always derived."""
    global_batch_size: Optional[int] = None
    """Samples per optimizer step over all devices: ``batch_size * world_size * accumulate``."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    max_epochs: Optional[int] = 10
    """Passes over the training split; null: as many as ``max_steps`` takes."""
    max_steps: Optional[int] = None
    """Optimizer steps after which training stops, unless ``max_epochs`` stops it earlier; null: no limit."""
    val_every: Optional[int] = None
    """Optimizer steps between validations; null: after each epoch."""
    patience: Optional[int] = None
    """Early stopping after so many validations without a better metric; null: no early stopping."""
    metric: Optional[str] = None
    """Name of the metric that selects the best model, decides on early stopping, and ranks the runs of a sweep; null:
    the first metric of the data."""
    metrics: List[Any] = field(default_factory=list)
    """Further metrics, each as {_target_: <path of a class>, <arguments>} (:class:`exp.metrics.Metric`)."""
    min_delta: float = 1e-4
    """Smallest relative improvement that ``patience`` counts as better. Validation is exact, so with 0 even the tiny
    improvements at a vanishing learning rate would prevent early stopping."""
    resume: Optional[str] = None
    """``auto``: continue from the newest checkpoint in ``output_dir``; a path: from that checkpoint or run folder."""
    resume_changed_data: bool = False
    """Resume even if the data files or the keys of ``data`` have changed since the training began."""
    init_from: Optional[str] = None
    """Initial weights: a checkpoint (of exp or of other projects, .pth, .bin or .safetensors), a run folder,
    ``hf:<owner>/<name>[@revision]``, ``timm:<name>`` or ``ms:<owner>/<name>[@revision]``; the last three are downloaded
    (``pip install 'exp-accelerators[hub]'``, or ``[modelscope]``). With a run folder, eval, predict and features also
    take model and data from the run."""
    init_partial: bool = False
    """For train: allow weights in ``init_from`` that lack more than the tensors of a new head."""
    output_dir: str = MISSING
    """The run folder."""
    overwrite: bool = False
    """Remove the results of an earlier run in ``output_dir``, once this run has started."""
    log_every: int = 20
    """Optimizer steps between two readings of the losses."""
    sanity_check: bool = True
    """Sanity check: before the first step, run one validation batch through model and metrics, if the model, the data
    or a metric is not exp's own. It changes no state."""
    plots: bool = True
    """Draw curves when training has ended and, for images, predictions of the best weights for some samples."""
    report_placement: bool = False
    """Write each rank's parameters, devices and process group to its log."""
    hooks: List[Dict[str, Any]] = field(default_factory=list)
    """Further MMEngine hooks, each {type: <name or path of a class>, <arguments>}."""
    plugins: List[str] = field(default_factory=list)
    """Modules and packages whose classes the configuration may name (:mod:`exp.config.resolve`); each worker imports
    them at its start. Allowed on the command line only, not in files."""
    record: Record = field(default_factory=Record)
    """In memory only: ``env.json`` has it, ``config.yaml`` does not."""
