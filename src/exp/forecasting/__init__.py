"""Multivariate forecasting: series, TimeBridge and its variant with a transition prior. A plug-in: it uses exp's public interfaces only."""
