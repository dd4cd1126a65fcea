#include "ops/_gated/entry.h"
#include "ops/gelu_mul/kernel.h"

namespace oxytorch {

static Tensor gelu_mul(const Tensor& gate, const Tensor& up, const std::string& approximate) {
  if (approximate != "none" && approximate != "tanh") {
    fail("gelu_mul", "approximate", "'none' or 'tanh'", "'" + approximate + "'");
  }
  return gated_entry("gelu_mul", gelu_mul_copies, gate, up, approximate == "tanh", 2);
}

OXY_OP(gelu_mul, "(Tensor gate, Tensor up, str approximate=\"none\") -> Tensor", gelu_mul)

}  // namespace oxytorch
