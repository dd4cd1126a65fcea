"""How well a language model predicts a text, read through its cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from .decoder import Decoder, decoder_of
from .language_model import LanguageModel
from .numbers import whole


def perplexity(
    model: nn.Module | LanguageModel, token_ids: Tensor, window: int, stride: int | None = None
) -> float:
    """Return exp of the mean loss of the text's tokens. Parameters are those of `token_losses`."""
    return math.exp(token_losses(model, token_ids, window, stride).double().mean().item())


def token_losses(
    model: nn.Module | LanguageModel,
    token_ids: Tensor,
    window: int,
    stride: int | None = None,
    *,
    chunk: int = 32,
    batch: int = 8,
    progress: Callable[[int, int], object] | None = None,
) -> Tensor:
    """Return the loss in nats of every token but the first, float32 [tokens - 1].

    model: a causal language model of transformers, optimized or not, or one from a file.
    token_ids: the text, int64 [tokens].
    window: tokens that the model reads at a time, without those before them.
    stride: tokens between the beginnings of two windows. Each window counts the tokens that the one
        before did not reach. None: `window`, so that each token is read once.
    chunk: tokens of a window that go through the cache in one step, so that an int8 cache is
        measured. A model that keeps a running state (Mamba), or whose scores depend on later tokens
        (is_causal set to False), reads a window at once.
    batch: windows at a time.
    progress: called with the number of finished windows and of all windows.

    Losses are computed in float32. Raises ValueError if an argument does not fit or a token is
    outside of the vocabulary, TypeError for a model of another kind, and RuntimeError if a loss is
    not finite.
    """
    decoder = decoder_of(model)
    stride = window if stride is None else stride
    _check(decoder, token_ids, window, stride, chunk, batch)
    losses = torch.full((len(token_ids) - 1,), math.nan, device="cpu")
    begins = [*range(0, max(1, len(token_ids) - 1 - window + stride), stride)]
    done = 0
    for part in _alike(begins, len(token_ids) - 1, window, batch):
        if progress is not None:
            progress(done, len(begins))
        length = min(window, len(token_ids) - 1 - part[0])
        rows = torch.stack([token_ids[begin : begin + length + 1] for begin in part])
        for begin, found in zip(part, _window_losses(decoder, rows, chunk), strict=True):
            known = 0 if begin == 0 else window - stride
            losses[begin + known : begin + length] = found[known:]
        done += len(part)
    if progress is not None:
        progress(done, len(begins))
    if not bool(losses.isfinite().all()):
        raise RuntimeError("perplexity: the model's logits are not finite")
    return losses


def _alike(begins: list[int], targets: int, window: int, batch: int) -> Iterator[list[int]]:
    """Beginnings of windows in batches of one length; only the last window may be shorter."""
    full = [begin for begin in begins if begin + window <= targets]
    for index in range(0, len(full), batch):
        yield full[index : index + batch]
    if len(full) < len(begins):
        yield begins[-1:]


@torch.no_grad()
def _window_losses(decoder: Decoder, rows: Tensor, chunk: int) -> Tensor:
    """Losses [windows, length] of rows int64 [windows, length + 1]."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    run = decoder.begin(len(rows), inputs.shape[1], None, numbered=False)
    found = []
    if not decoder.reads_in_parts():
        chunk = inputs.shape[1]
    for begin in range(0, inputs.shape[1], chunk):
        part = slice(begin, begin + chunk)
        scores = run.step(inputs[:, part], True).float().transpose(1, 2)
        found.append(functional.cross_entropy(scores, targets[:, part], reduction="none"))
    return torch.cat(found, 1)


def _check(
    decoder: Decoder, token_ids: Tensor, window: int, stride: int, chunk: int, batch: int
) -> None:
    if token_ids.dim() != 1 or token_ids.dtype != torch.int64 or len(token_ids) < 2:
        raise ValueError(
            "perplexity: expected token_ids int64 [tokens] with at least 2 tokens, "
            f"got {token_ids.dtype} {list(token_ids.shape)}"
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= decoder.vocabulary:
        raise ValueError(
            f"perplexity: expected token_ids in [0, {decoder.vocabulary}), the model's vocabulary, "
            f"got {low if low < 0 else high}"
        )
    for name, value in (("window", window), ("chunk", chunk), ("batch", batch)):
        whole("perplexity", name, value, 1)
    if decoder.positions is not None and window > decoder.positions:
        raise ValueError(
            f"perplexity: expected window of at most {decoder.positions}, the positions that the "
            f"model was made for, got {window}"
        )
    whole("perplexity", "stride", stride, 1, window)
