"""The `oxytorch llm` subcommand: language models in local folders, on the CPU."""
