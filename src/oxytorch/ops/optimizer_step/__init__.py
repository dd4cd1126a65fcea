"""One step of an optimizer over many tensors, on CPUs and GPUs; rules.py is its arithmetic."""
