"""A local folder in Hugging Face's format: is it a model, its tokenizer, its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder.

    Raises ValueError for a folder that is not a causal language model with weights in safetensors.
    """
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; expected the folder of a model")
    path = folder / "config.json"
    if not folder.is_dir() or not path.is_file():
        raise ValueError(
            f"{folder} is not a model: expected a folder in Hugging Face's format, with config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object, got {type(config).__name__}")
    kinds = config.get("architectures")
    if isinstance(kinds, list) and not any(
        "CausalLM" in str(k) or "LMHead" in str(k) for k in kinds
    ):
        raise ValueError(
            f"{path}: expected a causal language model, got the architecture {', '.join(kinds)}"
        )
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        reason = (
            "only pickled weights, which may run any code; save the model again as safetensors"
            if pickled
            else "none"
        )
        raise ValueError(f"{folder}: expected weights in *.safetensors, found {reason}")
    return config


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; raises ValueError where there is none that transformers reads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # each tokenizer of transformers raises its own kinds
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(
            f"{folder} has no tokenizer that transformers can read: {type(error).__name__}: {line}"
        ) from error


def load_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The folder's causal language model in evaluation mode, weights in `dtype`.

    Raises ValueError for a folder that is not a model, or whose weights do not fit its config.
    """
    read_config(folder)
    from transformers import AutoModelForCausalLM

    loading: Any = AutoModelForCausalLM.from_pretrained
    loaded, report = loading(
        str(folder),
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    for kind, consequence in (
        ("missing_keys", "they would be random"),
        ("mismatched_keys", "their shapes differ from the model's"),
    ):
        names = sorted(str(key) for key in report.get(kind) or ())
        if names:
            raise ValueError(
                f"{folder}: {kind.split('_')[0]} weights {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}: {consequence}"
            )
    model: nn.Module = loaded.eval()
    return model
