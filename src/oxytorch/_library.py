"""Loads the compiled library and its functions, or says in one line why it cannot be used."""

from __future__ import annotations

import ctypes
import functools
import re
import warnings
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)
NEWEST_TORCH = (2, 13)
"""The newest torch in which the names that the library looks up in it (core/modes.cpp,
core/sources.cpp, core/watch.cpp) were looked at. They are no part of its stable ABI: a newer one
may have changed them under the same names."""

PATH = Path(__file__).parent / "lib" / "liboxytorch.so"


def torch_version() -> tuple[int, int]:
    """Major and minor number of the torch that is imported."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None:
        raise RuntimeError(f"cannot read the version of torch: {torch.__version__!r}")
    return int(found[1]), int(found[2])


def _load() -> str:
    """Loads the library; returns the reason why it is not loaded, or an empty string."""
    if torch_version() < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return f"torch {torch.__version__} is older than {oldest}; upgrade torch"
    if not PATH.exists():
        return f"the compiled library is missing ({PATH}); reinstall oxytorch"
    try:
        torch.ops.load_library(PATH)  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"the compiled library cannot be loaded ({error}); reinstall oxytorch"
    return ""


why_missing = _load()
loaded = not why_missing


@functools.cache
def functions() -> ctypes.PyDLL:
    """The library's plain C functions; they are called with Python's lock held."""
    library = ctypes.PyDLL(str(PATH))
    for name, result in _RESULTS.items():
        getattr(library, name).restype = result
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


@functools.cache
def functions_in_known_torch() -> ctypes.PyDLL | None:
    """The same for those that look names up in torch; None where this torch may have others."""
    return functions() if loaded and torch_version() <= NEWEST_TORCH else None


_RESULTS = {
    "oxytorch_level_name": ctypes.c_char_p,
    "oxytorch_level_implies": ctypes.c_uint32,
    "oxytorch_capability_name": ctypes.c_char_p,
    "oxytorch_level_capabilities": ctypes.c_uint32,
    "oxytorch_built_levels": ctypes.c_uint32,
    "oxytorch_supported_levels": ctypes.c_uint32,
    "oxytorch_threads_for": ctypes.c_int64,
    "oxytorch_kernels_split": ctypes.c_int64,
    "oxytorch_set_tuning": None,
    "oxytorch_split_float_product": None,
    "oxytorch_set_arenas": None,
    "oxytorch_free_arenas": ctypes.c_int64,
    "oxytorch_program_memory": None,
    "oxytorch_map_huge": ctypes.c_void_p,
    "oxytorch_unmap_huge": None,
    "oxytorch_bump_versions": None,
    "oxytorch_unwatch": None,
    "oxytorch_set_offsets": None,
    "oxytorch_sources_function": ctypes.py_object,
    "oxytorch_packed_call": ctypes.py_object,
    "oxytorch_round_products": None,
    "oxytorch_set_apart": None,
    "oxytorch_verbose_begin": None,
    "oxytorch_verbose_end": None,
    "oxytorch_verbose_lines": ctypes.c_char_p,
    "oxytorch_verbose_label": None,
}
"""What functions return that return no int."""

_ARGUMENTS = {
    "oxytorch_threads_for": [ctypes.c_int64] * 2,
    "oxytorch_set_tuning": [ctypes.c_int64] * 3,
    "oxytorch_set_arenas": [ctypes.c_bool] * 2,
    "oxytorch_map_huge": [ctypes.c_size_t],
    "oxytorch_unmap_huge": [ctypes.c_void_p, ctypes.c_size_t],
    "oxytorch_program_memory": [ctypes.c_void_p] * 2,
    "oxytorch_split_float_product": [*[ctypes.c_int64] * 4, ctypes.c_void_p],
    "oxytorch_moved": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64],
    "oxytorch_bump_versions": [ctypes.c_void_p],
    "oxytorch_unwatch": [ctypes.c_void_p],
    "oxytorch_can_call_packed": [ctypes.c_int],
    "oxytorch_packed_call": [ctypes.c_void_p, ctypes.py_object],
    "oxytorch_verbose_label": [ctypes.c_int64],
}
"""What functions take that are called with plain numbers."""


def warn_if_missing() -> None:
    """Warns once, in one line, when kernels are replaced by plain PyTorch."""
    if why_missing:
        warnings.warn(
            f"oxytorch runs its plain-PyTorch references: {why_missing}",
            RuntimeWarning,
            stacklevel=3,
        )
