#include "core/math_mode.h"

namespace oxytorch {

std::atomic<bool> bfloat16_products{false};

}  // namespace oxytorch

extern "C" __attribute__((visibility("default"))) void oxytorch_round_products(int rounds) {
  oxytorch::bfloat16_products.store(rounds != 0, std::memory_order_relaxed);
}

extern "C" __attribute__((visibility("default"))) int oxytorch_rounds_products() {
  return oxytorch::rounds_products();
}
