"""A local folder in Hugging Face's format: is it a model, its tokenizer, its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.json_file import read_json


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
    config = read_json(path)
    kinds = architectures(config)
    if kinds and not any(map(is_language_model, kinds)):
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


def architectures(config: dict[str, Any]) -> list[str]:
    """The classes that a config.json names."""
    names = config.get("architectures") or []
    return [names] if isinstance(names, str) else [str(name) for name in names]


def is_language_model(architecture: str) -> bool:
    """Whether a class of transformers is a causal language model, by its name."""
    return "CausalLM" in architecture or "LMHead" in architecture


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; raises ValueError where there is none that transformers reads."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; expected that of a tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # each tokenizer of transformers raises its own kinds
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(
            f"{folder} has no tokenizer that transformers can read: {type(error).__name__}: {line}"
        ) from error


def chat_prompt(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> str:
    """Messages as the chat template writes them. Raises ValueError where it does not."""
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs, which may raise anything
        name = type(error).__name__
        line = getattr(error, "lineno", None)
        at = name if line is None else f"{name} in line {line}"
        raise ValueError(f"the chat template refuses the messages: {at}: {error}") from error
    return text


def load_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The folder's causal language model in evaluation mode, weights in `dtype` or as quantized.

    Raises ValueError for a folder that is not a model, or whose weights do not fit its config.
    """
    config = read_config(folder)
    if is_quantized(folder, config):
        from ..quantization import load_quantized

        return load_quantized(folder, dtype=dtype).eval()
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        loaded, report = load(
            str(folder),
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds for files that are no good
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(
            f"{folder} cannot be loaded by transformers: {type(error).__name__}: {line}"
        ) from error
    _check_report(folder, report)
    model: nn.Module = loaded.eval()
    return model


def is_quantized(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a folder was written by `save_quantized` or holds GPTQ, AWQ and the like."""
    names = ("oxytorch.json", "quantize_config.json", "quant_config.json")
    return "quantization_config" in config or any((folder / name).is_file() for name in names)


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    """Raises ValueError for weights that transformers would have left random."""
    for kind, consequence in (
        ("missing_keys", "they would be random"),
        ("mismatched_keys", "their shapes are not those that config.json says"),
    ):
        found = report.get(kind) or ()
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in found)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{folder}: {kind.split('_')[0]} weights {', '.join(names[:3])}{more}: "
                f"{consequence}"
            )
