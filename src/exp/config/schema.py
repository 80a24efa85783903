"""The typed schema of the configuration: every key, its type, its default and its unit.

Registered in Hydra's ConfigStore, so that a wrong key or type is refused while the configuration is composed. The YAML
files in ``conf/`` choose values; this file says which values there can be.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import II, MISSING

__all__ = [
    "DIAGNOSES",
    "WITH_WEIGHTS",
    "BackendConfig",
    "CheckpointConfig",
    "ExpConfig",
    "ForecastingDataConfig",
    "ImageDataConfig",
    "ImageModelConfig",
    "LauncherConfig",
    "LoggerConfig",
    "OptimConfig",
    "SceneClassifierConfig",
    "SceneDataConfig",
    "ScheduleConfig",
    "SegmentationDataConfig",
    "SegmenterConfig",
    "TaskConfig",
    "TimeBridgeConfig",
    "WrapperConfig",
    "register",
]

WITH_WEIGHTS = ("eval", "predict", "features")
"""Tasks that use a model as it is: they want ``init_from``, and train nothing."""
DIAGNOSES = ("doctor", "env")
"""Tasks that examine what others need: a module of theirs has ``diagnose`` instead of ``run``."""

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class BackendConfig:
    """Hardware family (:class:`exp.backend.Backend`)."""

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
    rdzv_id: str = "exp"
    """Tells jobs that share one endpoint apart."""
    max_restarts: int = 0
    """How often all workers are restarted, from the newest checkpoint, after one of them died."""
    fork: bool = True
    """Fork workers from one process that has imported everything, where the backend says that this is safe; false:
    each imports by itself."""
    timeout_s: int = 1800
    """Longest wait for a collective operation or for missing nodes, in seconds."""


@dataclass
class WrapperConfig:
    """How the model is wrapped for data-parallel training. Device arguments come from the backend only."""

    kind: str = MISSING
    """``mmddp``, ``ddp`` or ``none``."""
    find_unused_parameters: bool = False
    broadcast_buffers: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    bucket_cap_mb: int = 25
    sync_batchnorm: bool = False
    """Synchronise every batch norm over the devices, where the backend can."""


@dataclass
class TaskConfig:
    """What to do (:mod:`exp.tasks`)."""

    name: str = MISSING
    num_windows: int = 4
    """predict: how many windows are plotted, spread over the test part."""
    max_channels: int = 4
    """predict: how many channels are plotted per window."""
    input: Optional[str] = None
    """predict, features: an image file, a folder of them (with those below it) or a glob; null: the test part."""
    window: Optional[int] = None
    """predict, features: larger images are cut into windows of so many pixels a side; null: predict ``model.window``,
    features 1024."""
    overlap: float = 0.25
    """predict: share of a window that the next one covers again; where they overlap, scores fade into one another."""
    metres_per_pixel: Optional[float] = None
    """predict: for areas of images that do not tell it themselves, as GeoTIFFs do."""
    on_error: str = "raise"
    """predict, features: what an image that cannot be read means: ``raise``: the run fails once the others are done;
    ``skip``: it is only named."""
    max_images: int = 16
    """predict, features: how many images are pictured: features maps, and tiles of the contact sheet."""
    feature_dtype: str = "float16"
    """features: ``float16`` or ``float32``."""
    resize: Optional[int] = None
    """features: images are scaled so that their longer side has so many pixels; null: not."""
    timeout_s: int = 60
    """doctor: longest that a check may take, and that ranks wait for one another, in seconds."""
    tolerance: Optional[float] = None
    """parity: largest relative difference of the loss; null: 1e-5 in fp32, 2e-2 in bf16, 2e-3 in fp16. Outputs of
    modules may differ by 10 times as much, gradients and parameters by 100 times."""
    burst_s: float = 2.0
    """doctor: how long every card multiplies matrices, in seconds."""


@dataclass
class OptimConfig:
    """Optimizer: ``type`` is a class of torch.optim, or one registered in MMEngine's OPTIMIZERS."""

    type: str = "Adam"
    lr: float = 1e-3
    """Learning rate for the global batch, whatever the number of devices."""
    weight_decay: float = 0.0
    clip_grad_norm: Optional[float] = None
    """Largest L2 norm of all gradients; null: no clipping."""
    backbone_lr_scale: float = 1.0
    """The backbone's learning rate is this times ``lr``."""
    layer_decay: float = 1.0
    """And for each layer of the backbone below its last this times that of the layer above."""
    decay_norm_and_bias: bool = True
    """Whether weight decay is also for parameters of one axis: norms, biases, layer scales."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer."""


@dataclass
class ScheduleConfig:
    """Learning-rate schedule: MMEngine parameter schedulers, as MMEngine users write them."""

    param_scheduler: List[Dict[str, Any]] = field(default_factory=list)
    warmup_steps: int = 0
    """Optimizer steps of a linear warm-up, for the schedules that have one."""


@dataclass
class LoggerConfig:
    """Where metrics go besides ``metrics.jsonl``: MMEngine visualisation backends."""

    vis_backends: List[Dict[str, Any]] = field(default_factory=list)
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
class TimeBridgeConfig:
    """TimeBridge (:class:`exp.models.timebridge.TimeBridge`; Liu et al., arXiv 2410.04442)."""

    _target_: str = "exp.models.timebridge.TimeBridge"
    channels: int = MISSING
    lookback: int = MISSING
    horizon: int = MISSING
    time_features: int = 4
    """Number of time-feature channels."""
    period: int = 24
    """Patch length in time steps."""
    num_patches_out: Optional[int] = None
    """Patches after down-sampling (``num_p``); null: as many as before."""
    d_model: int = 128
    d_ff: int = 128
    num_heads: int = 8
    integrated_layers: int = 3
    downsampling_layers: int = 1
    cointegrated_layers: int = 0
    stable_len: int = 6
    """Length of the moving average that detrends queries and keys."""
    attention_dropout: float = 0.15
    dropout: float = 0.0
    alpha: float = 0.35
    """Weight of the frequency part of the loss."""


@dataclass
class ImageModelConfig:
    """What the models on a DINOv3 backbone share (:class:`exp.models.dinov3.base.ImageModel`; arXiv 2508.10104).

    The number of classes and of channels comes from the data.
    """

    size: str = "vits16"
    """``vits16``, ``vits16plus``, ``vitb16``, ``vitl16``, ``vitl16plus``, ``vith16plus``, ``vit7b16``, or ``tiny``."""
    patch_size: int = 16
    """Pixels along each side of a patch."""
    embed_dim: Optional[int] = None
    """Elements of a token instead of the size's."""
    depth: Optional[int] = None
    """Blocks instead of the size's."""
    num_heads: Optional[int] = None
    """Attention heads instead of the size's."""
    normalization: str = "auto"
    """``web``, ``satellite``, or ``auto``: as the weights of ``init_from`` want it, else ``web``."""
    blocks: Optional[List[int]] = None
    """Blocks whose features the head sees, from 0 (-1: the last); null: the last."""
    layer_scale: float = 1e-5
    """Initial layer scale; the paper's 1e-5 wants long training from random weights."""
    drop_path: float = 0.0
    """Probability of skipping a residual branch in the last block; grows linearly from 0 in the first."""
    freeze: Any = "none"
    """``none``, ``all`` (linear probe), or how many of the first blocks stay as they are."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    rope_rescale: Optional[float] = None
    """In training, positions are rescaled by a random factor up to this one (2 in pretraining); null: not."""
    dropout: float = 0.0
    """Before the last layer of a head."""


@dataclass
class SceneClassifierConfig(ImageModelConfig):
    """Scene classification (:class:`exp.models.dinov3.SceneClassifier`)."""

    _target_: str = "exp.models.dinov3.SceneClassifier"
    label_smoothing: float = 0.0


@dataclass
class SegmenterConfig(ImageModelConfig):
    """Semantic segmentation (:class:`exp.models.dinov3.Segmenter`)."""

    _target_: str = "exp.models.dinov3.Segmenter"
    head: str = "upsample"
    """``linear`` (one layer per patch) or ``upsample`` (two convolutional stages, four times the resolution)."""
    head_channels: int = 256
    head_norm: str = "batch"
    """``batch`` (see ``wrapper.sync_batchnorm``) or ``group``."""
    auxiliary_weight: float = 0.0
    """Weight of the loss of an auxiliary head on an inner block; 0: no such head."""
    auxiliary_block: Optional[int] = None
    """The block that it sees, from 0; null: at two thirds of the depth."""
    class_weights: Optional[List[float]] = None
    """One weight per class in the cross-entropy; null: all 1."""
    dice_weight: float = 0.0
    """Weight of the Dice loss beside the cross-entropy."""
    inference: str = "slide"
    """``slide`` (overlapping windows) or ``whole`` images."""
    window: int = 512
    """Side of a window in pixels: best as large as training crops."""
    overlap: float = 0.25
    """Share of a window that the next one covers again."""
    tta_scales: List[float] = field(default_factory=lambda: [1.0])
    """Test-time augmentation: images are also predicted at these scales."""
    tta_flip: bool = False
    """Test-time augmentation: images are also predicted mirrored."""


@dataclass
class ForecastingDataConfig:
    """A multivariate series on disk, cut into windows (:class:`exp.data.forecasting.ForecastingData`)."""

    _target_: str = "exp.data.forecasting.ForecastingData"
    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: the sample data that come with exp."""
    file: str = MISSING
    """Path below ``root``."""
    split: str = "ratio"
    """``ett_hour``, ``ett_minute`` (12/4/4 months of 30 days) or ``ratio`` (70/10/20 %)."""
    channels: int = MISSING
    lookback: int = 720
    horizon: int = 96
    header: bool = True
    """False: comma-separated numbers only, without header and dates (plain or gzipped)."""
    eval_batch_size: int = 128
    num_workers: int = 0


@dataclass
class ImageDataConfig:
    """What image data share (:class:`exp.data.images.base.ImageData`)."""

    name: str = MISSING
    root: Optional[str] = None
    """Folder of the user's files; null: ``sample_data``."""
    sample_data: Optional[str] = None
    """Folder among the sample data that come with exp."""
    size: int = 256
    """Side of training images in pixels; the pipelines refer to it."""
    channels: int = 3
    """That the model gets: grey images are repeated for 3, an alpha channel is dropped."""
    value_range: Optional[List[float]] = None
    """[low, high] that become 0 and 255 where values are not 8 bit; null: [0, 65535] for 16 bit."""
    split: List[float] = field(default_factory=lambda: [0.7, 0.1, 0.2])
    """Shares of train, val and test where the files do not say; without test, val is tested on."""
    classes: Optional[List[str]] = None
    """Names in the order of their numbers; null: those of the files, sorted."""
    train_pipeline: List[Any] = field(default_factory=list)
    """mmcv's transforms, each as {type: <name>, <arguments>}; loading comes before them."""
    eval_pipeline: List[Any] = field(default_factory=list)
    on_error: str = "raise"
    """``raise`` or ``skip`` a file that cannot be used; the result names those that were skipped."""
    cache_megabytes: int = 0
    """Decoded files are kept in memory up to this size, in each process that loads."""
    seed: int = II("seed")
    """Of the augmentation."""
    eval_batch_size: int = 16
    num_workers: int = 0


@dataclass
class SceneDataConfig(ImageDataConfig):
    """Images with one label each (:class:`exp.data.images.scenes.SceneData`)."""

    _target_: str = "exp.data.images.scenes.SceneData"
    layout: str = "folders"
    """``folders`` ([{train,val,test}/]<class>/*) or ``mmrs1m``."""
    datasets: Optional[List[str]] = None
    """MMRS-1M: names of its data sets; null: all that are there."""
    modality: Optional[str] = None
    """MMRS-1M: ``optical``, ``sar`` or ``infrared``; null: any."""


@dataclass
class SegmentationDataConfig(ImageDataConfig):
    """Images with a mask each (:class:`exp.data.images.segmentation.SegmentationData`)."""

    _target_: str = "exp.data.images.segmentation.SegmentationData"
    layout: str = "masks"
    """``masks`` (folders of images beside folders of masks) or ``loveda``."""
    images: str = "images"
    """Name of the folders of images."""
    masks: str = "masks"
    """Name of the folders of masks, beside those of images; a mask has its image's name."""
    parts: Optional[Dict[str, List[str]]] = None
    """Instead of ``split``: for train, val and test patterns of image paths below ``root``."""
    palette: Optional[Dict[str, str]] = None
    """Masks of colours: class -> "RRGGBB"; null: masks of class numbers, of ``classes``."""
    ignore_colours: List[str] = field(default_factory=list)
    """Colours that do not count; pixels of any other colour do not either, but the result tells how many."""
    mask_values: Optional[Dict[int, int]] = None
    """Masks of numbers: value in the file -> class number; null: they are the class numbers."""
    ignore_values: List[int] = field(default_factory=lambda: [255])
    """Masks of numbers: values that do not count."""


@dataclass
class ExpConfig:
    """The root of the configuration."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    wrapper: WrapperConfig = field(default_factory=WrapperConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    model: Any = MISSING
    data: Any = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    name: str = MISSING
    """Name of the experiment; each file of ``conf/experiment`` sets it."""
    published: Dict[int, Dict[str, float]] = field(default_factory=dict)
    """Published test metrics by horizon, shown beside the run's own."""
    published_source: Optional[str] = None
    published_for: Optional[str] = None
    """``data.name`` of the data that they were measured on."""

    nproc: int = 1
    """Worker processes per node, one per device."""
    reference: Optional[str] = None
    """task=parity: the backend to compare with."""
    steps: int = 20
    """task=parity: optimizer steps to compare."""
    seed: int = 2023
    precision: str = "fp32"
    batch_size: Optional[int] = None
    """Samples per device and micro-batch. Give this or ``global_batch_size``; the other is derived."""
    global_batch_size: Optional[int] = None
    """Samples per optimizer step over all devices: ``batch_size * world_size * accumulate``."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    max_epochs: Optional[int] = 10
    """Passes over the training part; null: as many as ``max_steps`` takes."""
    max_steps: Optional[int] = None
    """Optimizer steps after which training stops, if ``max_epochs`` does not stop it before."""
    val_every: Optional[int] = None
    """Optimizer steps between validations; null: after each epoch."""
    patience: Optional[int] = None
    """Early stopping: validations without a better metric; null: never."""
    min_delta: float = 1e-4
    """Relative improvement that counts as better for ``patience``. Validation is exact here, so without it the tiny
    gains of a vanishing learning rate would count for ever."""
    resume: Optional[str] = None
    """``auto``: continue from the newest checkpoint in ``output_dir``; a path: from that checkpoint or run folder."""
    init_from: Optional[str] = None
    """Checkpoint whose weights the model starts from (ours or the authors', .pth or .safetensors)."""
    output_dir: str = MISSING
    log_every: int = 20
    """Steps between two readings of the loss."""
    plots: bool = True
    """Draw curves, and for images what the best weights say about some of them, when training has ended."""
    report_placement: bool = False
    """Write each rank's parameters, devices and group to its log."""
    hooks: List[Dict[str, Any]] = field(default_factory=list)
    """Further MMEngine hooks."""


def register() -> None:
    """Put the schema into Hydra's ConfigStore; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store(name="exp_schema", node=ExpConfig)
    store.store(group="schema/model", name="timebridge", node=TimeBridgeConfig)
    store.store(group="schema/model", name="scenes", node=SceneClassifierConfig)
    store.store(group="schema/model", name="segmentation", node=SegmenterConfig)
    store.store(group="schema/data", name="forecasting", node=ForecastingDataConfig)
    store.store(group="schema/data", name="scenes", node=SceneDataConfig)
    store.store(group="schema/data", name="segmentation", node=SegmentationDataConfig)
