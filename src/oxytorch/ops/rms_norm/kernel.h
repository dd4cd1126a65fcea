#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are rows.
struct RmsNormArgs {
  const void* x;
  const void* weight;  // may be null
  void* out;
  std::int64_t width;
  std::int64_t x_stride;  // elements between rows; rows of out are dense
  float eps;
  DType dtype;
  DType weight_dtype;
  bool stream;
};

}  // namespace oxytorch

OXY_KERNEL(rms_norm, RmsNormArgs)
