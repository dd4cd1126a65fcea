"""`oxytorch bench streams`: a model in more and more streams."""
