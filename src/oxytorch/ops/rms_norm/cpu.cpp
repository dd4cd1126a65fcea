#include "core/check.h"
#include "core/parallel.h"
#include "ops/rms_norm/kernel.h"

namespace oxytorch {
namespace {

constexpr const char* kName = "rms_norm";

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps) {
  const DType dtype = check_dtype(kName, "x", x);
  check_minimum_dim(kName, "x", x, 1);
  DType weight_dtype = dtype;
  Tensor weight_copy;
  const void* weight_data = nullptr;
  if (weight) {
    check_vector(kName, "weight", *weight, x.size(-1));
    check_cpu(kName, "weight", *weight);
    weight_dtype = check_weight_dtype(kName, "weight", *weight, dtype);
    weight_data = contiguous_data(*weight, weight_copy);
  }
  const Rows rows = rows_of(x);
  Tensor out = empty(x.sizes(), x.dtype_code());
  const std::int64_t row_bytes = rows.width * size_of(dtype);
  const RmsNormArgs args{
      .x = rows.data,
      .weight = weight_data,
      .out = out.mutable_data(),
      .width = rows.width,
      .x_stride = rows.stride,
      .eps = static_cast<float>(eps),
      .dtype = dtype,
      .weight_dtype = weight_dtype,
      .stream = should_stream(rows.count * row_bytes),
  };
  run(rms_norm_copies, args, rows.count, 2 * row_bytes);
  return out;
}

}  // namespace
}  // namespace oxytorch

using namespace oxytorch;

OXY_OP(rms_norm, "(Tensor x, Tensor? weight=None, float eps=1e-06) -> Tensor", rms_norm)
