"""One step of an optimizer over many tensors, on processors and GPUs."""
