#include "ops/silu_mul/kernel.h"

#include "core/functions.h"
#include "ops/_gated/rows.h"

namespace oxytorch::OXY_LEVEL {

static void silu_mul(const GatedArgs& args, std::int64_t begin, std::int64_t end) {
  gated(args, begin, end, [](f32v v, auto type) { return v * sigmoid(v, type); });
}

}  // namespace oxytorch::OXY_LEVEL
