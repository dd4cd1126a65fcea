// What the gated activations share: one description of a call.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are rows of `width` elements; the last row is cut off at `numel` elements in all, because a
// dense tensor is split into rows of any convenient width. Rows of `out` are dense.
struct GatedArgs {
  const void* gate;
  const void* up;
  void* out;
  std::int64_t width;
  std::int64_t numel;
  std::int64_t gate_stride;  // elements between rows
  std::int64_t up_stride;
  DType dtype;
  bool tanh_form;  // gelu_mul only
  bool stream;
};

}  // namespace oxytorch
