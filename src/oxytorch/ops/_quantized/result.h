// Operands and results of products of bytes, as entries check and describe them.
#pragma once

#include "ops/_quantized/entry.h"
#include "ops/panels/entry.h"

namespace oxytorch {

inline ByteOperand check_operand(const char* op, const Tensor& x, std::optional<double> scale,
                                 std::int64_t zero_point) {
  check_cpu(op, "x", x);
  const Number number = check_number(op, "x", x);
  check_scale(op, {"x_scale", scale, "x_zero_point", zero_point}, number);
  return {number, static_cast<float>(scale.value_or(1.0)), static_cast<std::int32_t>(zero_point)};
}

struct GivenResult {
  const std::string& epilogue;
  const std::string& out_dtype;
  std::optional<double> scale;
  std::int64_t zero_point;
};

// Where zero is the least byte, what a ReLU takes away does not fit anyway, nor does what is above
// 6 where that is the largest byte.
inline PanelEpilogue without_clamped(const ByteResult& result) {
  const std::int32_t least = result.number == Number::int8 ? -128 : 0;
  if (!is_byte(result.number) || result.zero_point != least) return result.epilogue;
  const bool ends_at_6 = 6.0f * result.inverse_scale > 254.5f;
  if (result.epilogue == PanelEpilogue::relu) return PanelEpilogue::none;
  if (result.epilogue == PanelEpilogue::relu6 && ends_at_6) return PanelEpilogue::none;
  return result.epilogue == PanelEpilogue::add_relu ? PanelEpilogue::add : result.epilogue;
}

// Checks all but `other`, and describes the result without its memory. bias: of `outputs` numbers,
// float32; `copy` owns it where a copy is needed.
inline ByteResult describe_byte_result(const char* op, const GivenResult& given,
                                       const std::optional<Tensor>& bias, std::int64_t outputs,
                                       Tensor& copy) {
  ByteResult result{};
  result.epilogue = parse_epilogue(op, given.epilogue);
  if (is_gated(result.epilogue)) {
    fail(op, "epilogue", "that is not gated", quoted(given.epilogue));
  }
  result.number = parse_number(op, "out_dtype", given.out_dtype);
  check_scale(op, {"out_scale", given.scale, "out_zero_point", given.zero_point}, result.number);
  result.inverse_scale = static_cast<float>(1.0 / given.scale.value_or(1.0));
  result.zero_point = static_cast<std::int32_t>(given.zero_point);
  result.epilogue = without_clamped(result);
  if (bias) {
    check_panel_tensor(op, "bias", *bias, aoti_torch_dtype_float32(), outputs);
    result.bias = static_cast<const float*>(contiguous_data(*bias, copy));
  }
  return result;
}

struct GivenOther {
  std::optional<double> scale;
  std::int64_t zero_point;
};

// Checks what the epilogue adds, of the result's shape, and describes it without its memory.
inline void check_byte_other(const char* op, const std::string& epilogue,
                             const std::optional<Tensor>& other, const GivenOther& given,
                             const Extents& sizes, ByteResult& result) {
  check_other(op, epilogue, other);
  result.other_number = Number::float32;
  if (other) {
    check_shape(op, "other", *other, sizes);
    check_cpu(op, "other", *other);
    result.other_number = check_number(op, "other", *other);
  }
  check_scale(op, {"other_scale", given.scale, "other_zero_point", given.zero_point},
              result.other_number);
  result.other_scale = static_cast<float>(given.scale.value_or(1.0));
  result.other_zero_point = static_cast<std::int32_t>(given.zero_point);
}

}  // namespace oxytorch
