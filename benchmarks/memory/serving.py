"""Serves a decoder: batches of any size and length in flight at once, with growing caches."""

from __future__ import annotations

import random

import torch
from layers import MLP, Attention, Cache, Decoder, Layer
from torch import Tensor

from program import parser, running


def make_model(layers: int, width: int, inner: int, vocabulary: int) -> Decoder:
    heads = width // 64

    def make() -> Layer:
        return Layer(width, Attention(width, heads, max(1, heads // 4)), MLP(width, inner))

    return Decoder(width, vocabulary, layers, make)


class Batch:
    """Requests that are answered together."""

    def __init__(self, model: Decoder, prompt: Tensor, left: int) -> None:
        self.model, self.left = model, left
        self.cache: Cache = []
        self.token = self._next(prompt)

    def step(self) -> None:
        """Add one token to each answer."""
        self.token = self._next(self.token)
        self.left -= 1

    def _next(self, tokens: Tensor) -> Tensor:
        probabilities = self.model(tokens, self.cache)[:, -1].float().softmax(-1)
        return torch.multinomial(probabilities, 1)


@torch.inference_mode()
def main() -> None:
    sizes = {"layers": 16, "width": 2048, "inner": 5632, "vocabulary": 32000}
    arguments = parser(
        __doc__ or "", **sizes, batches=16, in_flight=4, most=16, prompt=2048, answer=12
    ).parse_args()
    choose = random.Random(arguments.seed)
    with running(arguments) as mark:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(arguments.device):
            model = make_model(*(getattr(arguments, name) for name in sizes)).eval()
        active: list[Batch] = []
        started = 0
        while active or started < arguments.batches:
            if len(active) < arguments.in_flight and started < arguments.batches:
                shape = choose.randint(1, arguments.most), choose.randint(16, arguments.prompt)
                mark(f"batch {started}: {shape[0]} prompts of {shape[1]} tokens")
                prompt = torch.randint(arguments.vocabulary, shape, device=arguments.device)
                answer = choose.randint(arguments.answer // 3, arguments.answer)
                active.append(Batch(model, prompt, answer))
                started += 1
            batch = choose.choice(active)
            batch.step()
            if not batch.left:
                active.remove(batch)


if __name__ == "__main__":
    main()
