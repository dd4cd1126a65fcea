// The call of the kernels for many rows.
#pragma once

#include <vector>

#include "core/check.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch {

inline Tensor scratch(std::int64_t bytes) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  return empty(Extents{&bytes, 1}, byte);
}

inline RowType row_type(DType dtype, bool rounds_to_int8) {
  if (rounds_to_int8) return RowType::int8;
  return dtype == DType::bfloat16 ? RowType::bfloat16 : RowType::float32;
}

// Some neighbouring rows times a weight; rows count from the first of the call's rows.
struct RowsProduct {
  PanelsArgs weight;
  PanelResultArgs result;  // its first row is `first_row`
  std::int64_t first_row;
  std::int64_t row_count;
};

// result = epilogue(rows weight^T + bias) for each product, on torch's threads. Row i of the call
// is row `order[i]` of x, or row i where `order` is null; x may be misaligned. All weights have x's
// width, one format and as many groups.
void run_gemm(const Rows& x, const std::vector<std::int64_t>* order, DType x_dtype, RowType type,
              const std::vector<RowsProduct>& products);

// The same for all rows of x and one weight.
inline void run_gemm(const Rows& x, DType x_dtype, RowType type, const PanelsArgs& weight,
                     const PanelResultArgs& result) {
  run_gemm(x, nullptr, x_dtype, type, {{weight, result, 0, x.count}});
}

}  // namespace oxytorch
