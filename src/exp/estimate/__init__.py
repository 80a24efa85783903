"""``task=estimate``: estimates memory and FLOPs of a training before it runs. Needs no worker and no device.

A training step and a validation batch run on torch's meta device, whose tensors have a shape and a dtype, no data.
:mod:`~exp.estimate.memory` counts the peak memory as a card's allocator would, and gives functions the form that they
have on a card (autocast, fused attention). :mod:`~exp.estimate.tracer` runs the step, and adds the buffers and shards
of DDP and FSDP. :mod:`~exp.estimate.batch_size` looks for a batch that fits; :mod:`~exp.estimate.rate` counts FLOPs;
:mod:`~exp.estimate.command` is the task.
"""
