"""Everyday uses of a model, each run on a stock model and on an optimized copy of it."""
