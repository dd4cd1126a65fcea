"""Whole graphs as lists of operator calls that run without Python between them."""
