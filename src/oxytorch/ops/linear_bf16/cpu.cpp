#include "ops/_panels/entry.h"

namespace oxytorch {

static Tensor linear_bf16(const Tensor& x, const Tensor& panels, std::int64_t out_features,
                          const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                          const std::string& epilogue) {
  return linear_entry("linear_bf16", PanelFormat::bf16, x, {panels}, out_features, bias, other,
                      epilogue, false);
}

OXY_OP(linear_bf16,
       "(Tensor x, Tensor panels, int out_features, Tensor? bias=None, Tensor? other=None, "
       "str epilogue=\"none\") -> Tensor",
       linear_bf16)

}  // namespace oxytorch
