"""Training frameworks around a parallelized model."""
