"""Names of `torch.ops.torch_ipex`."""

from __future__ import annotations

from .name import elsewhere, served

_OPERATORS = "oxytorch.compat.operators"
_PACKED = "use oxytorch.optimize(model), which packs layers of their own kind"
_STEPS = "use the class of oxytorch.optim, or oxytorch.optimize(model, optimizer=optimizer)"
_EXPERTS = "use oxytorch.llm.optimize, which fuses experts, or oxytorch.ops.moe"
_WEIGHTS = "use oxytorch.quantize_(model, Int4Weight()) or oxytorch.ops.linear_panels"
_ATTENTION = (
    "use torch.nn.functional.scaled_dot_product_attention, oxytorch.ops.attention or "
    "cached_attention"
)
_GPU = "on a GPU use torch's own operators; oxytorch has kernels for optimizer steps (docs/gpu.md)"
_STATES = "use the model's own code in plain torch"

NAMES = (
    *served(
        "torch_ipex",
        "split_float_bfloat16 cat_bfloat16_float packed_add interaction_forward rmsnorm "
        "add_softmax_ frozen_batch_norm",
        _OPERATORS,
    ),
    *elsewhere(
        "torch_ipex",
        "sgd_fused_step adagrad_fused_step adam_fused_step adamw_fused_step lamb_fused_step "
        "lars_fused_step sync_master_weight_to_bf16 sync_master_weight_to_fp16",
        _STEPS,
    ),
    *elsewhere(
        "torch_ipex",
        "ipex_linear ipex_MKLSGEMM ipex_linear_eltwise linear_eltwise_backward "
        "convolution_forward ipex_lstm tpp_linear tpp_linear_bias tpp_linear_gelu "
        "tpp_linear_gelu_tanh tpp_linear_silu tpp_linear_relu tpp_linear_add tpp_linear_add_add "
        "tpp_linear_mul tpp_fused_gate_up_proj tpp_shmallreduce_add convert_weight_packed "
        "convert_weight_packed_moe_bf16",
        _PACKED,
    ),
    *elsewhere(
        "torch_ipex",
        "ipex_woq_linear woq_linear_gelu woq_linear_new_gelu woq_linear_relu woq_linear_silu "
        "woq_linear_mul woq_linear_add woq_linear_add_add dequantize_nf4",
        _WEIGHTS,
    ),
    *elsewhere(
        "torch_ipex",
        "flash_attention masked_multihead_self_attention prepare_4d_causal_attention_mask "
        "decode_attention decode_attention_opt deepseekv2_mla",
        _ATTENTION,
    ),
    *elsewhere(
        "torch_ipex",
        "deepseek_moe deepseek_moe_tpp deepseek_moe_mkl deepseek_moe_woq deepseek_moegate "
        "mixtral_moe mixtral_moe_tpp mixtral_moe_woq moe_gate_bmm_forward fused_experts "
        "fused_experts_with_shared grouped_topk",
        _EXPERTS,
    ),
    *elsewhere(
        "torch_ipex",
        "rotary_position_embedding rotary_position_embedding_deepseek "
        "rotary_position_embedding_deepseek_v2",
        "use oxytorch.ops.rotary_embedding(x, cos, sin)",
    ),
    *elsewhere(
        "torch_ipex", "add_rmsnorm add_layernorm",
        "use oxytorch.ops.add_rms_norm and add_layer_norm",
    ),
    *elsewhere(
        "torch_ipex",
        "punica_bgmv_shrink punica_bgmv_expand punica_bgmv_expand_slice punica_sgmv_shrink "
        "punica_sgmv_expand punica_sgmv_expand_slice",
        "merge adapters, or wrap them before oxytorch.llm.optimize (docs/llm.md)",
    ),
    *elsewhere(
        "torch_ipex",
        "selective_scan_fn selective_state_update causal_conv1d_fn causal_conv1d_update "
        "rnnt_embedding rnnt_update_batch",
        _STATES,
    ),
    *elsewhere(
        "torch_ipex",
        "convert_e4m3_to_bf16 convert_e4m3_to_fp16 convert_e4m3_to_fp32 convert_e5m2_to_fp16",
        "use tensor.view(torch.float8_e4m3fn).to(dtype)",
    ),
    *elsewhere(
        "torch_ipex",
        "ROIAlign_forward ROIAlign_backward nms batch_score_nms rpn_nms box_head_nms "
        "parallel_scale_back_batch roi_align",
        "use torchvision.ops.roi_align and torchvision.ops.nms",
    ),
    *elsewhere(
        "torch_ipex",
        "adagrad_fused_step_with_sparse_grad ema_fused_step fused_clip_grad_norm "
        "fused_resource_apply_momentum",
        _STEPS,
    ),
    *elsewhere(
        "torch_ipex",
        "add_layer_norm add_add_layer_norm add_rms_norm add_add_rms_norm fast_layer_norm "
        "fast_rms_norm rms_norm_impl batch_norm add_softmax add_view add_view_softmax "
        "rotary_embedding rotary_embedding_batched apply_rotary_embedding "
        "apply_rotary_embedding_half apply_rotary_embedding_half_qk apply_rotary_embedding_two "
        "apply_rotary_embedding_two_qk ds_rotary_embedding_qk xetla_sdp_forward "
        "xetla_sdp_backward xetla_sdp_dropout xetla_fsdp_forward_atten_mask_alibi_strided "
        "xetla_fsdp_index_forward xetla_paged_attention_v1 xetla_paged_attention_v2 "
        "paged_attention chunked_prefill varlen_fwd fmha_esimd reshape_and_cache "
        "reshape_and_cache_flash copy_blocks swap_blocks beam_search_topk beam_search_finalize "
        "update_beam_indices_for_cache update_native_beam_indices_for_cache "
        "update_output_indices update_output_sequence mm_ mm_common mm_bias mm_resadd "
        "mm_resadd_resadd mm_bias_resadd mm_bias_resadd_resadd mm_resmul mm_silu mm_qkv "
        "mm_qkv_group_out matmul_relu matmul_gelu matmul_bias_out mm_int4 mm_bias_int4 "
        "mm_add_int4 mm_bias_add_int4 mm_bias_gelu_int4 mm_silu_int4 mm_silu_mul_int4 "
        "mm_bias_silu_mul_int4 mm_resmul_int4 mm_bias_resadd_resadd_int4 mm_qkv_int4 "
        "mm_qkv_out_int4 mlp_silu_mul_int4 mlp_bias_silu_mul_int4 mm_low_bits woq_linear "
        "int4x8_dequantize dequantize_4bit mm_w4a8 mm_bias_w4a8 mm_add_w4a8 mm_bias_add_w4a8 "
        "mm_silu_mul_w4a8 mm_bias_silu_mul_w4a8 dynamic_per_tensor_quant "
        "dynamic_per_token_quant cast_to_fp8 cast_to_fp8_hybrid cast_from_fp8 fp8_gemm "
        "fp8_gemm_backward fp8_gemm_w8a16 static_scaled_fp8_quant dynamic_scaled_fp8_quant "
        "topk_softmax moe_scatter moe_gather moe_sum fused_moe_gemm bgmv_shrink "
        "bgmv_expand_with_slice sgmv_shrink sgmv_expand_with_slice silu_mul gelu_mul "
        "silu_and_mul gelu_and_mul gelu_quick mul_add dcn_v2_forward "
        "deform_interpolation_forward fold_weight fold_bias",
        _GPU,
    ),
)  # fmt: skip
