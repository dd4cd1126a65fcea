"""`oxytorch serve`: models behind HTTP, language models in OpenAI's format."""
