#include "ops/_panels/entry.h"

namespace oxytorch {

static Tensor linear_nf4(const Tensor& x, const Tensor& panels, const Tensor& channel_scales,
                         const std::optional<Tensor>& group_scales, std::int64_t out_features,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                         const std::string& epilogue) {
  const PanelTensors weight{panels, &channel_scales, &group_scales};
  return linear_entry("linear_nf4", PanelFormat::nf4, x, weight, out_features, bias, other,
                      epilogue, false);
}

OXY_OP(linear_nf4,
       "(Tensor x, Tensor panels, Tensor channel_scales, Tensor? group_scales, int out_features, "
       "Tensor? bias=None, Tensor? other=None, str epilogue=\"none\") -> Tensor",
       linear_nf4)

}  // namespace oxytorch
