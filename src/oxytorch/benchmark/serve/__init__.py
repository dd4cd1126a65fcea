"""`oxytorch bench serve`: clients that ask a server of OpenAI's format at the same time."""
