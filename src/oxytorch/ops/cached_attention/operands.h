// What the products of cached attention multiply: queries and weights as units, rows of the cache.
#pragma once

#include "core/dot_unit.h"
#include "ops/cached_attention/kernel.h"

namespace oxytorch::OXY_LEVEL {

inline constexpr std::int64_t kKeys = kCachedKeys;
inline constexpr std::int64_t kDim = kCachedMostDim;

// Rows of dims are filled up with zeros to a multiple of this.
inline constexpr std::int64_t kDimStep = 32;

// Query rows lie side by side in the lanes of a vector while scores are computed: 16, or for fewer
// rows half of that where vectors have 512 bits.
inline constexpr int kFewLanes = OXY_HAS_VECTORS_512 ? 8 : kLanes;
inline constexpr int kKeyTile = OXY_HAS_VECTORS_512 ? 8 : 4;
inline constexpr int kRowTile = OXY_HAS_VECTORS_512 ? 8 : 4;

// A number that a template takes from an argument's type.
template <int number>
struct Count {
  static constexpr int value = number;
};

// Two rows of 2 * kLanes 16-bit numbers, interleaved: vectors of pairs, whose order of dims is
// what one instruction per vector gives; `unshuffled` brings sums back into order.

OXY_INLINE void interleave(i32v first, i32v second, i32v (&pairs)[2]) {
#if defined(__AVX512F__)
  const auto a = reinterpret_cast<__m512i>(first), b = reinterpret_cast<__m512i>(second);
  pairs[0] = reinterpret_cast<i32v>(_mm512_unpacklo_epi16(a, b));
  pairs[1] = reinterpret_cast<i32v>(_mm512_unpackhi_epi16(a, b));
#elif defined(__AVX2__)
  const auto a = reinterpret_cast<__m256i>(first), b = reinterpret_cast<__m256i>(second);
  pairs[0] = reinterpret_cast<i32v>(_mm256_unpacklo_epi16(a, b));
  pairs[1] = reinterpret_cast<i32v>(_mm256_unpackhi_epi16(a, b));
#else
  std::int16_t a[2 * kLanes], b[2 * kLanes], both[4 * kLanes];
  std::memcpy(a, &first, sizeof first);
  std::memcpy(b, &second, sizeof second);
  for (int i = 0; i < 2 * kLanes; ++i) {
    both[2 * i] = a[i];
    both[2 * i + 1] = b[i];
  }
  std::memcpy(pairs, both, sizeof both);
#endif
}

OXY_INLINE void unshuffled(f32v low, f32v high, f32v (&ordered)[2]) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const auto a = reinterpret_cast<__m512>(low), b = reinterpret_cast<__m512>(high);
  ordered[0] = reinterpret_cast<f32v>(_mm512_permutex2var_ps(a, first, b));
  ordered[1] = reinterpret_cast<f32v>(_mm512_permutex2var_ps(a, second, b));
#elif defined(__AVX2__)
  const auto a = reinterpret_cast<__m256>(low), b = reinterpret_cast<__m256>(high);
  ordered[0] = reinterpret_cast<f32v>(_mm256_permute2f128_ps(a, b, 0x20));
  ordered[1] = reinterpret_cast<f32v>(_mm256_permute2f128_ps(a, b, 0x31));
#else
  ordered[0] = low;
  ordered[1] = high;
#endif
}

// Of each kind of operands: Key and Value, elements of rows of the cache as products read them;
// Accuracy, which exponentials have. load_pair: 2 * kLanes elements of two rows of values, of which
// the second may be left out, as units; in_order: sums of their products.

struct Float32Operands : Float32Unit {
  using Key = float;
  using Value = float;
  using Accuracy = float;
  OXY_INLINE void load_pair(const float* first, const float*, f32v (&two)[2]) {
    two[0] = load(first);
    two[1] = load(first + kLanes);
  }
  OXY_INLINE void in_order(const f32v (&sums)[2], f32v (&ordered)[2]) {
    ordered[0] = sums[0];
    ordered[1] = sums[1];
  }
};

template <class Dot>
struct PairOperands : Dot {
  using Sum = typename Dot::Sum;
  using Accuracy = bf16;
  OXY_INLINE void interleaved(i32v first, i32v second, Sum (&two)[2]) {
    i32v pairs[2];
    interleave(first, second, pairs);
    for (int i = 0; i < 2; ++i) two[i] = reinterpret_cast<Sum>(pairs[i]);
  }
  OXY_INLINE void in_order(const Sum (&sums)[2], f32v (&ordered)[2]) {
    unshuffled(__builtin_convertvector(sums[0], f32v), __builtin_convertvector(sums[1], f32v),
               ordered);
  }
};

#if OXY_HAS_BF16_DOT
struct Bf16Operands : PairOperands<Bf16Pair> {
  using Key = bf16;
  using Value = bf16;
  OXY_INLINE void load_pair(const bf16* first, const bf16* second, f32v (&two)[2]) {
    interleaved(load_as<i32v>(first), load_as<i32v>(second), two);
  }
};
#endif

// An int8 cache: its codes times integers of 15 bits.
struct CodeOperands : PairOperands<Int16Pair> {
  using Key = std::int16_t;
  using Value = std::int8_t;
  // 2 * kLanes codes as 16-bit numbers.
  OXY_INLINE i32v widened(const std::int8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<i32v>(
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<i32v>(
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    std::int16_t wide[2 * kLanes];
    for (int i = 0; i < 2 * kLanes; ++i) wide[i] = p[i];
    return load_as<i32v>(wide);
#endif
  }
  OXY_INLINE void load_pair(const std::int8_t* first, const std::int8_t* second, i32v (&two)[2]) {
    interleaved(widened(first), widened(second), two);
  }
};

}  // namespace oxytorch::OXY_LEVEL
