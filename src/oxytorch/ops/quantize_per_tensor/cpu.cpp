#include "ops/_quantized/whole.h"

namespace oxytorch {

static constexpr const char* kOp = "quantize_per_tensor";

static Tensor quantize_per_tensor(const Tensor& x, double scale, std::int64_t zero_point,
                                  const std::string& dtype) {
  check_dtype(kOp, "x", x);
  const Number number = parse_number(kOp, "dtype", dtype);
  if (!is_byte(number)) fail(kOp, "dtype", "'int8' or 'uint8'", "'" + dtype + "'");
  check_scale(kOp, {"scale", scale, "zero_point", zero_point}, number);
  return converted(kOp, x, number, static_cast<float>(1.0 / scale), zero_point);
}

OXY_OP(quantize_per_tensor, "(Tensor x, float scale, int zero_point, str dtype) -> Tensor",
       quantize_per_tensor)

}  // namespace oxytorch
