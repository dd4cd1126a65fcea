"""Steps of optimizers."""
