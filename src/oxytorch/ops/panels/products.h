// Products of rows with weights in panels, for the entries of ops.
#pragma once

#include <span>
#include <vector>

#include "core/check.h"
#include "ops/panels/args.h"

namespace oxytorch {

// Some neighbouring rows times a weight; rows count from the first of the call's rows.
struct RowsProduct {
  PanelsArgs weight;
  PanelResultArgs result;  // its first row is `first_row`
  std::int64_t first_row;
  std::int64_t row_count;
};

// result = epilogue(rows weight^T + bias) for each product, on torch's threads. Row i of the call
// is row `order[i]` of x, or row i where `order` is null; x may be misaligned. `rounds_to_int8`: x
// to 255 steps a row; for codecs with integers. All weights have x's width, one codec and as many
// groups. There is at least one product, and a row.
void multiply_rows(const Rows& x, const std::vector<std::int64_t>* order, DType x_dtype,
                   bool rounds_to_int8, std::span<const RowsProduct> products);

inline Tensor scratch(std::int64_t bytes) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  return empty(Extents{&bytes, 1}, byte);
}

}  // namespace oxytorch
