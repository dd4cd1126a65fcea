"""Keywords of the predecessor (Intel Extension for PyTorch), and what they are called here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FOLDS = "leave it out: the pass 'fold' runs by default; passes=[...] chooses passes"

OPTIMIZE = {
    "level": "leave it out, or choose passes from oxytorch.optimize.PASSES with passes=[...]",
    "conv_bn_folding": _FOLDS,
    "linear_bn_folding": _FOLDS,
    "weights_prepack": "leave it out: the pass 'pack' runs by default; passes=[...] chooses passes",
    "replace_dropout_with_identity": "leave it out: the pass 'dropout' runs by default",
    "optimize_lstm": "leave it out: the pass 'lstm' runs by default",
    "split_master_weight_for_bf16": (
        "use optimizer=... with dtype=torch.bfloat16, which always splits weights"
    ),
    "fuse_update_step": "use optimizer=..., whose step is always fused",
    "auto_kernel_selection": "leave it out: kernels are chosen by timing",
    "graph_mode": "use graph=True with sample_input=...",
    "concat_linear": "use graph=True, which joins layers that share an input",
}
"""Of `optimize`."""

OF_ANOTHER = {
    "quantization_config": "use oxytorch.llm.optimize(model, weights='int8'), or oxytorch.quantize",
    "low_precision_checkpoint": "use model = oxytorch.load_quantized(directory) first",
    "deployment_mode": "leave it out; oxytorch.llm.optimize(model) is for language models",
}
"""Of the predecessor's function for language models, where they are given to `optimize`."""

LLM_OPTIMIZE = {
    "optimizer": "leave it out: to train use oxytorch.optimize(model, optimizer=optimizer)",
    "device": "leave it out: language models run on the CPU",
    "quantization_config": "use weights='int8', 'int4', 'nf4', or a configuration of "
    "oxytorch.quantization",
    "qconfig_summary_file": "use weights='int8' and activation_dtype='int8', which need no file",
    "low_precision_checkpoint": "use model = oxytorch.load_quantized(directory) first",
    "sample_inputs": "leave it out: nothing is traced",
    "deployment_mode": "leave it out: nothing is traced",
    "cache_weight_for_large_batch": "leave it out: one packed weight serves all batch sizes",
}
"""Of `llm.optimize`."""

PREPARE = {
    "configure": "use config=Int8StaticActivationInt8Weight(), or None",
    "qconfig_mapping": "use config=Int8StaticActivationInt8Weight(), or None",
    "inplace": "leave it out: prepare returns a copy, which is to be called",
    "bn_folding": "leave it out: batch normalizations are folded",
    "example_kwarg_inputs": "use example_inputs={...}, a mapping of keyword arguments",
}
"""Of `quantization.prepare`."""

QUANTIZE = {
    "example_inputs": "use calibration_data=[...], of which the first is the example",
    "qconfig_mapping": "use config=Int8StaticActivationInt8Weight(), or None",
}
"""Of `quantize`."""

CONVERT = {"inplace": "leave it out: convert returns a copy"}
"""Of `quantization.convert`."""

AUTOTUNE = {
    "calib_dataloader": "use calibration_data=..., inputs without labels",
    "calib_func": "leave it out: calibration_data is run",
    "eval_func": "use evaluate=..., a function from a model to a number",
    "op_type_dict": "use config=Int8StaticActivationInt8Weight(smooth=True)",
    "sampling_sizes": "use as much calibration_data as is to be run",
    "accuracy_criterion": "use max_loss=0.01, with absolute=True for an absolute one",
    "tuning_time": "use most_trials=...",
}
"""Of `quantization.autotune`."""


def leads_on(caller: str, ways: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Decorates a public function: for a keyword of the predecessor the TypeError says what to do,
    for another that the function does not have which one is like it, and for too many positional
    arguments which ones are given by name.

    caller: the function, with which the text begins.
    ways: what to do, by keyword.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            foreign = next((name for name in kwargs if name in ways), None)
            if foreign is not None:
                raise TypeError(
                    f"{caller}: {foreign} is an argument of intel_extension_for_pytorch; "
                    f"{ways[foreign]} (docs/migrate.md)"
                )
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except TypeError as error:
                why = _misfit(function, args, kwargs, error)
                raise TypeError(f"{caller}: {why}") from None
            return function(*args, **kwargs)

        return cast(_Function, run)

    return decorate


def _misfit(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: TypeError
) -> str:
    """What is wrong with a call that Python refused, and what would be right."""
    parameters = inspect.signature(function).parameters
    unknown = next((name for name in kwargs if name not in parameters), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, parameters, n=1)
        return f"no argument is called {unknown}; " + (
            f"did you mean {near[0]}?" if near else f"there are {', '.join(parameters)}"
        )
    named = [p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    most = len(parameters) - len(named)
    if named and len(args) > most:
        return (
            f"expected at most {most} arguments without a name, got {len(args)}; give the others "
            f"by name: {', '.join(f'{name}=...' for name in named)}"
        )
    return str(error)
