#include "ops/rms_norm/kernel.h"

#include "ops/_norm/rows.h"

namespace oxytorch::OXY_LEVEL {

static void rms_norm(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  norm</*centered=*/false, /*added=*/false>(args, begin, end);
}

}  // namespace oxytorch::OXY_LEVEL
