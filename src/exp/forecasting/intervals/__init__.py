"""How sure a forecast is: intervals from residuals of the validation part, or from what a model itself says."""
