"""Results of `benchmarks/programs.py`."""
