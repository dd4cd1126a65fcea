"""GPU kernels that are compiled ahead of time: what is built, how it is loaded and launched."""
