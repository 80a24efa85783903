"""``task=estimate``: what a training takes, before it runs: on tensors that have shapes and no memory.

:mod:`exp.estimate.trace` takes the model through two training steps and a validation on torch's meta device,
:mod:`exp.estimate.tracker` counts what is alive meanwhile, :mod:`exp.estimate.figures` makes figures of it.
"""
