"""Multivariate forecasting: series, TimeBridge, and its variant with a transition prior.

A plugin that comes with exp: it uses the public interfaces only.
"""
