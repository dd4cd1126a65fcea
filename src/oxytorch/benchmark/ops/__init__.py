"""Every op of the registry next to plain and compiled PyTorch."""
