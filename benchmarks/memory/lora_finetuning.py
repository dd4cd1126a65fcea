"""Fine-tunes a decoder of Llama's form with LoRA, checkpointed activations and any length."""

from __future__ import annotations

from layers import MLP, Attention, Decoder, Layer

from program import train_language_model


def model(layers: int, width: int, inner: int, vocabulary: int, rank: int) -> Decoder:
    heads = width // 64

    def make() -> Layer:
        return Layer(width, Attention(width, heads, max(1, heads // 8), rank), MLP(width, inner))

    made = Decoder(width, vocabulary, layers, make, checkpointed=True)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(".down.weight" in name and ".mlp" not in name)
        if ".up.weight" in name and ".mlp" not in name:
            parameter.requires_grad_(True)
    return made


SIZES = {"layers": 22, "width": 2048, "inner": 5632, "vocabulary": 32000, "rank": 16}
LOOP = {"steps": 8, "batch": 4, "shortest": 256, "longest": 4096}

if __name__ == "__main__":
    train_language_model(__doc__ or "", model, SIZES, LOOP, clip=1.0)
