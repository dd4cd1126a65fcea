"""The ways of running a model, or a step, beside oxytorch."""
