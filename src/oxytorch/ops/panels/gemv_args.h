// Products of few rows with a weight in panels: what the entry tells the two kernels.
//
// First `stage_gemv` writes x as it is multiplied; what that is depends on the level.
// Then `gemv` reads each panel once.
#pragma once

#include "ops/panels/args.h"

namespace oxytorch {

// x as it is multiplied, in blocks of in_features: a group of the weight, a part of one, or all.
struct StagedRows {
  void* values;         // [rows, depth], room for float32
  float* scales;        // [rows, blocks]: of integers
  std::int32_t* sums;   // [rows, blocks]: of integers
  std::int64_t blocks;  // at least as many as there are
};

// Items of `stage_gemv` are rows. Items of `gemv` are panels, or with a gated
// epilogue pairs of a gate's and an up's panel: 16 results each.
struct GemvArgs {
  const void* x;          // [rows, in_features] of dtype
  std::int64_t x_stride;  // elements between rows
  std::int64_t rows;
  std::int64_t in_features;
  std::int64_t depth;  // in_features, padded
  DType dtype;
  bool rounds_to_int8;  // x to 255 steps a row: rint(127 x / largest magnitude)
  StagedRows staged;
  PanelsArgs weight;
  PanelResultArgs result;
};

// Several products in one call; items are those of all, one product after the other. `ends[i]` is
// the number of items up to the end of product i.
struct GemvOfEachArgs {
  const GemvArgs* products;
  const std::int64_t* ends;
};

}  // namespace oxytorch
