// The dot-product units of products with weights in panels: a row of 64 bytes of a panel holds a
// unit of each of its 16 outputs, which meet the same unit of a row of x.
#pragma once

#include "core/dot_unit.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch::OXY_LEVEL {

// Vectors that a row of a panel fills.
inline constexpr int kParts = kPanelOutputs / kLanes;

// Rows of units that are multiplied for a row of x.
template <class Dot>
inline constexpr int kDigits = 1;

#if OXY_HAS_INT8_DOT
// Integers of 15 bits in two digits: multiples of 128, and bytes that are added to them.
struct DigitQuad : Int8Quad {};
template <>
inline constexpr int kDigits<DigitQuad> = 2;
#endif

// Calls body(Dot{}) with the unit that this level multiplies.
template <class Body>
OXY_INLINE void with_dot(RowType type, Body body) {
  switch (type) {
    case RowType::float32:
      return body(Float32Unit{});
    case RowType::bfloat16:
#if OXY_HAS_BF16_DOT
      return body(Bf16Pair{});
#else
      return body(Float32Unit{});
#endif
    case RowType::int8:
#if OXY_HAS_INT8_DOT
      return body(Int8Quad{});
#else
      return body(Int16Pair{});
#endif
    case RowType::digits:
#if OXY_HAS_INT8_DOT
      return body(DigitQuad{});
#else
      return;
#endif
  }
}

// Whether the weight's zero point is left to the sums of x.
template <class Dot>
inline constexpr bool kKeepsZeroPoint = Dot::kIsInteger && Dot::kDepth == 4;

}  // namespace oxytorch::OXY_LEVEL
