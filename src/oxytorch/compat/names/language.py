"""Names of `llm`."""

from __future__ import annotations

from .name import elsewhere, served

_LANGUAGE = "oxytorch.compat.language"
_MODULES = "oxytorch.compat.language_modules"
_GENERATE = "use model.generate, or oxytorch.llm.generate(model, input_ids, max_new_tokens=...)"
_SERVE = "use `oxytorch serve`, or oxytorch.ops.cached_attention over a contiguous cache"
_ADAPTERS = "wrap adapters before oxytorch.llm.optimize, or merge them (docs/llm.md)"
_STATES = "use the model's own layers: oxytorch.llm.optimize packs their linear layers"

NAMES = (
    *served("llm", "optimize", _LANGUAGE, "arguments: [below](#arguments-of-llmoptimize)"),
    *served(
        "llm.modules",
        "LinearSilu LinearSiluMul Linear2SiluMul LinearRelu LinearNewGelu LinearGelu LinearMul "
        "LinearAdd LinearAddAdd RMSNorm FastLayerNorm",
        _MODULES,
    ),
    *served("llm.modules", "VarlenAttention", _MODULES, "without ALiBi, windows and softcap"),
    *elsewhere(
        "llm.modules", "RotaryEmbedding",
        "use llm.functional.rotary_embedding or oxytorch.ops.rotary_embedding(x, cos, sin)",
    ),
    *elsewhere(
        "llm.modules", "GatedMLPMOE LinearMOE",
        "use oxytorch.llm.optimize, which fuses experts, or oxytorch.ops.moe",
    ),
    *elsewhere("llm.modules", "PagedAttention", _SERVE),
    *elsewhere(
        "llm.modules", "IndirectAccessKVCacheAttention",
        "use oxytorch.ops.cached_attention, whose `beams` selects rows, or model.generate of a "
        "model from oxytorch.llm.optimize",
    ),
    *elsewhere("llm.modules", "MambaMixer", _STATES),
    *elsewhere(
        "llm.modules", "IPEXRuntimeCustomOps", "leave it out: oxytorch.ops choose by device"
    ),
    *served(
        "llm.functional",
        "rotary_embedding rms_norm fast_layer_norm add_rms_norm add_layer_norm silu_mul gelu_mul "
        "silu_and_mul gelu_and_mul gelu_quick",
        _MODULES,
    ),
    *served("llm.functional", "varlen_attention", _MODULES, "without ALiBi, windows and softcap"),
    *elsewhere(
        "llm.functional", "indirect_access_kv_cache_attention",
        "use oxytorch.ops.cached_attention, whose `beams` selects rows",
    ),
    *elsewhere(
        "llm.functional", "rotary_embedding_batched varlen_fwd", "use the CPU's of that name, or "
        "plain torch on a GPU",
    ),
    *elsewhere(
        "llm.functional",
        "bgmv_shrink bgmv_expand bgmv_expand_slice sgmv_shrink sgmv_expand sgmv_expand_slice",
        _ADAPTERS,
    ),
    *elsewhere(
        "llm.generation",
        "hf_greedy_search hf_beam_search hf_beam_sample hf_sample hf_assisted_decoding",
        _GENERATE,
    ),
    *elsewhere(
        "llm.utils", "load_low_precision_checkpoint shard_low_precision_checkpoint",
        "use oxytorch.load_quantized(directory), then oxytorch.llm.optimize(model)",
    ),
    *elsewhere(
        "llm.quantization", "IPEXWeightOnlyQuantizedLinear QuantMethod QuantDtype",
        "use oxytorch.quantize_(model, Int4Weight()), or oxytorch.load_quantized(directory)",
    ),
    *elsewhere(
        "llm.quantization", "IPEXFP8ScaledQuant",
        "use oxytorch.quantization.Float8Weight(); activations keep their dtype",
    ),
    *served(
        "transformers.optimize", "optimize=optimize optimize_transformers", _LANGUAGE,
    ),
)  # fmt: skip
