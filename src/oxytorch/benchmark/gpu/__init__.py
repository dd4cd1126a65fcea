"""Steps of optimizers on a GPU, and the first step of a process."""
