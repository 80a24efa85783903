"""``task=estimate``: estimates memory and FLOPs of a training before it runs. Needs no worker and no device.

A training step and a validation batch run on torch's meta device, whose tensors have a shape and a dtype, no data.
:mod:`~exp.estimate.memory` counts the peak memory as a card's allocator would, and gives functions the form that they
have on a card (autocast, fused attention). :mod:`~exp.estimate.tracer` runs the step, and adds the buffers and shards
of DDP and FSDP. It also looks for a batch that fits. :mod:`~exp.estimate.training` counts FLOPs, also for
trainings; :mod:`~exp.estimate.command` is the task.
"""
