"""Batch-size arithmetic: per device or over all devices, either is given and the other derived."""

from __future__ import annotations

from exp.errors import ConfigError

__all__ = ["derive_batch_sizes"]


def derive_batch_sizes(
    batch_size: int | None, global_batch_size: int | None, accumulate: int, world_size: int
) -> tuple[int, int]:
    """Derive the missing one of ``global_batch_size = batch_size * world_size * accumulate``.

    Args:
        batch_size: samples per device and micro-batch, or None.
        global_batch_size: samples per optimizer step over all devices, or None.
        accumulate: micro-batches per optimizer step.
        world_size: number of processes.

    Returns:
        Both.

    Raises:
        ConfigError: neither is given, both disagree, or the global batch does not divide (with the nearest that do).
    """
    parts = world_size * accumulate
    if batch_size is None and global_batch_size is None:
        raise ConfigError("neither batch_size nor global_batch_size is set; give one of them")
    for key, value in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
    if global_batch_size is None:
        assert batch_size is not None
        return batch_size, batch_size * parts
    spread = f"{world_size} process{'es' if world_size > 1 else ''} x accumulate={accumulate}"
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        nearest = [str(value) for value in (below, below + parts) if value]
        raise ConfigError(
            f"global_batch_size={global_batch_size} does not divide over {spread}; nearest: {' or '.join(nearest)}"
        )
    derived = global_batch_size // parts
    if batch_size is not None and batch_size != derived:
        raise ConfigError(
            f"batch_size={batch_size} over {spread} is {batch_size * parts}, "
            f"not global_batch_size={global_batch_size}; give only one of them"
        )
    return derived, global_batch_size
