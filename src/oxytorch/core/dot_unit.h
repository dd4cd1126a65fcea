// Dot-product units: 32 bits of each operand, which hold one number or several neighbours along the
// sum. An instruction multiplies units lane by lane and adds all their products to the lane's sum.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Vectors of `lanes` lanes: those of the level, or half of them.
template <int lanes>
struct Wide {
  typedef float Float __attribute__((vector_size(4 * lanes)));
  typedef std::int32_t Whole __attribute__((vector_size(4 * lanes)));
};

template <class V, class T>
OXY_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
OXY_INLINE V repeated(std::uint32_t unit) {
  const typename Wide<sizeof(V) / 4>::Whole zero{};
  return reinterpret_cast<V>(zero + static_cast<std::int32_t>(unit));
}

// Of each unit: Element, an operand's numbers in memory, of which kDepth fill a Unit; Sum, a vector
// of sums, and SumOf<lanes>. multiply(sum, a, b): sum + a b, where b is a vector, or one unit for
// all lanes.

struct FloatSums {
  using Sum = f32v;
  template <int lanes>
  using SumOf = typename Wide<lanes>::Float;
  static constexpr bool kIsInteger = false;
};

struct IntegerSums {
  using Sum = i32v;
  template <int lanes>
  using SumOf = typename Wide<lanes>::Whole;
  static constexpr bool kIsInteger = true;
};

struct Float32Unit : FloatSums {
  using Element = float;
  using Unit = float;
  static constexpr int kDepth = 1;

  template <class V>
  OXY_INLINE V multiply(V sum, V a, V b) {
    return sum + a * b;
  }
  template <class V>
  OXY_INLINE V multiply(V sum, V a, float b) {
    return sum + a * b;
  }
};

// Integers of 16 bits.
struct Int16Pair : IntegerSums {
  using Element = std::int16_t;
  using Unit = std::uint32_t;
  static constexpr int kDepth = 2;

  template <class V>
  OXY_INLINE V multiply(V sum, V a, std::uint32_t b) {
    return multiply(sum, a, repeated<V>(b));
  }

#if defined(__AVX512F__)
  OXY_INLINE SumOf<16> multiply(SumOf<16> sum, SumOf<16> a, SumOf<16> b) {
    const auto left = reinterpret_cast<__m512i>(a), right = reinterpret_cast<__m512i>(b);
#if OXY_HAS_INT8_DOT
    return reinterpret_cast<SumOf<16>>(
        _mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), left, right));
#else
    return sum + reinterpret_cast<SumOf<16>>(_mm512_madd_epi16(left, right));
#endif
  }
#endif

#if defined(__AVX2__)
  OXY_INLINE SumOf<8> multiply(SumOf<8> sum, SumOf<8> a, SumOf<8> b) {
    const auto left = reinterpret_cast<__m256i>(a), right = reinterpret_cast<__m256i>(b);
#if OXY_HAS_INT8_DOT && defined(__AVX512F__)
    return reinterpret_cast<SumOf<8>>(
        _mm256_dpwssd_epi32(reinterpret_cast<__m256i>(sum), left, right));
#elif OXY_HAS_INT8_DOT
    return reinterpret_cast<SumOf<8>>(
        _mm256_dpwssd_avx_epi32(reinterpret_cast<__m256i>(sum), left, right));
#else
    return sum + reinterpret_cast<SumOf<8>>(_mm256_madd_epi16(left, right));
#endif
  }
#else
  OXY_INLINE i32v multiply(i32v sum, i32v a, i32v b) {
#if defined(__SSE2__)
    return sum + reinterpret_cast<i32v>(
                     _mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
  }
#endif
};

#if OXY_HAS_BF16_DOT
struct Bf16Pair : FloatSums {
  using Element = bf16;
  using Unit = std::uint32_t;
  static constexpr int kDepth = 2;

  template <class V>
  OXY_INLINE V multiply(V sum, V a, std::uint32_t b) {
    return multiply(sum, a, repeated<V>(b));
  }
  OXY_INLINE SumOf<16> multiply(SumOf<16> sum, SumOf<16> a, SumOf<16> b) {
    return reinterpret_cast<SumOf<16>>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                        reinterpret_cast<__m512bh>(a),
                                                        reinterpret_cast<__m512bh>(b)));
  }
  OXY_INLINE SumOf<8> multiply(SumOf<8> sum, SumOf<8> a, SumOf<8> b) {
    return reinterpret_cast<SumOf<8>>(_mm256_dpbf16_ps(reinterpret_cast<__m256>(sum),
                                                       reinterpret_cast<__m256bh>(a),
                                                       reinterpret_cast<__m256bh>(b)));
  }
};
#endif

#if OXY_HAS_INT8_DOT
// sum + the dot products of four unsigned bytes with four signed ones.
OXY_INLINE i32v dot_bytes(i32v sum, i32v of_unsigned, i32v of_signed) {
#if defined(__AVX512F__)
  return reinterpret_cast<i32v>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                    reinterpret_cast<__m512i>(of_unsigned),
                                                    reinterpret_cast<__m512i>(of_signed)));
#else
  return reinterpret_cast<i32v>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum),
                                                        reinterpret_cast<__m256i>(of_unsigned),
                                                        reinterpret_cast<__m256i>(of_signed)));
#endif
}

// Bytes: those of b are `E`, those of a are unsigned where `E` is signed, and signed where it is
// not.
template <class E>
struct QuadOf : IntegerSums {
  using Element = E;
  using Unit = std::uint32_t;
  static constexpr int kDepth = 4;

  OXY_INLINE i32v multiply(i32v sum, i32v a, std::uint32_t b) {
    return multiply(sum, a, repeated<i32v>(b));
  }
  OXY_INLINE i32v multiply(i32v sum, i32v a, i32v b) {
    return __is_same(E, std::int8_t) ? dot_bytes(sum, a, b) : dot_bytes(sum, b, a);
  }
};
using Int8Quad = QuadOf<std::int8_t>;
#endif

}  // namespace oxytorch::OXY_LEVEL
