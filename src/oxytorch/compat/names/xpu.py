"""Names of `xpu`, most of which torch has itself by now."""

from __future__ import annotations

from .name import elsewhere, served

_KERNELS = "leave it out: on a GPU torch's own kernels run, and oxytorch's optimizer steps"
_LOGS = "use TORCH_LOGS, torch.profiler, or oxytorch.verbose() on the CPU"
_TRAINING = "in plain torch, or oxytorch.optim for the step (docs/optim.md)"

NAMES = (
    *served(
        "xpu",
        "is_available device_count current_device set_device device device_of get_device_name "
        "get_device_properties get_device_capability init is_initialized synchronize "
        "Stream stream current_stream set_stream Event get_arch_list is_bf16_supported "
        "get_rng_state get_rng_state_all set_rng_state set_rng_state_all manual_seed "
        "manual_seed_all seed seed_all initial_seed memory_stats_as_nested_dict",
        "torch.xpu", "torch's own",
    ),
    *served(
        "xpu",
        "empty_cache memory_stats memory_snapshot memory_summary memory_allocated "
        "max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats "
        "reset_accumulated_memory_stats mem_get_info",
        "oxytorch.compat.device_memory",
        "of `oxytorch.memory` after `use(\"xpu\")`, else torch's own",
    ),
    *served("xpu", "optimize", "oxytorch.compat.front", "as `optimize`"),
    *served("xpu", "has_fp64_dtype", "oxytorch.compat.front"),
    *served("xpu.amp", "autocast", "oxytorch.compat.front", "`torch.autocast(\"xpu\")`"),
    *elsewhere(
        "xpu", "caching_allocator_alloc caching_allocator_delete from_usm to_usm",
        "use torch.utils.dlpack to share memory",
    ),
    *elsewhere("xpu", "fork_rng", "use torch.random.fork_rng(device_type='xpu')"),
    *elsewhere(
        "xpu",
        "has_onemkl has_2d_block_array has_xmx has_multi_context has_channels_last_1d has_xetla",
        "ask torch.xpu.get_device_properties(device)",
    ),
    *elsewhere(
        "xpu",
        "sync_mode enable_sync_mode disable_sync_mode using_sync_mode",
        "call torch.xpu.synchronize() where you need it",
    ),
    *elsewhere(
        "xpu", "enable_tile_as_device disable_tile_as_device using_tile_as_device",
        "set ZE_FLAT_DEVICE_HIERARCHY=FLAT",
    ),
    *elsewhere(
        "xpu",
        "compute_eng XPUComputeEng onednn_layout enable_onednn_layout disable_onednn_layout "
        "using_onednn_layout is_onednn_layout",
        _KERNELS,
    ),
    *elsewhere(
        "xpu", "to_channels_last_1d is_contiguous_channels_last_1d",
        "use conv2d with a height of 1 and memory_format=torch.channels_last",
    ),
    *elsewhere(
        "xpu", "fp32_math_mode set_fp32_math_mode get_fp32_math_mode",
        "use torch.set_float32_matmul_precision",
    ),
    *elsewhere(
        "xpu", "enable_onednn_deterministic disable_onednn_deterministic",
        "use torch.use_deterministic_algorithms",
    ),
    *elsewhere(
        "xpu",
        "onednn_verbose onemkl_verbose set_log_level get_log_level set_log_output_file_path "
        "set_log_rotate_file_size set_log_split_file_size set_log_component enable_simple_trace "
        "disable_simple_trace using_simple_trace",
        _LOGS,
    ),
    *elsewhere(
        "xpu.overrides", "convert_default_dtype override_tensor_totype",
        "set torch.set_default_dtype(torch.float32), and convert float64 tensors",
    ),
    *elsewhere(
        "xpu.cpp_extension", "DPCPPExtension DpcppBuildExtension load",
        "use SyclExtension and BuildExtension of torch.utils.cpp_extension",
    ),
    *elsewhere("xpu.single_card", "single_card_dist", "use torchrun and DDP, a rank for each tile"),
    *elsewhere("xpu.intrinsic", "EMA", "use torch.optim.swa_utils.AveragedModel"),
    *served("xpu.intrinsic", "clip_grad_norm_", "oxytorch.optim"),
    *elsewhere("xpu.intrinsic", "TransducerLoss", "use torchaudio.functional.rnnt_loss"),
    *elsewhere("xpu.deepspeed", "quantize dequantize", f"run DeepSpeed {_TRAINING}"),
    *elsewhere("xpu.bitsandbytes", "dequantize_4bit", "use bitsandbytes itself, which has XPU"),
)  # fmt: skip
