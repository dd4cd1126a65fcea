// The dot-product units of bytes at a level.
#pragma once

#include "core/dot_unit.h"
#include "ops/_quantized/numbers.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch::OXY_LEVEL {

// Vectors that a row of a panel fills.
inline constexpr int kParts = kPanelOutputs / kLanes;

#if OXY_HAS_INT8_DOT
using ByteUnit = QuadOf<std::uint8_t>;
#else
// Not vpmaddubsw: it saturates the sum of two products at 16 bits.
using ByteUnit = Int16Pair;
#endif

}  // namespace oxytorch::OXY_LEVEL
