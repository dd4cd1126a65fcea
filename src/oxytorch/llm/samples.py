"""Tokens to try a language model with."""

from __future__ import annotations

from typing import Any

import torch

SAMPLE = 7
"""Tokens of the sample prompt, where no window is shorter."""

LARGEST_SAMPLE = 96


def sample_length(config: Any) -> int:
    """Tokens of a prompt that is longer than the model's window, where that is short."""
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window + 3 <= LARGEST_SAMPLE:
        return max(SAMPLE, window + 3)
    return SAMPLE


def sample_tokens(model: Any, length: int, batch: int = 1) -> torch.Tensor:
    """Random token ids [batch, length], the same at every call.

    They are from the middle: the first and last ones may stand for padding, images and the like.
    """
    generator = torch.Generator().manual_seed(length)
    known = model.get_input_embeddings().num_embeddings
    low, high = known // 4, max(known // 4 + 1, known // 2)
    return torch.randint(low, high, (batch, length), generator=generator, device="cpu")
