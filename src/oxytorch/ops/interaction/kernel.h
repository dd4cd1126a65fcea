#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// One row per sample: elements between rows.
struct InteractionInput {
  const void* data;
  std::int64_t stride;
};

// Items are samples. Rows of `out` are dense: `dim` elements of inputs[0], then the dot products of
// input i with every earlier input, i = 1, 2, ...
struct InteractionArgs {
  static constexpr std::int64_t kMaxInputs = 1024;

  const InteractionInput* inputs;  // the dense features, then the sparse ones
  std::int64_t input_count;
  std::int64_t dim;
  void* out;
  DType dtype;
};

}  // namespace oxytorch

OXY_KERNEL(interaction, interaction, InteractionArgs)
