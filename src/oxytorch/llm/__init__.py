"""Large language models on the CPU: generate text from models of Hugging Face's `transformers`."""

from __future__ import annotations

from .generation import generate, stream

__all__ = ["generate", "stream"]
