#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are rows of `head_dim` elements, in the order batch, head, position or, where that is the
// order in memory, batch, position, head. `out` is dense in the first order.
struct RotaryEmbeddingArgs {
  const void* x;
  const void* cos;
  const void* sin;
  void* out;
  std::int64_t heads;
  std::int64_t positions;
  std::int64_t head_dim;
  std::int64_t rotary_dim;
  std::int64_t x_strides[3];    // batch, head, position
  std::int64_t cos_strides[2];  // batch, position
  std::int64_t sin_strides[2];
  bool heads_innermost;
  bool interleaved;
  DType dtype;
  DType angle_dtype;  // of cos and sin
  bool stream;
};

}  // namespace oxytorch

OXY_KERNEL(rotary_embedding, rotary_embedding, RotaryEmbeddingArgs)
