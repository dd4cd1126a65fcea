// What products of many rows multiply: a unit of 4 bytes of a row of x, the same for all outputs,
// with a row of 64 bytes of a panel, 4 for each of its 16 outputs.
#pragma once

#include "core/vec.h"
#include "ops/panels/gemm_args.h"

namespace oxytorch::OXY_LEVEL {

// Vectors that a row of a panel fills.
inline constexpr int kParts = kPanelOutputs / kLanes;

// kDepth: elements of in_features in a unit. multiply: sum + unit * row, per output.

struct Float32Unit {
  using Sum = f32v;
  using Element = float;
  static constexpr int kDepth = 1;
  OXY_INLINE f32v multiply(f32v sum, std::uint32_t unit, u32v row) {
    return sum + from_bits(u32v{} + unit) * from_bits(row);
  }
};

// Integers of 16 bits, products of neighbours added.
struct Int16Pair {
  using Sum = i32v;
  using Element = std::int16_t;
  static constexpr int kDepth = 2;
  OXY_INLINE i32v multiply(i32v sum, std::uint32_t unit, u32v row) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<i32v>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum),
                                                      reinterpret_cast<__m512i>(row),
                                                      _mm512_set1_epi32(static_cast<int>(unit))));
#elif defined(__AVX512F__)
    return sum + reinterpret_cast<i32v>(_mm512_madd_epi16(
                     reinterpret_cast<__m512i>(row), _mm512_set1_epi32(static_cast<int>(unit))));
#elif defined(__AVX2__)
    return sum + reinterpret_cast<i32v>(_mm256_madd_epi16(
                     reinterpret_cast<__m256i>(row), _mm256_set1_epi32(static_cast<int>(unit))));
#elif defined(__SSE2__)
    return sum + reinterpret_cast<i32v>(_mm_madd_epi16(reinterpret_cast<__m128i>(row),
                                                       _mm_set1_epi32(static_cast<int>(unit))));
#else
    const i32v left = reinterpret_cast<i32v>(u32v{} + unit), right = reinterpret_cast<i32v>(row);
    return sum + (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
  }
};

#if defined(__AVX512BF16__)
// bfloat16 numbers, products of neighbours added.
struct Bf16Pair {
  using Sum = f32v;
  using Element = bf16;
  static constexpr int kDepth = 2;
  OXY_INLINE f32v multiply(f32v sum, std::uint32_t unit, u32v row) {
    const __m512i left = _mm512_set1_epi32(static_cast<int>(unit));
    return reinterpret_cast<f32v>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                   reinterpret_cast<__m512bh>(left),
                                                   reinterpret_cast<__m512bh>(row)));
  }
};
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Bytes: signed ones of x, unsigned ones of the weight, products of four neighbours added.
struct Int8Quad {
  using Sum = i32v;
  using Element = std::int8_t;
  static constexpr int kDepth = 4;
  OXY_INLINE i32v multiply(i32v sum, std::uint32_t unit, u32v row) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<i32v>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                      reinterpret_cast<__m512i>(row),
                                                      _mm512_set1_epi32(static_cast<int>(unit))));
#else
    return reinterpret_cast<i32v>(
        _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(row),
                                _mm256_set1_epi32(static_cast<int>(unit))));
#endif
  }
};
#endif

// Calls body(Dot{}) with the unit that this level multiplies.
template <class Body>
OXY_INLINE void with_dot(RowType type, Body body) {
  switch (type) {
    case RowType::float32:
      return body(Float32Unit{});
    case RowType::bfloat16:
#if defined(__AVX512BF16__)
      return body(Bf16Pair{});
#else
      return body(Float32Unit{});
#endif
    case RowType::int8:
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
      return body(Int8Quad{});
#else
      return body(Int16Pair{});
#endif
  }
}

template <class Dot>
inline constexpr bool kIsInteger = __is_same(typename Dot::Sum, i32v);

// Whether the weight's zero point is left to the sums of x.
template <class Dot>
inline constexpr bool kKeepsZeroPoint = kIsInteger<Dot> && Dot::kDepth == 4;

OXY_INLINE u32v load_words(const void* p) {
  u32v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OXY_INLINE void store_words(void* p, u32v v) { std::memcpy(p, &v, sizeof v); }

}  // namespace oxytorch::OXY_LEVEL
