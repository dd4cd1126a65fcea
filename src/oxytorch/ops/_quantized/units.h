// The dot-product units of bytes at a level.
#pragma once

#include "core/dot_unit.h"
#include "ops/_quantized/numbers.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch::OXY_LEVEL {

// Vectors that a row of a panel fills.
inline constexpr int kParts = kPanelOutputs / kLanes;

#if OXY_HAS_INT8_DOT
// Signed bytes of a, unsigned ones of b.
struct ByteQuad : IntegerSums {
  using Element = std::uint8_t;
  using Unit = std::uint32_t;
  static constexpr int kDepth = 4;

  OXY_INLINE i32v multiply(i32v sum, i32v a, std::uint32_t b) {
    return multiply(sum, a, repeated<i32v>(b));
  }
  OXY_INLINE i32v multiply(i32v sum, i32v a, i32v b) { return dot_bytes(sum, b, a); }
};
using ByteUnit = ByteQuad;
#else
// Not vpmaddubsw: it saturates the sum of two products at 16 bits.
using ByteUnit = Int16Pair;
#endif

}  // namespace oxytorch::OXY_LEVEL
