#include "core/check.h"
#include "core/parallel.h"
#include "ops/_template/kernel.h"

namespace oxytorch {

static Tensor scale(const Tensor& x, double factor) {
  const DType dtype = check_dtype("scale", "x", x);
  check_minimum_dim("scale", "x", x, 1);
  const Rows rows = rows_of(x);
  Tensor out = empty(x.sizes(), x.dtype_code());
  const std::int64_t row_bytes = rows.width * size_of(dtype);
  const ScaleArgs args{
      .x = rows.data,
      .out = out.mutable_data(),
      .width = rows.width,
      .x_stride = rows.stride,
      .factor = static_cast<float>(factor),
      .dtype = dtype,
      .stream = should_stream(rows.count * row_bytes),
  };
  run(scale_copies, args, rows.count, 2 * row_bytes);
  return out;
}

OXY_OP(scale, "(Tensor x, float factor=2.0) -> Tensor", scale)

}  // namespace oxytorch
