"""Intervals around forecasts: from the residuals of the validation split, or from the model's own spread."""
