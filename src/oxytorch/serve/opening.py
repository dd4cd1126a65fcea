"""From the MODEL of the command line to a service: what kind it is, and how it is opened."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..core.json_file import read_json
from ..files import load
from ..llm.language_model import LanguageModel
from ..llm_command.folder import architectures, is_language_model, load_tokenizer
from .app import Service
from .metrics import Metrics
from .open_language import language_service, prepared_model
from .open_program import program_service
from .open_sentences import sentence_service
from .options import refuse

LANGUAGE = ("tokenizer", "weights", "kv_cache", "group_size")
SENTENCES = ("dtype", "pooling")
BATCHES = ("max_batch", "max_wait")


def open_service(arguments: argparse.Namespace, metrics: Metrics) -> Service:
    """The service of a model. Raises ValueError or OSError for what cannot be served."""
    path: Path = arguments.model
    name = arguments.name or path.stem or path.resolve().name
    if path.is_file():
        found = load(path)
        if not isinstance(found, LanguageModel):
            refuse(arguments, "of folders", *LANGUAGE, *SENTENCES)
            return program_service(found, name, arguments, metrics)
        refuse(arguments, "of folders", "weights", "kv_cache", "group_size")
        refuse(arguments, "of other models", *SENTENCES, *BATCHES)
        if arguments.tokenizer is None:
            raise ValueError(f"{path} has no tokenizer; give --tokenizer with its folder")
        tokenizer = load_tokenizer(arguments.tokenizer)
        return language_service(found, tokenizer, name, arguments, metrics)
    kind = kind_of(path)
    if kind == "language":
        refuse(arguments, "of other models", *SENTENCES, *BATCHES)
        tokenizer = load_tokenizer(arguments.tokenizer or path)
        return language_service(prepared_model(arguments), tokenizer, name, arguments, metrics)
    refuse(arguments, "of language models", *LANGUAGE)
    return sentence_service(path, kind, name, arguments, metrics)


def kind_of(folder: Path) -> str:
    """ "language", "rerank" or "embedding", by the architecture that config.json names.

    Raises ValueError for what is no folder of a model, and for other architectures.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} is an adapter without its model: merge it (merge_and_unload of peft), call "
            "save_pretrained, and serve the folder of the merged model"
        )
    if not path.is_file():
        raise ValueError(
            f"{folder} is no model: expected a file of oxytorch.save, or a folder in Hugging "
            "Face's format, with config.json"
        )
    names = architectures(read_json(path))
    if any(map(is_language_model, names)):
        return "language"
    if any(name.endswith("ForSequenceClassification") for name in names):
        return "rerank"
    if any("For" in name and not name.endswith("ForMaskedLM") for name in names):
        raise ValueError(
            f"{path}: expected a language model, a model of sentences or a cross-encoder, got the "
            f"architecture {', '.join(names)}; export it and serve the file of oxytorch.save"
        )
    return "embedding"
