"""What a file's program may call: lists for check.py, and for a header that the build writes.

Imports nothing, so that the build can read it without torch.
"""

from __future__ import annotations

TORCH = "aten"
NAMESPACES = (TORCH, "oxytorch")
IN_PLACE = (
    "abs_", "exp_", "gelu_", "hardsigmoid_", "hardswish_", "log_", "mish_", "relu_", "relu6_",
    "round_", "sigmoid_", "silu_", "sqrt_", "square_", "tanh_",
)  # fmt: skip
"""Activations that write to their first argument; the pass `in_place` makes no others."""
OTHER_PARTS = (
    "sparse", "mkldnn", "quantiz", "fake_quant", "nested", "jagged", "cudnn", "miopen", "mps",
    "cuda", "fbgemm", "pin_memory", "resize", "csr", "csc", "coo", "bsr", "bsc", "padded_tensor",
)  # fmt: skip
"""Parts of names of torch's operators that make tensors of other layouts or devices."""
OTHER_BEGINS = ("values", "indices", "q_per", "int_repr")
OTHER_NAMES = ("set", "data")
TRUSTING = (
    "ctc_loss", "ctc_loss.IntList", "ctc_loss.Tensor", "gru.data", "linalg_ldl_solve", "lstm.data",
    "lu_unpack", "rnn_relu.data", "rnn_tanh.data",
)  # fmt: skip
"""Operators with which altered arguments end the process. Those of models that are exported are
checked at each call instead (trusted.h)."""
TRUSTING_ENDS = ("_backward",)
"""Ends of names of further ones."""
PRIVATE = (
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "_aminmax", "_cdist_forward", "_conj", "_conj_physical",
    "_convolution", "_convolution_mode", "_embedding_bag", "_embedding_bag_forward_only",
    "_euclidean_dist", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_fused_rms_norm", "_grouped_mm",
    "_int_mm", "_is_all_true", "_is_any_true", "_linalg_det", "_linalg_eigh",
    "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "_log_softmax", "_logcumsumexp",
    "_masked_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_neg_view", "_pad_circular", "_pad_enum", "_pdist_forward", "_prelu_kernel",
    "_reshape_alias", "_safe_softmax", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_flash_attention_for_cpu", "_shape_as_tensor", "_softmax",
    "_to_copy", "_trilinear", "_unsafe_index", "_unsafe_view", "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "_weight_norm", "_weight_norm_interface",
)  # fmt: skip
"""Operators with an underscore into which models are exported."""
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "complex64", "bool", "uint8", "int8", "int16",
    "int32", "int64",
)  # fmt: skip
FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
RESAMPLED = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip
"""Operators that a step `resample` stands for; all but those to the nearest may align corners."""
