"""``task=estimate``: what a training takes, before it runs: on tensors that have shapes and no memory.

:mod:`exp.estimate.trace` takes the model through training steps and a validation batch on torch's meta device, counts
what is alive meanwhile, and finds the batch that fits; :mod:`exp.estimate.command` makes the record and the table.
"""
