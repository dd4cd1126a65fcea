#include "ops/panels/entry.h"

namespace oxytorch {

static constexpr const char* kOp = "linear_panels";

// Checks bias and other, and describes the result without its memory.
static PanelResultArgs describe_result(const std::string& epilogue, const Tensor& x, DType dtype,
                                       const Extents& sizes, const std::optional<Tensor>& bias,
                                       const std::optional<Tensor>& other, Rows& other_rows,
                                       Tensor& bias_copy) {
  PanelResultArgs result{};
  result.out_dtype = dtype;
  result.bias_dtype = dtype;
  result.epilogue = parse_epilogue(kOp, epilogue);
  result.out_stride = sizes[-1];
  if (bias) {
    check_vector(kOp, "bias", *bias, is_gated(result.epilogue) ? 2 * sizes[-1] : sizes[-1]);
    check_cpu(kOp, "bias", *bias);
    result.bias_dtype = check_weight_dtype(kOp, "bias", *bias, dtype);
    result.bias = contiguous_data(*bias, bias_copy);
  }
  check_other(kOp, epilogue, other);
  if (other) {
    check_shape(kOp, "other", *other, sizes);
    check_same_dtype(kOp, "other", *other, x);
    check_cpu(kOp, "other", *other);
    other_rows = rows_of(*other);
    result.other = other_rows.data;
    result.other_stride = other_rows.stride;
  }
  return result;
}

static Tensor linear_panels(const Tensor& x, const std::string& format_name, const Tensor& panels,
                            const std::optional<Tensor>& channel_scales,
                            const std::optional<Tensor>& group_scales,
                            const std::optional<Tensor>& zero_points, std::int64_t out_features,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                            const std::string& epilogue, const std::string& activation) {
  const PanelFormat& format = parse_format(kOp, "format", format_name);
  const PanelTensors tensors{panels, &channel_scales, &group_scales, &zero_points};
  check_parts(kOp, format, tensors);
  const bool rounds_to_int8 = parse_activation(kOp, activation);
  if (rounds_to_int8 && !format.has_middle) {
    fail(kOp, "activation_dtype", "'none' with format '" + format_name + "'", "'int8'");
  }
  const DType dtype = check_dtype(kOp, "x", x);
  const Shape shape = linear_shape(kOp, x, out_features);
  const std::int64_t in_features = x.size(-1);
  const Extents sizes{shape.data(), static_cast<std::int64_t>(shape.size())};
  PanelCopies copies;
  Rows other_rows{};
  PanelResultArgs result =
      describe_result(epilogue, x, dtype, sizes, bias, other, other_rows, copies.bias);
  const PanelsArgs weight = describe_weight(kOp, format, tensors, in_features, out_features,
                                            is_gated(result.epilogue), copies);
  Tensor out = empty(sizes, x.dtype_code());
  result.out = out.mutable_data();
  const Rows rows = rows_of(x);
  if (rows.count == 0) return out;
  const RowsProduct product{weight, result, 0, rows.count};
  multiply_rows(rows, nullptr, dtype, rounds_to_int8, {&product, 1});
  return out;
}

OXY_OP(linear_panels,
       "(Tensor x, str format, Tensor panels, Tensor? channel_scales, Tensor? group_scales, "
       "Tensor? zero_points, int out_features, Tensor? bias=None, Tensor? other=None, "
       "str epilogue=\"none\", str activation_dtype=\"none\") -> Tensor",
       linear_panels)

}  // namespace oxytorch
