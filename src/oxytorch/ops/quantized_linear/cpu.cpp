#include "ops/_quantized/result.h"

namespace oxytorch {

static constexpr const char* kOp = "quantized_linear";

static Tensor quantized_linear(const Tensor& x, std::optional<double> x_scale,
                               std::int64_t x_zero_point, const Tensor& panels,
                               const Tensor& channel_scales, const Tensor& channel_sums,
                               std::int64_t out_features, const std::optional<Tensor>& bias,
                               const std::optional<Tensor>& other,
                               std::optional<double> other_scale, std::int64_t other_zero_point,
                               const std::string& epilogue, const std::string& out_dtype,
                               std::optional<double> out_scale, std::int64_t out_zero_point) {
  const ByteOperand operand = check_operand(kOp, x, x_scale, x_zero_point);
  const Shape shape = linear_shape(kOp, x, out_features);
  const std::int64_t in_features = x.size(-1);
  const Extents sizes{shape.data(), static_cast<std::int64_t>(shape.size())};
  BytePanelCopies copies;
  const BytePanels weight = describe_byte_panels(kOp, panels, channel_scales, channel_sums,
                                                 in_features, out_features, copies);
  ByteResult result = describe_byte_result(kOp, {epilogue, out_dtype, out_scale, out_zero_point},
                                           bias, out_features, copies.bias);
  check_byte_other(kOp, epilogue, other, {other_scale, other_zero_point}, sizes, result);
  Rows other_rows{};
  if (other) {
    other_rows = rows_of(*other);
    result.other = other_rows.data;
    result.other_stride = other_rows.stride;
  }
  Tensor out = empty(sizes, dtype_code_of(result.number));
  result.out = out.mutable_data();
  result.out_stride = out_features;
  const Rows rows = rows_of(x);
  if (rows.count > 0) multiply_rows_of_bytes(rows, operand, weight, result);
  return out;
}

OXY_OP(quantized_linear,
       "(Tensor x, float? x_scale, int x_zero_point, Tensor panels, Tensor channel_scales, "
       "Tensor channel_sums, int out_features, Tensor? bias=None, Tensor? other=None, "
       "float? other_scale=None, int other_zero_point=0, str epilogue=\"none\", "
       "str out_dtype=\"float32\", float? out_scale=None, int out_zero_point=0) -> Tensor",
       quantized_linear)

}  // namespace oxytorch
