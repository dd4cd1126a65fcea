#include "ops/add_layer_norm/kernel.h"

#include "ops/_norm/rows.h"

namespace oxytorch::OXY_LEVEL {

static void add_layer_norm(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  norm</*centered=*/true, /*added=*/true>(args, begin, end);
}

}  // namespace oxytorch::OXY_LEVEL
