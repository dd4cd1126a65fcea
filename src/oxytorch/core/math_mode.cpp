#include "core/math_mode.h"

#include "core/export.h"

namespace oxytorch {

std::atomic<bool> bfloat16_products{false};

}  // namespace oxytorch

OXY_EXPORT void oxytorch_round_products(int rounds) {
  oxytorch::bfloat16_products.store(rounds != 0, std::memory_order_relaxed);
}

OXY_EXPORT int oxytorch_rounds_products() { return oxytorch::rounds_products(); }
