#include "ops/_gated/entry.h"
#include "ops/silu_mul/kernel.h"

namespace oxytorch {

static Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  return gated_entry("silu_mul", silu_mul_copies, gate, up, false, 1);
}

OXY_OP(silu_mul, "(Tensor gate, Tensor up) -> Tensor", silu_mul)

}  // namespace oxytorch
