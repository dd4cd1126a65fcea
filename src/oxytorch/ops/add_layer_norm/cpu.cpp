#include "ops/_norm/entry.h"
#include "ops/add_layer_norm/kernel.h"

namespace oxytorch {

static std::vector<Tensor> add_layer_norm(const Tensor& x, const Tensor& residual,
                                          const std::optional<Tensor>& weight,
                                          const std::optional<Tensor>& bias, double eps,
                                          bool return_total) {
  return norm_entry("add_layer_norm", add_layer_norm_copies, x, &residual, weight,
                    bias ? &*bias : nullptr, eps, return_total)
      .both();
}

OXY_OP(add_layer_norm,
       "(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
       "bool return_total=True) -> (Tensor normed, Tensor total)",
       add_layer_norm)

}  // namespace oxytorch
