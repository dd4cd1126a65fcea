#include "ops/_norm/entry.h"
#include "ops/layer_norm/kernel.h"

namespace oxytorch {

static Tensor layer_norm(const Tensor& x, const std::optional<Tensor>& weight,
                         const std::optional<Tensor>& bias, double eps) {
  return norm_entry("layer_norm", layer_norm_copies, x, nullptr, weight, bias ? &*bias : nullptr,
                    eps, false)
      .out;
}

OXY_OP(layer_norm, "(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
       layer_norm)

}  // namespace oxytorch
