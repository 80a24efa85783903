"""Multivariate forecasting: series, intervals around forecasts, and models.

A plugin that comes with exp: it uses the public interfaces only.
"""
