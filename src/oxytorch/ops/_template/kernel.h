#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are rows; rows of `out` are dense.
struct ScaleArgs {
  const void* x;
  void* out;
  std::int64_t width;
  std::int64_t x_stride;  // elements between rows
  float factor;
  DType dtype;
  bool stream;
};

}  // namespace oxytorch

OXY_KERNEL(_template, scale, ScaleArgs)
