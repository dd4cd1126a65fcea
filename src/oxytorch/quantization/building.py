"""Models without weights, to be filled from a file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..core.errors import CheckpointError
from ..core.json_file import read_json
from ..rewriting.refusals import check_not_optimized


@contextmanager
def no_weights() -> Iterator[None]:
    """Modules that this thread makes inside have their parameters on the meta device.

    They cost neither memory nor time for initial values. Buffers are real: those that no
    checkpoint holds (the frequencies of rotary embeddings) are computed by the modules.
    """
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or threading.get_ident() != thread or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(to_meta):
        yield


def empty_model(
    directory: Path, model: nn.Module | Callable[[], nn.Module] | None, dtype: torch.dtype | None
) -> nn.Module:
    """Return the model that weights are to be put into.

    model: the model itself; or what makes it, which is called without weights; or None for the
    language model that the directory's config.json describes to transformers.
    dtype: of a model that transformers makes; None is the configuration's.
    """
    if isinstance(model, nn.Module):
        check_not_optimized("load_quantized", model)
        return model
    if model is not None:
        with no_weights():
            made = model()
        if not isinstance(made, nn.Module):
            raise TypeError(
                "load_quantized: expected model to be a torch.nn.Module or to make one, got a "
                f"{type(made).__name__}"
            )
        return made
    return _language_model(directory, dtype)


def _language_model(directory: Path, dtype: torch.dtype | None) -> nn.Module:
    values = read_json(directory / "config.json")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"load_quantized: {directory} describes a model of transformers, which is not "
            "installed; install oxytorch[llm], or give the model"
        ) from error
    values.pop("quantization_config", None)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{directory / 'config.json'}: expected a model_type that transformers "
            f"{transformers.__version__} knows, got {kind!r}"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
        # Before transformers 4.56 the setting had another name.
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"
        options = {} if dtype is None else {name: dtype}
        with no_weights():
            made = _class_of(transformers, values)._from_config(config, **options)
        if (directory / "generation_config.json").is_file() and made.can_generate():
            read = transformers.GenerationConfig.from_pretrained
            made.generation_config = read(str(directory), local_files_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory / 'config.json'}: transformers {transformers.__version__} makes no model "
            f"of it ({type(error).__name__}: {error})"
        ) from error
    found: nn.Module = made.eval()
    return found


def _class_of(transformers: Any, config: dict[str, Any]) -> Any:
    """The class of transformers that a configuration names: no code of a checkpoint is run."""
    names = config.get("architectures") or []
    for name in names:
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    raise CheckpointError(
        f"config.json: expected architectures to name a model of transformers "
        f"{transformers.__version__}, got {names}"
    )
