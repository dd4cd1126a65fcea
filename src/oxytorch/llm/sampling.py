"""Choosing the next token from a model's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .numbers import real, whole

_FIRST_LOOK = 512
"""Candidates that are sorted before the whole vocabulary is: they nearly always hold top_p."""
_LEAST_TEMPERATURE = 1e-30
"""Quotients by less are infinite in float32; by this one the most likely token is all there is."""


class Sampler:
    """Greedy choice, or sampling among the most likely tokens.

    temperature: 0 takes the most likely token; otherwise logits are divided by it.
    top_k: only the k most likely tokens can be chosen.
    top_p: only the most likely tokens, as long as the probabilities before them sum to less than
        it, after temperature and top_k, in the order of Hugging Face's processors.
    seed: makes the draws reproducible. None draws from torch's own generator.

    Raises ValueError for a setting out of range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.temperature = real("generate", "temperature", temperature, ">= 0")
        if self.temperature < 0.0:
            raise ValueError(f"generate: expected temperature >= 0, got {temperature}")
        self.top_k = None if top_k is None else whole("generate", "top_k", top_k, 1)
        if top_p is not None and not 0.0 < real("generate", "top_p", top_p, "in (0, 1]") <= 1.0:
            raise ValueError(f"generate: expected top_p in (0, 1] or None, got {top_p}")
        self.top_p = None if top_p == 1.0 else top_p
        if seed is not None:
            seed = whole("generate", "seed", seed, 0, 2**64 - 1)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """The chosen tokens [batch] int64 of logits [batch, vocabulary] of any floating dtype.

        Raises RuntimeError if a row has no finite logit or a NaN.
        """
        logits = logits.float()
        return self._draw(logits) if self.temperature else self._likeliest(logits)

    def _likeliest(self, logits: Tensor) -> Tensor:
        best, chosen = logits.max(-1)
        _check_finite(best)
        return chosen

    def _draw(self, logits: Tensor) -> Tensor:
        probabilities, tokens = self.candidates(logits)
        cumulative = probabilities.double().cumsum(-1)
        share = torch.rand(
            len(logits), 1, dtype=torch.float64, generator=self._generator, device="cpu"
        )
        place = torch.searchsorted(cumulative, share * cumulative[:, -1:], right=True)
        place.clamp_(max=cumulative.shape[-1] - 1)
        return (place if tokens is None else tokens.gather(1, place))[:, 0]

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Probabilities [batch, n] of the tokens that take part, and which these are.

        logits: float32 [batch, vocabulary]. tokens: int64 [batch, n], from the likeliest on; None
        means all, in order. Probabilities of a row sum to 1; those outside of top_p are 0.
        """
        _check_finite(logits.amax(-1))
        logits = logits / max(self.temperature, _LEAST_TEMPERATURE)
        if self.top_k is None and self.top_p is None:
            return torch.softmax(logits, -1), None
        looked = min(self.top_k or _FIRST_LOOK, logits.shape[-1])
        values, tokens = logits.topk(looked)
        total = (values if self.top_k else logits).logsumexp(-1, keepdim=True)
        probabilities = (values - total).exp()
        if self.top_p is None:
            return probabilities, tokens
        if self.top_k is None and bool((probabilities.sum(-1) < self.top_p).any()):
            values, tokens = logits.sort(-1, descending=True)
            probabilities = (values - total).exp()
        before = probabilities.cumsum(-1) - probabilities
        before[:, 0] = 0.0
        probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        return probabilities / probabilities.sum(-1, keepdim=True), tokens


def _check_finite(best: Tensor) -> None:
    """best: the largest logit of each row; NaN wins every comparison of torch's maximum."""
    if not bool(best.isfinite().all()):
        row = int((~best.isfinite()).nonzero()[0, 0])
        raise RuntimeError(
            f"generate: expected finite logits, the largest of row {row} is {best[row].item()}; "
            "check the model's weights"
        )
