// The sum of squares of many tensors. Items are blocks of kNormBlock elements, numbered over all
// tensors of the call.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

inline constexpr std::int64_t kNormBlock = 4096;

struct NormTensor {
  const void* data;
  DType dtype;
  std::int64_t count;
  std::int64_t first_item;
};

struct GlobalNormArgs {
  const NormTensor* tensors;
  std::int64_t tensor_count;
  double* sums;  // one per item
};

}  // namespace oxytorch

OXY_KERNEL(global_norm, global_norm, GlobalNormArgs)
