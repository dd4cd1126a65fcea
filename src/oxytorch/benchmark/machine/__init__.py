"""This machine: what it is, what it can do at most, and what oxytorch costs on it."""
