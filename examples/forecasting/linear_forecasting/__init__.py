"""DLinear and seasonal-naive forecasts."""
