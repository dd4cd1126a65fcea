"""Models that read whole texts: vectors of sentences, and scores of pairs (cross-encoders)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.json_file import read_json, read_json_list
from .errors import ApiError
from .tokens import Tokenizer

Encoded = dict[str, list[int]]
"""What a model takes of one text, by name: input_ids and the like."""


@dataclass(frozen=True)
class Pooling:
    """How the states of a text's tokens become its vector.

    mode: "mean", "cls" (the first token) or "last".
    normalized: vectors have length 1.
    """

    mode: str
    normalized: bool

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """float32 [texts, width] of states [texts, tokens, width] and mask [texts, tokens]."""
        hidden = hidden.float()
        if self.mode == "mean":
            kept = mask[..., None].float()
            found = (hidden * kept).sum(1) / kept.sum(1)
        elif self.mode == "cls":
            found = hidden[:, 0]
        else:
            found = hidden[torch.arange(len(hidden), device="cpu"), mask.sum(1) - 1]
        return F.normalize(found, dim=-1) if self.normalized else found


MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""Names of sentence-transformers."""


def pooling_of(folder: Path, given: str | None) -> Pooling:
    """The pooling that a folder of sentence-transformers names, or `given`.

    Raises ValueError where neither says one, or the folder has one that is not served.
    """
    parts = _parts(folder)
    if given is not None:
        return Pooling(given, parts is None or "Normalize" in parts)
    path = folder / "1_Pooling" / "config.json"
    if parts is None or not path.is_file():
        raise ValueError(
            f"{folder} does not say how states of tokens become a vector (modules.json, "
            "1_Pooling/config.json); give --pooling mean, cls or last"
        )
    unknown = [part for part in parts if part not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ValueError(f"{folder}: the module {unknown[0]} of modules.json is not served")
    data = read_json(path)
    on = [name for name, value in data.items() if name.startswith("pooling_mode_") and value]
    modes = [MODES.get(name) for name in on]
    if len(modes) != 1 or modes[0] is None:
        raise ValueError(f"{path}: expected one of {', '.join(MODES)}, got {', '.join(on)}")
    return Pooling(modes[0], "Normalize" in parts)


def _parts(folder: Path) -> list[str] | None:
    """The names of the modules of sentence-transformers, or None where the folder names none."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    found = read_json_list(path)
    if not all(isinstance(part, dict) and "type" in part for part in found):
        raise ValueError(f"{path}: expected a list of modules with their types")
    return [str(part["type"]).rpartition(".")[2] for part in found]


def longest_text(folder: Path, config: Any, tokenizer: Any) -> int:
    """How many tokens the model reads, special ones included."""
    found = [
        int(value)
        for value in (
            _read(folder / "sentence_bert_config.json").get("max_seq_length"),
            getattr(config, "max_position_embeddings", None),
            getattr(tokenizer, "model_max_length", None),
        )
        if isinstance(value, int) and 0 < value < 1 << 30
    ]
    # RoBERTa's positions begin behind those of padding.
    if getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
        found = [value - 2 if value == config.max_position_embeddings else value for value in found]
    return min(found, default=512)


def has_raw_scores(config: Any) -> bool:
    """Whether a cross-encoder's scores are taken as they are, as its config says it for
    sentence-transformers; otherwise they become numbers from 0 to 1."""
    own = getattr(config, "sentence_transformers", None) or {}
    names = (own.get("activation_fn"), getattr(config, _OLD_ACTIVATION, None))
    return any(str(name).endswith("Identity") for name in names)


_OLD_ACTIVATION = "sbert_ce_default_activation_function"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    return read_json(path)


@dataclass(frozen=True, eq=False)
class Reader:
    """Calls a model on a batch of texts, padded to the longest.

    padding: the token that fills shorter texts.
    longest: most tokens of a text.
    vocabulary: tokens that the model knows.
    finish: makes of the model's output and the mask [texts, tokens] a tensor [texts, ...].
    """

    model: nn.Module
    padding: int
    longest: int
    vocabulary: int
    finish: Callable[[Any, Tensor], Tensor]

    def __call__(self, texts: Sequence[Encoded]) -> list[Tensor]:
        """The results of texts, in their order."""
        width = max(len(text["input_ids"]) for text in texts)
        given = {
            name: torch.tensor(
                [
                    text[name] + [self.padding if name == "input_ids" else 0] * _short(text, width)
                    for text in texts
                ],
                device="cpu",
            )
            for name in texts[0]
        }
        return list(self.finish(self.model(**given), given["attention_mask"]))

    def check(self, text: Encoded, name: str, what: str = "a text has") -> Encoded:
        """The text itself. Raises ApiError for one that is empty, too long or of other tokens.

        name: of the field that it comes from.
        what: has its tokens, for the message.
        """
        ids = text["input_ids"]
        if not ids:
            raise ApiError(400, f"{name} has a text without tokens", param=name)
        if len(ids) > self.longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.longest} tokens, and {what} "
                f"{len(ids)}; shorten {name}",
                param=name,
                code="context_length_exceeded",
            )
        if not all(0 <= token < self.vocabulary for token in ids):
            raise ApiError(
                400, f"{name} has tokens outside of 0 to {self.vocabulary - 1}", param=name
            )
        return text


def _short(text: Encoded, width: int) -> int:
    return width - len(text["input_ids"])


def encoded_tokens(tokenizer: Tokenizer, tokens: Sequence[int]) -> Encoded:
    """What a model takes of a text that comes as tokens."""
    names = set(getattr(tokenizer.inner, "model_input_names", ()))
    found = {"input_ids": list(tokens), "attention_mask": [1] * len(tokens)}
    if "token_type_ids" in names:
        found["token_type_ids"] = [0] * len(tokens)
    return found
