"""A package that adds a device, a precision, a strategy and an FP8 backend to nbaccel."""
