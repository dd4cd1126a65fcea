#include "ops/_norm/entry.h"
#include "ops/add_rms_norm/kernel.h"

namespace oxytorch {

static std::vector<Tensor> add_rms_norm(const Tensor& x, const Tensor& residual,
                                        const std::optional<Tensor>& weight, double eps,
                                        bool return_total) {
  return norm_entry("add_rms_norm", add_rms_norm_copies, x, &residual, weight, nullptr, eps,
                    return_total)
      .both();
}

OXY_OP(add_rms_norm,
       "(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-06, "
       "bool return_total=True) -> (Tensor normed, Tensor total)",
       add_rms_norm)

}  // namespace oxytorch
