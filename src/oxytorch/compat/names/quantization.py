"""Names of `quantization`."""

from __future__ import annotations

from .name import elsewhere, served

_INTEGERS, _CONFIGS = "oxytorch.compat.integers", "oxytorch.compat.qconfigs"
_FLOAT8 = (
    "use oxytorch.quantize_(model, Float8Weight()) for inference; there is no training in float8"
)

NAMES = (
    *served(
        "quantization", "prepare", _INTEGERS,
        "static: `oxytorch.quantization.prepare`, all layers in integers; `inplace=True` only for "
        "dynamic and weight-only quantization",
    ),
    *served(
        "quantization", "convert", _INTEGERS,
        "call the result itself: `torch.jit.trace` of it records floating-point code",
    ),
    *served(
        "quantization", "autotune", _INTEGERS, "by oxytorch's own search; `op_type_dict` is refused"
    ),
    *served(
        "quantization",
        "default_static_qconfig default_static_qconfig_mapping default_dynamic_qconfig "
        "default_dynamic_qconfig_mapping",
        _CONFIGS, "of `torch.ao.quantization`",
    ),
    *served(
        "quantization", "get_smooth_quant_qconfig_mapping", _CONFIGS,
        "`alpha` is searched for each group of layers",
    ),
    *served(
        "quantization", "get_weight_only_quant_qconfig_mapping", _CONFIGS,
        "groups of 32, 64, 128 or 256; `lowp_mode` INT8 with INT4 and INT8 weights",
    ),
    *served(
        "quantization", "WoqWeightDtype WoqLowpMode WoqActQuantMode WoqWeightQScheme", _CONFIGS
    ),
    *elsewhere(
        "quantization", "gptq",
        "use oxytorch.quantize_(model, Int4Weight(), calibration=batches)",
    ),
    *elsewhere(
        "quantization", "WeightOnlyQuantizedLinear QConfigWoq",
        "use oxytorch.quantize_(model, Int8Weight()) or another configuration",
    ),
    *elsewhere(
        "quantization",
        "fp8_autocast prepare_fp8 convert_fp8_model DelayedScaling Format",
        _FLOAT8,
    ),
    *elsewhere(
        "quantization.fp8",
        "fp8_autocast prepare_fp8 convert_fp8_model DelayedScaling Format FP8Linear",
        _FLOAT8,
    ),
)  # fmt: skip
