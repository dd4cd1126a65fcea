"""`oxytorch demo`: a real sentence-embedding model, stock and optimized, over real text."""
