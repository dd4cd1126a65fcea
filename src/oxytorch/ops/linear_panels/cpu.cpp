#include "ops/panels/entry.h"

namespace oxytorch {

static Tensor linear_panels(const Tensor& x, const std::string& format_name, const Tensor& panels,
                            const std::optional<Tensor>& channel_scales,
                            const std::optional<Tensor>& group_scales,
                            const std::optional<Tensor>& zero_points, std::int64_t out_features,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                            const std::string& epilogue, const std::string& activation) {
  constexpr const char* kOp = "linear_panels";
  const PanelFormat format = parse_format(kOp, "format", format_name);
  const PanelTensors weight{panels, &channel_scales, &group_scales, &zero_points};
  check_parts(kOp, format, format_name, weight);
  const bool rounds_to_int8 = parse_activation(kOp, activation);
  if (rounds_to_int8 && !has_zero_points(format)) {
    fail(kOp, "activation_dtype", "'none' with format '" + format_name + "'", "'int8'");
  }
  return linear_entry(kOp, format, x, weight, out_features, bias, other, epilogue, rounds_to_int8);
}

OXY_OP(linear_panels,
       "(Tensor x, str format, Tensor panels, Tensor? channel_scales, Tensor? group_scales, "
       "Tensor? zero_points, int out_features, Tensor? bias=None, Tensor? other=None, "
       "str epilogue=\"none\", str activation_dtype=\"none\") -> Tensor",
       linear_panels)

}  // namespace oxytorch
