// What the normalizations over the last dimension share: one description of a call.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are rows; rows of `out` and `total` are dense.
struct NormArgs {
  const void* x;
  const void* residual;  // null, or added to x first
  const void* weight;    // may be null
  const void* bias;      // may be null
  void* out;
  void* total;  // x + residual, rounded; may be null
  std::int64_t width;
  std::int64_t x_stride;  // elements between rows
  std::int64_t residual_stride;
  float eps;
  DType dtype;
  DType weight_dtype;  // of weight and bias
  bool stream;
};

}  // namespace oxytorch
