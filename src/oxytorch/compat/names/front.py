"""Names of the package itself, of its modules for training, and of layers."""

from __future__ import annotations

from .name import elsewhere, served

_FRONT, _LAYERS = "oxytorch.compat.front", "oxytorch.compat.layers"
_COMPILE = "use torch.compile(model, backend='oxytorch')"

NAMES = (
    *served("", "optimize", _FRONT, "arguments: [below](#arguments-of-optimize)"),
    *served("", "optimize_transformers", "oxytorch.compat.language", "warns: `llm.optimize`"),
    *served("", "set_fp32_math_mode get_fp32_math_mode FP32MathMode", _FRONT, "on the CPU"),
    *served(
        "", "verbose", _FRONT,
        "`oxytorch.verbose()`: oneDNN's calls and ours, in a table at the end of the block",
    ),
    *served(
        "", "enable_auto_channels_last disable_auto_channels_last", _FRONT,
        "the order that kernels read is chosen by timing; weights of yours keep theirs",
    ),
    *served(
        "", "enable_onednn_fusion", _FRONT,
        "after `install()`: whether `torch.jit.freeze` optimizes what was traced",
    ),
    *served("", "set_logging_level", _FRONT, "of the logger `oxytorch`"),
    *served("", "version", _FRONT, "prints the versions of torch and oxytorch"),
    *served("", "OnDevice", _FRONT),
    *served(
        "", "compile=compile_graph", "oxytorch.program.backend",
        "the compiler function behind `backend=\"ipex\"`",
    ),
    *elsewhere("", "_set_compiler_backend _get_compiler_backend", _COMPILE),
    *elsewhere(
        "", "fast_bert",
        "use oxytorch.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)",
    ),
    *elsewhere(
        "", "cmake_prefix_path",
        "use oxytorch.cmake_prefix_path and find_package(oxytorch) (docs/cpp.md)", True,
    ),
    *elsewhere(
        "fx", "concat_linear",
        "use oxytorch.optimize(model, sample_input=..., graph=True), which joins such layers",
    ),
    *served("jit", "trace", "torch.jit", "torch's own; see [TorchScript](#what-is-different)"),
    *served(
        "distributed",
        "init_process_group destroy_process_group get_rank get_world_size is_initialized barrier "
        "all_reduce all_gather all_gather_into_tensor reduce_scatter_tensor broadcast reduce "
        "gather scatter all_to_all_single",
        "torch.distributed", "torch's own; take the backend gloo in place of ccl",
    ),
    *served("nn", "FrozenBatchNorm2d", _LAYERS),
    *elsewhere(
        "nn", "PowerNorm",
        "its authors' module in plain torch runs as it is, with oxytorch.optimize around it",
    ),
    *served("nn.functional", "interaction", _LAYERS),
    *elsewhere(
        "nn.functional", "embedding_bag",
        "use torch.nn.functional.embedding_bag, or oxytorch.ops.embedding_bag",
    ),
    *served(
        "nn.modules", "MergedEmbeddingBag EmbeddingSpec", _LAYERS,
        "tables of one dimension and dtype, sum or mean",
    ),
    *served("nn.modules", "MergedEmbeddingBagWithCat", _LAYERS, "inference"),
    *elsewhere(
        "nn.modules",
        "MergedEmbeddingBagWithSGD MergedEmbeddingBagWithAdaGrad "
        "DistMergeEmbeddingBagWithAdaGrad",
        "use MergedEmbeddingBag with oxytorch.optim.SGD or Adagrad and release_gradients=True, "
        "which steps within backward",
    ),
    *served("nn.modules", "FrozenBatchNorm2d", _LAYERS),
    *served("nn.modules", "IPEXLinearEltwise", _LAYERS),
    *elsewhere(
        "nn.modules", "WeightOnlyQuantizedLinear",
        "use oxytorch.quantize_(model, Int8Weight()), or oxytorch.load_quantized(directory) for "
        "GPTQ and AWQ",
    ),
    *elsewhere(
        "nn.utils", "_lstm_convert _weight_prepack _parameter_wrapper",
        "these are internals; oxytorch.explain(model) says what was packed", True,
    ),
    *served("optim", "Lamb Lars", "oxytorch.optim"),
    *served("optim._lamb", "Lamb", _LAYERS, "`oxytorch.optim.Lamb`, always fused"),
    *served("optim._lars", "Lars", "oxytorch.optim"),
    *served("optim._lars", "create_optimizer_lars", _LAYERS),
    *elsewhere(
        "optim.xpu", "FusedResourceApplyMomentum",
        "use oxytorch.optim.SGD, which steps by lr times the momentum",
    ),
    *elsewhere(
        "optim._optimizer_utils", "optimizer_fusion IPEX_FUSED_OPTIMIZER_LIST_CPU",
        "use oxytorch.optimize(model, optimizer=optimizer), which fuses the step",
    ),
    *elsewhere(
        "optim", "optimizer_fusion",
        "use oxytorch.optimize(model, optimizer=optimizer), which fuses the step",
    ),
)  # fmt: skip
