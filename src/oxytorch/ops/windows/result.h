// Results of convolutions: bias, epilogue and what it adds.
#pragma once

#include "ops/panels/entry.h"
#include "ops/windows/entry.h"

namespace oxytorch {

// Checks bias and other, and describes the result without its memory.
inline PanelResultArgs describe_result(const char* op, const std::string& epilogue, const Tensor& x,
                                       DType dtype, const Shape& shape,
                                       const std::optional<Tensor>& bias,
                                       const std::optional<Tensor>& other, Images& others,
                                       Tensor& bias_copy) {
  PanelResultArgs result{};
  result.out_dtype = result.bias_dtype = dtype;
  result.epilogue = parse_epilogue(op, epilogue);
  result.out_stride = shape[1];
  if (is_gated(result.epilogue)) fail(op, "epilogue", "without '_mul'", quoted(epilogue));
  if (bias) {
    check_vector(op, "bias", *bias, shape[1]);
    check_cpu(op, "bias", *bias);
    result.bias_dtype = check_weight_dtype(op, "bias", *bias, dtype);
    result.bias = contiguous_data(*bias, bias_copy);
  }
  check_other(op, epilogue, other);
  if (other) {
    check_shape(op, "other", *other, {shape.data(), static_cast<std::int64_t>(shape.size())});
    check_same_dtype(op, "other", *other, x);
    check_cpu(op, "other", *other);
    others = images_of(*other, true);
    result.other = others.tensor().data();
    result.other_stride = pixel_stride(others.tensor());
  }
  return result;
}

}  // namespace oxytorch
