"""Capture of a module's computation, the patterns found in it, and the forward that replaces it."""
