#include "ops/_quantized/whole.h"

namespace oxytorch {

static constexpr const char* kOp = "dequantize_per_tensor";

static Tensor dequantize_per_tensor(const Tensor& x, double scale, std::int64_t zero_point,
                                    const std::string& dtype) {
  const Number number = check_number(kOp, "x", x);
  if (!is_byte(number)) fail(kOp, "x", "of dtype int8 or uint8", dtype_name(x.dtype_code()));
  const Number wanted = parse_number(kOp, "dtype", dtype);
  if (is_byte(wanted)) fail(kOp, "dtype", "'float32', 'bfloat16' or 'float16'", "'" + dtype + "'");
  check_scale(kOp, {"scale", scale, "zero_point", zero_point}, number);
  return converted(kOp, x, wanted, static_cast<float>(scale), zero_point);
}

OXY_OP(dequantize_per_tensor, "(Tensor x, float scale, int zero_point, str dtype) -> Tensor",
       dequantize_per_tensor)

}  // namespace oxytorch
