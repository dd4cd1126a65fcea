// What the attention ops share in the description of a call.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Strides, in elements, of [batch, heads, length, dim]; that of dim is 1, but for a mask's keys.
struct AttentionStrides {
  std::int64_t batch, head, row, last;
};

enum class AttentionMask : std::int32_t { none, additive, keep };

// A mask, broadcast to [batch, heads, length, keys].
struct MaskView {
  const void* data;
  AttentionStrides strides;
  DType dtype;  // of an additive one
  AttentionMask kind;
};

}  // namespace oxytorch
