#include "ops/_panels/entry.h"

namespace oxytorch {

static Tensor linear_int8(const Tensor& x, const Tensor& panels, const Tensor& channel_scales,
                          const std::optional<Tensor>& group_scales,
                          const std::optional<Tensor>& zero_points, std::int64_t out_features,
                          const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                          const std::string& epilogue, const std::string& activation) {
  constexpr const char* kOp = "linear_int8";
  const PanelTensors weight{panels, &channel_scales, &group_scales, &zero_points};
  return linear_entry(kOp, PanelFormat::int8, x, weight, out_features, bias, other, epilogue,
                      parse_activation(kOp, activation));
}

OXY_OP(linear_int8,
       "(Tensor x, Tensor panels, Tensor channel_scales, Tensor? group_scales, "
       "Tensor? zero_points, int out_features, Tensor? bias=None, Tensor? other=None, "
       "str epilogue=\"none\", str activation=\"none\") -> Tensor",
       linear_int8)

}  // namespace oxytorch
