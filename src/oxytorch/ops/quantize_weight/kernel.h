// Codes of weights: each group of a row gets a scale, a zero point and a code per element.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are rows. Groups of `group_size` elements follow each other in a row and between rows.
struct QuantizeWeightArgs {
  const void* weight;
  std::uint8_t* codes;
  float* scales;
  std::uint8_t* zero_points;
  std::int64_t width;
  std::int64_t group_size;
  std::int64_t weight_stride;  // elements between rows
  const float* table;          // 16 values in rising order that codes stand for; null: none
  float largest;               // value of a code of a table or of floats
  float middle;                // the symmetric zero point
  float last;                  // the largest code
  DType dtype;
  bool symmetric;
  bool search;      // for the scale that errs least
  bool has_floats;  // codes are the bits of E4M3 numbers
};

}  // namespace oxytorch

OXY_KERNEL(quantize_weight, QuantizeWeightArgs)
