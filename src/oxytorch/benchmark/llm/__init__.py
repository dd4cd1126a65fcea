"""Language models: speed next to peers, and what formats cost on a text."""
