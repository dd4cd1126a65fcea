"""The predecessor's `optimize` and what stands beside it at the top of its package."""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer

from .. import __version__, isa, math_mode, undo
from .. import optimize as _optimize
from .. import verbose as _verbose
from ..optimize.passes import DEFAULT
from ..rewriting.changes import log_of
from . import torchscript
from .autocast import compute_in_own_dtype
from .errors import not_served
from .first_call import optimize_at_first_call
from .namespace import API

_LEVELS = {"O0": False, "O1": True}
_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
_KNOBS = {
    "conv_bn_folding": "fold",
    "linear_bn_folding": "fold",
    "weights_prepack": "pack",
    "replace_dropout_with_identity": "dropout",
    "optimize_lstm": "lstm",
}
"""Arguments for inference, and the pass that each of them switches."""


def optimize(
    model: Any,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | None = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    weights_prepack: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    optimize_lstm: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_kernel_selection: bool | None = None,
    sample_input: Any = None,
    graph_mode: bool | None = None,
    concat_linear: bool | None = None,
) -> Any:
    """Return `oxytorch.optimize(model)`, or the pair (model, optimizer) where one is given.

    model: in training mode with an optimizer, in evaluation mode without. A `ScriptModule` is
        returned as it is.
    dtype: None, torch.float32 (both keep dtypes), torch.bfloat16 or torch.float16. The result
        computes in it, within `torch.autocast` too.
    level: "O1", or "O0": no pass but the conversion to `dtype`.
    conv_bn_folding, linear_bn_folding, weights_prepack, replace_dropout_with_identity,
        optimize_lstm: switch a pass; None takes the level's value.
    fuse_update_step: False with dtype=None leaves the optimizer as it is.
    split_master_weight_for_bf16, auto_kernel_selection, concat_linear: change nothing in results;
        oxytorch splits weights, and chooses kernels by timing.
    sample_input: a tensor, or a tuple of positional arguments.
    graph_mode: run the model as one program, recorded on `sample_input`, or at the first call.
    """
    if level not in _LEVELS:
        raise ValueError(f"optimize: expected level 'O0' or 'O1', got {level!r}")
    wanted = _dtype(dtype)
    if isinstance(model, torch.jit.ScriptModule):
        return model if optimizer is None else (model, optimizer)
    if optimizer is not None:
        is_fused = _LEVELS[level] if fuse_update_step is None else fuse_update_step
        return _for_training(model, optimizer, wanted, inplace, is_fused)
    given = {
        "conv_bn_folding": conv_bn_folding,
        "linear_bn_folding": linear_bn_folding,
        "weights_prepack": weights_prepack,
        "replace_dropout_with_identity": replace_dropout_with_identity,
        "optimize_lstm": optimize_lstm,
    }
    passes = passes_of(level, given)
    return _for_inference(model, wanted, sample_input, bool(graph_mode), inplace, passes)


def _dtype(dtype: torch.dtype | None) -> torch.dtype | None:
    """What `oxytorch.optimize` takes for one of the predecessor's."""
    if dtype not in _DTYPES:
        raise ValueError(f"optimize: expected dtype to be one of {_DTYPES}, got {dtype!r}")
    return None if dtype == torch.float32 else dtype


def _for_inference(
    model: Any,
    dtype: torch.dtype | None,
    sample: Any,
    graph: bool,
    inplace: bool,
    passes: tuple[str, ...] | None,
) -> Any:
    if log_of(model) is not None:  # for training, most often; the predecessor took such a model
        model = undo(model if inplace else copy.deepcopy(model))
        inplace = True
    if graph and sample is None:
        result = optimize_at_first_call(model, dtype, passes, inplace)
    else:
        if sample is not None and not isinstance(sample, tuple):
            sample = (sample,)
        result = _optimize(
            model, dtype=dtype, sample_input=sample, graph=graph, inplace=inplace, passes=passes
        )
    return compute_in_own_dtype(result, dtype)


def _for_training(
    model: Any, optimizer: Optimizer, dtype: torch.dtype | None, inplace: bool, is_fused: bool
) -> Any:
    if not model.training:
        raise ValueError(
            "optimize: expected a model in training mode with an optimizer; call "
            "model.train(), or leave the optimizer out for inference"
        )
    if dtype is None and not is_fused:
        return model, optimizer
    return _optimize(model, optimizer=optimizer, dtype=dtype, inplace=inplace)


def passes_of(level: str, given: dict[str, bool | None]) -> tuple[str, ...] | None:
    """The passes that a level and the knobs choose; None: the default ones."""
    is_on = _LEVELS[level]
    off = {_KNOBS[knob] for knob, value in given.items() if not (is_on if value is None else value)}
    if not off:
        return None
    kept = DEFAULT if is_on else tuple({"cast", *_KNOBS.values()})
    return tuple(name for name in DEFAULT if name in kept and name not in off)


class FP32MathMode(enum.IntEnum):
    """How products of float32 matrices are computed."""

    FP32 = 0
    TF32 = 1
    BF32 = 2


_MODES = {FP32MathMode.FP32: "fp32", FP32MathMode.BF32: "bf16"}


def set_fp32_math_mode(mode: FP32MathMode = FP32MathMode.FP32, device: str = "cpu") -> None:
    """`oxytorch.set_fp32_math_mode`, for the whole process."""
    _check_cpu("set_fp32_math_mode", device)
    if mode not in _MODES:
        raise not_served(f"{mode!r} on the CPU", "use FP32MathMode.BF32 or FP32MathMode.FP32")
    math_mode.set_fp32_math_mode(_MODES[FP32MathMode(mode)])


def get_fp32_math_mode(device: str = "cpu") -> FP32MathMode:
    """The mode that `set_fp32_math_mode` has set."""
    _check_cpu("get_fp32_math_mode", device)
    mode = math_mode.get_fp32_math_mode()
    return next(old for old, ours in _MODES.items() if ours == mode)


def _check_cpu(what: str, device: str) -> None:
    if device != "cpu":
        raise not_served(
            f"{what}(device={device!r})", "use torch.set_float32_matmul_precision on a GPU"
        )


class verbose:
    """`with ipex.verbose(ipex.verbose.VERBOSE_ON):` prints the calls within."""

    VERBOSE_OFF: ClassVar[int] = 0
    VERBOSE_ON: ClassVar[int] = 1
    VERBOSE_ON_CREATION: ClassVar[int] = 2

    def __init__(self, level: int) -> None:
        if level not in (0, 1, 2):
            raise ValueError(f"verbose: expected a level 0, 1 or 2, got {level!r}")
        self.level = level
        self._stack = ExitStack()

    def __enter__(self) -> verbose:
        if self.level != self.VERBOSE_OFF:
            self._stack.enter_context(_verbose())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def enable_auto_channels_last() -> None:
    """Nothing to enable: the order that kernels read is chosen by timing."""


def disable_auto_channels_last() -> None:
    """Nothing to disable: `optimize` never reorders weights that others can see."""


def enable_onednn_fusion(enabled: bool) -> None:
    """Whether `torch.jit.freeze` optimizes what was traced of optimized models, after `install`."""
    torchscript.is_enabled = enabled


def set_logging_level(level: int | str) -> None:
    """Sets the level of the logger "oxytorch"."""
    logging.getLogger("oxytorch").setLevel(level)


def version() -> None:
    """Prints versions."""
    print(f"oxytorch {__version__}, in place of intel_extension_for_pytorch {API}")
    print(f"torch {torch.__version__}")


@contextmanager
def OnDevice(
    dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
) -> Iterator[None]:
    """While modules are made on a device and with a dtype."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def GradScaler(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> torch.amp.GradScaler:
    """torch's gradient scaler for the CPU."""
    return torch.amp.GradScaler(
        "cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled
    )


def autocast(
    enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
) -> torch.autocast:
    """torch's autocast for XPU."""
    return torch.autocast("xpu", dtype, enabled, cache_enabled)


def has_fp64_dtype(device: Any = None) -> bool:
    """Whether a GPU computes in float64."""
    return bool(torch.xpu.get_device_properties(device).has_fp64)


def _get_current_isa_level() -> str:
    """The level whose kernels run."""
    return isa.active().upper()


def _get_highest_cpu_support_isa_level() -> str:
    """The highest level that this processor supports."""
    return _highest(level.name for level in isa.levels() if level.supported)


def _get_highest_binary_support_isa_level() -> str:
    """The highest level that was built."""
    return _highest(level.name for level in isa.levels() if level.built)


def _highest(names: Iterator[str]) -> str:
    return [isa.active(), *names][-1].upper()
