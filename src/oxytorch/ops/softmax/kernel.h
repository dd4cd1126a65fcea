#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

enum class MaskKind : std::int32_t { none, additive, keep };

// Items are rows; rows of `out` are dense.
struct SoftmaxArgs {
  static constexpr int kMaxDim = 8;

  const void* x;
  const void* mask;
  void* out;
  std::int64_t width;
  std::int64_t x_stride;  // elements between rows
  // Where a row's mask lies: sizes and mask strides of the dimensions before the last.
  int row_dim;
  std::int64_t row_sizes[kMaxDim];
  std::int64_t mask_strides[kMaxDim];
  bool mask_is_scalar;  // one mask value for a whole row
  float scale;
  DType dtype;
  DType mask_dtype;
  MaskKind mask_kind;
  bool stream;
};

}  // namespace oxytorch

OXY_KERNEL(softmax, softmax, SoftmaxArgs)
