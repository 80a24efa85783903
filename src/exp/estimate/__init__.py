"""``task=estimate``: estimates memory and FLOPs of a training before it runs, with tensors that have no data.

:mod:`exp.estimate.trace` runs training steps and a validation batch on torch's meta device, counts the memory of all
tensors that are alive, and finds the largest batch that fits; :mod:`exp.estimate.command` writes and prints the result.
"""
