// Checks, allocation and the parallel loop that the normalizations share.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "ops/_norm/args.h"

namespace oxytorch {

struct NormResult {
  Tensor out;
  Tensor total;

  std::vector<Tensor> both() {
    std::vector<Tensor> tensors;
    tensors.push_back(std::move(out));
    tensors.push_back(std::move(total));
    return tensors;
  }
};

// `residual` may be null. Without `with_total` the total is an empty tensor.
inline NormResult norm_entry(const char* op, const Copies<NormArgs>& copies, const Tensor& x,
                             const Tensor* residual, const std::optional<Tensor>& weight,
                             const Tensor* bias, double eps, bool with_total) {
  const DType dtype = check_dtype(op, "x", x);
  check_minimum_dim(op, "x", x, 1);
  NormArgs args{};
  args.dtype = dtype;
  args.weight_dtype = DType::float32;
  args.eps = static_cast<float>(eps);
  Tensor weight_copy, bias_copy;
  if (weight) {
    check_vector(op, "weight", *weight, x.size(-1));
    check_cpu(op, "weight", *weight);
    args.weight_dtype = check_weight_dtype(op, "weight", *weight, dtype);
    args.weight = contiguous_data(*weight, weight_copy);
  }
  if (bias) {
    check_vector(op, "bias", *bias, x.size(-1));
    check_cpu(op, "bias", *bias);
    args.weight_dtype = check_weight_dtype(op, "bias", *bias, dtype);
    if (weight) check_same_dtype(op, "bias", *bias, *weight);
    args.bias = contiguous_data(*bias, bias_copy);
  }
  const Rows rows = rows_of(x);
  args.x = rows.data;
  args.x_stride = rows.stride;
  args.width = rows.width;
  Rows residual_rows{};
  if (residual) {
    check_shape(op, "residual", *residual, x.sizes());
    check_same_dtype(op, "residual", *residual, x);
    check_cpu(op, "residual", *residual);
    residual_rows = rows_of(*residual);
    args.residual = residual_rows.data;
    args.residual_stride = residual_rows.stride;
  }
  NormResult result{empty(x.sizes(), x.dtype_code()), Tensor()};
  args.out = result.out.mutable_data();
  if (with_total) {
    result.total = empty(x.sizes(), x.dtype_code());
    args.total = result.total.mutable_data();
  } else if (residual) {
    const std::int64_t none = 0;
    result.total = empty(&none, 1, x.dtype_code());
  }
  const std::int64_t row_bytes = rows.width * size_of(dtype);
  args.stream = should_stream((with_total ? 2 : 1) * rows.count * row_bytes);
  run(copies, args, rows.count, (2 + (residual != nullptr) + with_total) * row_bytes);
  return result;
}

}  // namespace oxytorch
