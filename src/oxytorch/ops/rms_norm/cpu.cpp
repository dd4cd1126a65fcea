#include "ops/_norm/entry.h"
#include "ops/rms_norm/kernel.h"

namespace oxytorch {

static Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps) {
  return norm_entry("rms_norm", rms_norm_copies, x, nullptr, weight, nullptr, eps, false).out;
}

OXY_OP(rms_norm, "(Tensor x, Tensor? weight=None, float eps=1e-06) -> Tensor", rms_norm)

}  // namespace oxytorch
