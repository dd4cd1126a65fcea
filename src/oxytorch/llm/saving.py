"""Language models to files: what `oxytorch.save` does with one, or why it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from ..core.described_file import Tensors, write_described
from ..rewriting.changes import log_of
from .arguments import text_config
from .configured import kept_settings
from .consistent import check
from .decoder import PlainDecoder
from .description import Reader, data_of
from .detached import detached
from .files import FORMAT, VERSIONS
from .language_model import LanguageModel
from .record import fused_model, sample_logits
from .report import LanguageModelReport
from .samples import sample_tokens

_SAMPLE = 9
"""Tokens on which what is written is compared with the model."""

_FAR = 8192
"""Positions that are compared of a model that names no number of them."""


def is_language_model(model: object) -> TypeGuard[nn.Module | LanguageModel]:
    """Whether it is one from a file, or `llm.optimize` made it."""
    return isinstance(model, LanguageModel) or _report(model) is not None


def _report(model: object) -> LanguageModelReport | None:
    log = log_of(model) if isinstance(model, nn.Module) else None
    return log.report if log is not None and isinstance(log.report, LanguageModelReport) else None


def save(model: nn.Module | LanguageModel, path: Path) -> None:
    """Write a language model to a file; see `oxytorch.save`."""
    try:
        kept = model if isinstance(model, LanguageModel) else _kept(model)
        tensors = Tensors()
        data = data_of(kept.record, "model", tensors)
        if isinstance(model, nn.Module):
            _compare(model, data, tensors)
    except ValueError as error:
        raise ValueError(f"save: {error}") from error
    description = {
        "model": data,
        "positions": kept.positions,
        "generation": dataclasses.asdict(kept.generation_config),
    }
    write_described(path, FORMAT, VERSIONS[0], description, tensors)


def _kept(model: nn.Module) -> LanguageModel:
    """A model as a file holds it; raises ValueError with the reason where none does."""
    fused, kind = fused_model(model), type(model).__name__
    if fused is None or fused.standing is None:
        report = _report(model)
        reasons = [] if report is None else [each.detail for each in report.skipped] + report.notes
        raise ValueError(
            f"expected a language model whose steps llm.optimize knows as a whole, got a {kind}: "
            f"{reasons[0] if reasons else 'it was not optimized'}; oxytorch.save_quantized writes "
            "quantized weights of any model, and save_pretrained plain ones"
        )
    with torch.no_grad():
        if not fused.standing.allows():
            raise ValueError(
                f"expected a {kind} as llm.optimize left it, got one that was changed since (a "
                "hook, a mode, a setting or a module); take the change back, or optimize again"
            )
        settings = kept_settings(model)
        positions = PlainDecoder(model).positions
        most = getattr(text_config(model), "max_position_embeddings", None) or _FAR
        try:
            record = detached(fused, most)
        except ValueError as error:
            raise ValueError(f"expected a {kind} that a file can describe, but {error}") from error
    return LanguageModel(record, positions, settings)


def _compare(model: nn.Module, data: Any, tensors: Tensors) -> None:
    """Raise ValueError if what is written gives other logits than the model's record."""
    fused = fused_model(model)
    assert fused is not None
    again = Reader(tensors.tensor).model(data)
    check(again)
    tokens = sample_tokens(model, _SAMPLE, batch=2)
    pairs = zip(sample_logits(fused, tokens), sample_logits(again, tokens), strict=True)
    if not all(torch.equal(own, found) for own, found in pairs):
        raise ValueError(
            f"expected a {type(model).__name__} that a file can describe, but a model made from "
            "the description gives other logits"
        )
