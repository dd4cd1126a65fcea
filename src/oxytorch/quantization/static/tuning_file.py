"""What `autotune` has found out so far, in a JSON file that is whole at any time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...core.tensor_file import bytes_of
from ...core.whole_file import replacing
from .errors import LayerError
from .recipe import Recipe, recipe_data, recipe_from

FORMAT, VERSION = "oxytorch.autotune", 1
_KEYS = {"baseline", "recipes", "errors", "scores"}


@dataclass
class Known:
    """What is known of a search.

    path: of the file; None keeps it in memory alone.
    identity: what has to be the same to go on: the model, the data and the settings, by name.
    baseline: the score of the original. recipes and errors: by what they are called. scores, of
        trials by what was tried: None where it was no number, and the seconds that each took.
    """

    path: Path | None
    identity: dict[str, str]
    baseline: float | None = None
    recipes: dict[str, Recipe] = field(default_factory=dict)
    errors: dict[str, list[LayerError]] = field(default_factory=dict)
    scores: dict[str, tuple[float | None, float]] = field(default_factory=dict)

    def save(self) -> None:
        """Write the file; whenever the process ends, it is whole: the old one or the new one."""
        if self.path is None:
            return
        data = {
            "format": FORMAT,
            "version": VERSION,
            **self.identity,
            "baseline": self.baseline,
            "recipes": {name: recipe_data(each) for name, each in self.recipes.items()},
            "errors": {name: [asdict(e) for e in each] for name, each in self.errors.items()},
            "scores": {name: [*each] for name, each in self.scores.items()},
        }
        with replacing(self.path) as file:
            file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def opened(path: str | Path | None, identity: dict[str, str]) -> Known:
    """What a file holds of a search; nothing where there is none yet.

    Raises ValueError for a file of another model, of other data or settings, or that is none.
    """
    known = Known(None if path is None else Path(path), identity)
    if known.path is None or not known.path.exists():
        return known
    try:
        data = json.loads(known.path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f'no "format": "{FORMAT}"')
        if data.get("version") != VERSION:
            raise ValueError(f"version {data.get('version')!r}, expected {VERSION}")
        _check_identity(known.path, data, identity)
        _read(known, data)
    except _OtherError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"autotune: expected a file that autotune wrote, got {path} ({error}); give another "
            "path, or delete it to start over"
        ) from error
    return known


class _OtherError(ValueError):
    """A file of another search."""


def _check_identity(path: Path, data: dict[str, Any], identity: dict[str, str]) -> None:
    for name, own in identity.items():
        if data.get(name) != own:
            raise _OtherError(
                f"autotune: expected a file of this {name}, got {path}, which was written for "
                f"another; give another path, or delete it to start over"
            )


def _read(known: Known, data: dict[str, Any]) -> None:
    """Raises ValueError, TypeError, KeyError or AttributeError for what is damaged."""
    if not data.keys() >= _KEYS:
        raise ValueError(f"without {', '.join(sorted(_KEYS - data.keys()))}")
    baseline = data["baseline"]
    known.baseline = None if baseline is None else _number(baseline)
    known.recipes = {n: recipe_from(each, str(known.path)) for n, each in data["recipes"].items()}
    known.errors = {n: [_error(each) for each in own] for n, own in data["errors"].items()}
    for name, (score, seconds) in data["scores"].items():
        known.scores[name] = (None if score is None else _number(score), _number(seconds))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _error(data: Any) -> LayerError:
    own = LayerError(**data)
    ratios = (own.sqnr, own.input_sqnr)
    if not isinstance(own.module, str) or any(type(r) not in (float, type(None)) for r in ratios):
        raise ValueError(f"expected the error of a layer, got {data!r}")
    return own


def model_identity(model: nn.Module) -> str:
    """What tells a model with its weights from others."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        _add(digest, value)
    return digest.hexdigest()


def data_identity(data: Sequence[Any]) -> str:
    """What tells calibration data from others."""
    digest = hashlib.sha256()
    leaves, structure = pytree.tree_flatten([*data])
    digest.update(str(structure).encode())
    for leaf in leaves:
        _add(digest, leaf)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if not isinstance(value, Tensor):
        digest.update(repr(value).encode())
        return
    plain = value.detach()
    digest.update(f"{plain.dtype} {[*plain.shape]}".encode())
    if plain.numel() and not plain.is_meta:
        plain = plain if plain.layout is torch.strided else plain.to_dense()
        digest.update(bytes_of(plain.cpu().contiguous()))
