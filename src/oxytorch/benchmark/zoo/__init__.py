"""Models of many kinds beside stock PyTorch."""
