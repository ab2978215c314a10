"""Methods that are trained, all on the dense model's outputs, on the same data and by the same number of steps."""
