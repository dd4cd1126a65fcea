"""A small language model in Hugging Face's format, for examples that need a checkpoint at once.

It is a Llama with random weights and a byte-level tokenizer, so its answers are noise.
`examples/train_language_model.py` makes one that has learned something.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)
SPACE = "Ġ"
"""What stands for the byte of a space in byte-level vocabularies."""


def make_tokenizer() -> Any:
    """A token for each byte, and one for the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["<end>"] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(width: int = 128, layers: int = 2) -> Any:
    """A Llama in float32 that reads 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=256,
    )
    model = LlamaForCausalLM(config).eval()
    # Other bytes are never the most likely, so that greedy texts can be read.
    vocabulary = make_tokenizer().get_vocab()
    others = [i for word, i in vocabulary.items() if not (word.isascii() or word == SPACE)]
    with torch.no_grad():
        model.lm_head.weight[[*others, vocabulary["<end>"]]] = 0
    return model


def write_checkpoint(folder: Path, width: int = 128, layers: int = 2) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files."""
    make_model(width, layers).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
