"""Models from texts to vectors or scores: sentence-transformers, recognized by structure.

Such a model is an `nn.Sequential` of a class of its own, with `preprocess` or `tokenize` for texts
and `encode` or `predict` for users. Its modules hand on one dictionary of features and write to it;
the first one calls a model of transformers with tensors, which is its core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.interruption import pass_on_interruption
from ..rewriting.changes import forwards_set
from .sample import SampleError, SampleInput


def is_text_model(model: object) -> bool:
    """Whether a model takes texts, and its forward a dictionary of features."""
    return (
        isinstance(model, nn.Sequential)
        and type(model) is not nn.Sequential
        and len(model) > 0
        and _tokenizer(model) is not None
        and any(callable(getattr(model, name, None)) for name in ("encode", "predict"))
    )


def core_of(model: nn.Module) -> nn.Module | None:
    """The model of transformers that a text model calls with tensors, or None."""
    if not is_text_model(model):
        return None
    first = next(model.children())
    found = getattr(first, "auto_model", None) or getattr(first, "model", None)
    is_part = isinstance(found, nn.Module) and any(found is part for part in first.modules())
    return found if is_part else None


def core_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of the core's parameters, in which it returns its results whatever it becomes."""
    core = core_of(model)
    parameters = () if core is None else core.parameters()
    return next((p.dtype for p in parameters if p.is_floating_point()), None)


def dtype_rules(model: nn.Module, dtype: Any) -> Any:
    """The dtypes that a text model's modules are to get: one for all is the core's.

    What follows the core works on one vector a text, and keeps its dtype.
    """
    own = core_dtype(model)
    if not isinstance(dtype, torch.dtype) or own is None:
        return dtype
    following = [name for name, _ in model.named_children()][1:]
    return {"": dtype, **dict.fromkeys(following, own)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """While a model is in evaluation mode; a text model's own methods put it there, too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def features_sample(model: nn.Module, sample_input: Any) -> Any:
    """The arguments of a text model's forward: texts become features by its own tokenizer.

    sample_input: a text, a list of texts or of pairs of texts, features, or a tuple of them.
    """
    if isinstance(sample_input, Mapping):
        return ({**sample_input},)
    is_single = getattr(model, "is_singular_input", None)
    if isinstance(sample_input, str):
        sample_input = [sample_input]
    values = sample_input if isinstance(sample_input, (list, tuple)) else ()
    if values and isinstance(values[0], Mapping):
        return sample_input
    if not _are_texts(values):
        inner = f" of {type(values[0]).__name__}" if values else ""
        raise TypeError(
            f"optimize: expected sample_input of a {type(model).__name__} to be texts, as encode "
            "or predict takes them, or what its preprocess made of them, got a "
            f"{type(sample_input).__name__}{inner}"
        )
    if len(values) == 2 and callable(is_single) and is_single(sample_input):
        values = [sample_input]
    tokenize = _tokenizer(model)
    assert tokenize is not None
    try:
        features = tokenize([*values])
    except Exception as error:
        pass_on_interruption(error)
        raise SampleError(
            f"optimize: the tokenizer of {type(model).__name__} does not take the texts of "
            f"sample_input ({type(error).__name__}: {error}); give what encode or predict takes"
        ) from error
    return ({**features},)


def core_call(
    model: nn.Module, core: nn.Module, sample: SampleInput
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a text model calls its core on the sample."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    run: Any = core.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return run(*args, **kwargs)

    with forwards_set({core: noting}), sample.running(model), torch.no_grad():
        sample.given_to(model)
    if len(calls) != 1:
        raise SampleError(f"optimize: expected one call of {type(core).__name__}, got {len(calls)}")
    return calls[0]


def _are_texts(values: list[Any] | tuple[Any, ...]) -> bool:
    def is_text(value: object) -> bool:
        pair = value if isinstance(value, (list, tuple)) else (value,)
        return len(pair) > 0 and all(isinstance(each, str) for each in pair)

    return len(values) > 0 and all(map(is_text, values))


def _tokenizer(model: nn.Module) -> Callable[[list[Any]], Mapping[str, Tensor]] | None:
    found = getattr(model, "preprocess", None) or getattr(model, "tokenize", None)
    return found if callable(found) else None
