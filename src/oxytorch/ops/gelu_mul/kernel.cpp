#include "ops/gelu_mul/kernel.h"

#include "ops/_gated/gelu.h"
#include "ops/_gated/rows.h"

namespace oxytorch::OXY_LEVEL {

static void gelu_mul(const GatedArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.tanh_form) {
    gated(args, begin, end, [](f32v v, auto type) { return gelu_tanh(v, type); });
  } else {
    gated(args, begin, end, [](f32v v, auto type) { return gelu(v, type); });
  }
}

}  // namespace oxytorch::OXY_LEVEL
