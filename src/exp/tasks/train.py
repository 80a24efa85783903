"""Tasks of a model: train (with validation, then a test of the best weights), eval, predict, export and estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, List, Optional, Sequence

from exp.config.check import preflight_of
from exp.errors import ConfigError, nearest
from exp.task import ParentTask, Task, named_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.session import Session

__all__ = ["Estimate", "Eval", "Export", "Predict", "Train"]


@named_task
class Train(Task):
    """Trains a model, saves checkpoints, and can resume from them."""

    trains: ClassVar[bool] = True
    saves_state: ClassVar[bool] = True

    def run(self, session: Session) -> dict[str, Any]:
        """Train (:func:`exp.engine.train.train`)."""
        from exp.engine.train import train

        # The engine gets these two, since exp.estimate is a layer above it; most runs never import it.
        def training_rate(*arguments: Any) -> Any:
            from exp.estimate.training import training_rate

            return training_rate(*arguments)

        def fitting_batch(config: ExpConfig, backend: Backend, memory: int | None) -> Any:
            from exp.estimate.training import suggest_batch

            return suggest_batch(config, backend, memory, Estimate.headroom)

        return train(session, training_rate, fitting_batch)


@named_task
class Eval(Task):
    """Evaluates weights on the test split, also in detail, by the tables of the metrics."""

    worst: int = 4
    """Number of the worst samples to draw, ground truth beside prediction; needs ``plots=true`` and support by the
    data."""
    best: int = 2
    """Number of the best samples to draw."""

    needs_weights: ClassVar[bool] = True

    def run(self, session: Session) -> dict[str, Any]:
        """Evaluate (:func:`exp.engine.evaluate.evaluate`)."""
        from exp.engine.evaluate import evaluate

        return evaluate(session)


@named_task
class Predict(Task):
    """Predicts with the weights of ``init_from``, and writes files and pictures; data may add keys."""

    input: Optional[str] = None
    """Input of the prediction: images, or a CSV file of new rows, depending on the data; null: the test split."""

    needs_weights: ClassVar[bool] = True

    def check(self, config: ExpConfig) -> None:
        """Let the data take ``task.input``, such as a file of new rows, in place of their file, if they support it."""
        take = getattr(preflight_of(config.data), "take_input", None)
        if self.input is not None and take is not None:
            take(config.data, self.input)

    def run(self, session: Session) -> dict[str, Any]:
        """Predict (:func:`exp.engine.evaluate.predict`)."""
        from exp.engine.evaluate import predict

        return predict(session)


@named_task
class Estimate(ParentTask):
    """Estimates parameters, operations, memory by kind, and the batch size that fits; needs no hardware."""

    memory_gib: Optional[float] = None
    """Memory of a card, in GiB; null: that of the cards here, as the vendor's monitor reports it."""
    headroom: float = 0.1
    """Share of the memory for what is not counted: the driver, buffers of collectives, fragmentation."""

    trains: ClassVar[bool] = True
    uses_data: ClassVar[bool] = False
    uses_hardware: ClassVar[bool] = False

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Estimate (:func:`exp.estimate.command.write_estimate`)."""
        from exp.estimate.command import write_estimate

        return write_estimate(config, list(overrides))


_FORMATS = ("huggingface", "torch_export", "torchscript", "onnx")


@named_task
class Export(Task):
    """Writes a trained model as files for other programs, and compares them with the model."""

    formats: Optional[List[str]] = None
    """``huggingface`` (the backbone of a model of images, for transformers), ``torch_export`` (torch >= 2.5),
    ``torchscript``, ``onnx`` (torch >= 2.5, with the packages onnx and onnxscript); null: as many as can be written, of
    ``torchscript`` and ``torch_export`` the one for this torch."""
    size: Optional[int] = None
    """Side in pixels of the images that programs take; null: ``data.size``."""
    tolerance: float = 1e-4
    """Largest allowed difference from the model's outputs, as a share of the largest output."""

    needs_weights: ClassVar[bool] = True
    has_comparable_result: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Refuse unknown formats and several processes."""
        formats = _FORMATS if self.formats is None else self.formats
        unknown = [name for name in formats if name not in _FORMATS]
        if unknown or not formats:
            value, hint = (unknown[0], nearest(unknown[0], _FORMATS)) if unknown else ("[]", "")
            raise ConfigError(f"task.formats={value} must be of {', '.join(_FORMATS)}{hint}")
        if config.nproc > 1 or config.launcher.nnodes > 1:
            raise ConfigError("task=export runs in one process; set nproc=1")
        config.compile = False  # export records the plain model

    def run(self, session: Session) -> dict[str, Any]:
        """Export (:func:`exp.engine.export.export`)."""
        from exp.engine.export import export

        return export(session)
