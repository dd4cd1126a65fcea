"""Which functions of torch and of Python's library only compute with what they are given."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

import torch
from torch import nn

from ..core.layer_functions import TORCH as _TORCH

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep

_PYTHON = os.path.dirname(os.__file__) + os.sep
WRAPPERS = ("_compile.py", "_dynamo", "compiler", "utils/_contextlib.py")
"""Where torch has what it puts around functions."""

_TORCHS_CODE = (
    *WRAPPERS, "_VF.py", "_awaits", "_custom_op", "_jit_internal.py", "_library",
    "_linalg_utils.py", "_lobpcg.py", "_lowrank.py", "_ops.py", "_tensor.py",
    "amp/autocast_mode.py", "autograd/function.py", "autograd/grad_mode.py", "distributions",
    "functional.py", "fx", "library.py", "masked", "nested", "nn/attention", "nn/functional.py",
    "nn/modules", "nn/parameter.py", "nn/utils", "overrides.py", "return_types.py", "signal",
    "sparse", "types.py", "utils/_pytree.py",
)  # fmt: skip
"""Files and folders of torch whose functions compute with what they are given. Others read or set
what holds for the process (random numbers, numbers of threads, defaults)."""

_CONSTANT_FUNCTIONS = frozenset(
    ["is_tensor", "is_storage", "sym_int", "sym_float", "sym_max", "sym_min", "sym_not", "sym_sum",
     "sym_ite", "typename", "_assert", "is_compiling", "is_dynamo_compiling", "is_exporting",
     "is_available", "is_current_stream_capturing", "is_tracing", "is_scripting",
     "is_grad_enabled", "is_autocast_enabled",
     "is_autocast_cpu_enabled", "_check", "_check_index", "_check_value", "_check_type",
     "_check_with", "_check_not_implemented", "_check_tensor_all", "_check_tensor_all_with"]
)  # fmt: skip
"""Functions of torch elsewhere that give the same in all calls that a recording is used for."""

_CHANGES_OF_MODULES = frozenset(
    ["train", "eval", "apply", "_apply", "to", "cpu", "cuda", "type", "float", "double", "half",
     "bfloat16", "to_empty", "requires_grad_", "zero_grad", "share_memory", "compile",
     "load_state_dict", "set_submodule", "set_extra_state", "add_module", "append", "insert",
     "extend", "update", "pop", "popitem", "clear", "setdefault", "__setitem__", "__delitem__",
     "__iadd__"]
)  # fmt: skip
_OF_DEFAULT_DEVICE = ("__torch_function__", "_device_constructors")
"""What runs at each call of torch where `torch.set_default_device` set one."""

_OF_MODULES = ("nn/modules/module.py", "nn/modules/container.py")


@functools.lru_cache(maxsize=4096)
def is_pythons(filename: str) -> bool:
    is_installed = filename.startswith(_PYTHON) and "-packages" not in filename
    return is_installed or filename.startswith("<frozen")


def is_library_or_pythons(filename: str) -> bool:
    return is_library(filename) or is_pythons(filename)


@functools.lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    return filename.startswith((_TORCH, _OURS))


def in_torch(code: types.CodeType) -> str:
    """The file of a function of torch, from torch's folder on; "" for other code."""
    filename = code.co_filename
    is_torchs = filename.startswith(_TORCH)
    return filename.removeprefix(_TORCH).replace(os.sep, "/") if is_torchs else ""


@functools.lru_cache(maxsize=4096)
def is_stateful_code(code: types.CodeType) -> bool:
    """Whether a function of torch in Python reads or changes more than what it is given."""
    path = in_torch(code)
    if not path or code.co_name in _CONSTANT_FUNCTIONS:
        return False
    if path == "utils/_device.py" and code.co_name in _OF_DEFAULT_DEVICE:
        return False
    if path in _OF_MODULES:
        return code.co_name in _CHANGES_OF_MODULES or code.co_name.startswith("register_")
    return not path.startswith(_TORCHS_CODE)


def is_stateful(builtin: Any) -> bool:
    """Whether a built-in function of torch reads or changes what holds for the process."""
    owner = getattr(builtin, "__self__", None)
    return owner is torch._C and builtin.__name__ not in _CONSTANT_FUNCTIONS


def is_torchs(function: Any) -> bool:
    module = getattr(function, "__module__", None) or ""
    owner = getattr(function, "__self__", None)
    return (
        module.startswith("torch")
        or isinstance(owner, (torch.Tensor, nn.Module))
        or (isinstance(owner, type) and owner.__module__.startswith("torch"))
        or (isinstance(owner, types.ModuleType) and owner.__name__.startswith("torch"))
    )
