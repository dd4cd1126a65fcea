#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are tokens: out[token] = the sum over j of weights[token, j] rows[places[token, j]]. Rows
// are dense; j counts to `chosen`.
struct WeightedRowsArgs {
  const float* rows;
  const std::int64_t* places;
  const void* weights;
  void* out;
  std::int64_t width;
  std::int64_t chosen;
  DType weight_dtype;
  DType out_dtype;
};

}  // namespace oxytorch

OXY_KERNEL(moe, add_weighted_rows, WeightedRowsArgs)
