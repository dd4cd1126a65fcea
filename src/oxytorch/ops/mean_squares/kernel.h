// Sums of squares over the rows and over the columns of a matrix, in one sweep.
#pragma once

#include "core/dispatch.h"
#include "core/dtype.h"

namespace oxytorch {

// Items are strips of at most kStrip rows of one matrix; strips of a batch follow each other.
struct MeanSquaresArgs {
  static constexpr std::int64_t kStrip = 32;

  const void* x;  // [batch, height, width]
  float* rows;    // [batch, height], the means
  float* strips;  // [number of strips, width], the sums of each strip
  std::int64_t height;
  std::int64_t width;
  std::int64_t strips_per_matrix;
  DType dtype;
};

}  // namespace oxytorch

OXY_KERNEL(mean_squares, mean_squares, MeanSquaresArgs)
