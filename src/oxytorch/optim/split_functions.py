"""What functions of torch do with a weight that they are given, by name."""

from __future__ import annotations

from types import FunctionType
from typing import Any

PROPERTY = ("__get__", "__set__", "__delete__")

VIEWS = ("T", "mT", "H", "mH", "real")
"""Properties that are views of the values."""

ASKS = frozenset(
    """
    size stride dim ndimension numel nelement element_size is_contiguous data_ptr dim_order
    storage_offset _typed_storage is_floating_point is_complex is_signed
    is_shared is_pinned is_inference is_set_to is_same_size get_device __len__ __hash__ __repr__
    is_conj is_neg is_coalesced is_distributed _is_view _is_zerotensor
    requires_grad_ detach_ retain_grad register_hook register_post_accumulate_grad_hook backward
    grad
    """.split()  # noqa: SIM905
)
"""What asks for the parameter itself and not for its values; `grad` is torch.autograd.grad."""

STORAGES = frozenset({"storage", "untyped_storage"})

_IN_PLACE = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
    """.split()  # noqa: SIM905
)
"""Functions that write to their first argument, beside those whose names end with `_`."""

FUSED_STEPS = frozenset({"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"})
"""Torch's own fused steps, which write to their first argument and to all after the second."""

UNCOUNTED = FUSED_STEPS | {"apply_", "map_", "map2_"}
"""Those that write without raising the version."""

_RESHAPED = "its parts keep their shape and memory; set p.data, as in p.data = p.data.t()"

REFUSED = {
    **dict.fromkeys(
        """
        t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_ rename_
        resize_ resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_
        """.split(),  # noqa: SIM905
        _RESHAPED,
    ),
    **dict.fromkeys(("data", "set_"), "what stands for it keeps its memory; set p.data itself"),
    "__dlpack__": "nobody could see that its memory is written; pass p.detach().clone()",
}
"""What cannot be done with a split weight, and what to do instead."""

SAME_DTYPES = frozenset(
    """
    __setitem__ lerp lerp_ _foreach_lerp _foreach_lerp_ addmm_ addmv_ addr_ addbmm_ baddbmm_
    index_add_ index_copy_ index_put_ index_reduce_ scatter_ scatter_add_ scatter_reduce_
    masked_scatter_ put_
    """.split()  # noqa: SIM905
)
"""Those whose operands have to be of one dtype, that of the first."""

PROMOTES = frozenset(
    """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow
    float_power maximum minimum max min fmax fmin atan2 arctan2 hypot copysign addcmul addcdiv lerp
    where cat concat concatenate stack hstack vstack eq ne lt le gt ge
    logaddexp logaddexp2 xlogy kron outer ger dist clamp clip clamp_min clamp_max block_diag
    broadcast_tensors mse_loss l1_loss smooth_l1_loss huber_loss kl_div cosine_similarity
    pairwise_distance gaussian_nll_loss poisson_nll_loss triplet_margin_loss cosine_embedding_loss
    margin_ranking_loss soft_margin_loss binary_cross_entropy_with_logits cross_entropy
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__
    __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    _foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_pow _foreach_maximum
    _foreach_minimum _foreach_addcmul _foreach_addcdiv _foreach_lerp
    """.split()  # noqa: SIM905
)
"""Those in which operands of 16 bits meet float32 in float32."""

ONE_DTYPE = frozenset(
    """
    matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner addmm addmv addr addbmm baddbmm einsum
    tensordot linear bilinear prelu cdist conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d layer_norm group_norm rms_norm scaled_dot_product_attention
    """.split()  # noqa: SIM905
)
"""Those of layers that take floating-point tensors of one dtype only."""

LOOKS_UP = frozenset({"embedding", "embedding_bag"})
"""Those of layers that are given no other floating-point tensor; `max_norm`, their fourth argument,
has them write to the weight."""

MOVES = frozenset(
    """
    __getitem__ view view_as reshape reshape_as permute transpose t swapaxes swapdims movedim
    moveaxis unsqueeze squeeze expand expand_as broadcast_to flatten unflatten ravel narrow select
    split split_with_sizes tensor_split hsplit vsplit dsplit chunk unbind diagonal adjoint
    contiguous clone repeat tile repeat_interleave flip fliplr flipud roll rot90 index_select gather
    take take_along_dim masked_select tril triu detach
    """.split()  # noqa: SIM905
)
"""Those whose results are elements of their first argument, or zeros."""

BESIDE_FLOAT32 = ONE_DTYPE | {"batch_norm", "instance_norm", "embedding_bag"}
"""Those that take no weight of 16 bits beside float32: statistics, or weights of samples."""

DETACHED = frozenset({"detach", "detach_", "numpy", "__array__", "tolist", "item", "__deepcopy__"})
"""What gives values without gradients."""

ARRAYS = frozenset({"numpy", "__array__"})
"""What gives values to numpy."""


def is_collective(function: Any) -> bool:
    """Whether it is one of torch.distributed, which write without raising the version."""
    return (
        type(function) is FunctionType
        and function.__module__ == "torch.distributed.distributed_c10d"
    )


def asks_for_node(name: str, args: Any) -> bool:
    """Whether it is torch's idiom to find the node of the graph that accumulates gradients."""
    return name in ("view_as", "expand_as") and len(args) == 2 and args[0] is args[1]


def writes_first(name: str) -> bool:
    """Whether a function of that name writes to its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
