// What the products of cached attention multiply, and in which vectors.
#pragma once

#include "core/vec.h"
#include "ops/cached_attention/kernel.h"

namespace oxytorch::OXY_LEVEL {

inline constexpr std::int64_t kKeys = kCachedKeys;
inline constexpr std::int64_t kDim = kCachedMostDim;

// Rows of dims are filled up with zeros to a multiple of this.
inline constexpr std::int64_t kDimStep = 32;

constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) {
  return (n + step - 1) / step * step;
}

// Query rows lie side by side in the lanes of a vector while scores are computed, `lanes` at a
// time: 16 or, for fewer rows, half of that at the levels with AVX-512.
template <int lanes>
struct Wide {
  typedef float Float __attribute__((vector_size(4 * lanes)));
  typedef std::int32_t Whole __attribute__((vector_size(4 * lanes)));
};

#if defined(__AVX512F__)
inline constexpr int kFewLanes = 8;
inline constexpr int kKeyTile = 8;
inline constexpr int kRowTile = 8;
#else
inline constexpr int kFewLanes = kLanes;
inline constexpr int kKeyTile = 4;
inline constexpr int kRowTile = 4;
#endif

// A number that a template takes from an argument's type.
template <int number>
struct Count {
  static constexpr int value = number;
};

template <class V, class T>
OXY_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// A row of 32-bit units of queries, keys or weights: one float32, or two 16-bit numbers that are
// neighbours along the sum.

struct Float32Operands {
  using Unit = float;
  using Key = float;       // element of a key's row as the products read it
  using Value = float;     // and of a value's
  using Accuracy = float;  // of exponentials
  using Values = f32v;
  static constexpr int kDepth = 1;
  static constexpr bool kWhole = false;
  template <int lanes>
  using Sum = typename Wide<lanes>::Float;
  template <class V>
  OXY_INLINE V multiply(V sum, V many, float one) {
    return sum + many * one;
  }
  OXY_INLINE void load_pair(const float* first, const float*, f32v (&two)[2]) {
    two[0] = load(first);
    two[1] = load(first + kLanes);
  }
  OXY_INLINE f32v multiply_values(f32v sum, f32v values, float weight) {
    return sum + values * weight;
  }
  OXY_INLINE void in_order(const f32v (&sums)[2], f32v (&ordered)[2]) {
    ordered[0] = sums[0];
    ordered[1] = sums[1];
  }
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

#if defined(__AVX512BF16__)

struct Bf16Operands {
  using Unit = std::uint32_t;
  using Key = bf16;
  using Value = bf16;
  using Accuracy = bf16;
  using Values = i32v;
  static constexpr int kDepth = 2;
  static constexpr bool kWhole = false;
  template <int lanes>
  using Sum = typename Wide<lanes>::Float;
  typedef Wide<16>::Float Many;
  typedef Wide<8>::Float Few;
  OXY_INLINE Many multiply(Many sum, Many many, std::uint32_t one) {
    return reinterpret_cast<Many>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(many),
                         reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(one)))));
  }
  OXY_INLINE Few multiply(Few sum, Few many, std::uint32_t one) {
    return reinterpret_cast<Few>(
        _mm256_dpbf16_ps(reinterpret_cast<__m256>(sum), reinterpret_cast<__m256bh>(many),
                         reinterpret_cast<__m256bh>(_mm256_set1_epi32(static_cast<int>(one)))));
  }
  OXY_INLINE void load_pair(const bf16* first, const bf16* second, i32v (&two)[2]) {
    interleave(load_as<i32v>(first), load_as<i32v>(second), two);
  }
  OXY_INLINE f32v multiply_values(f32v sum, i32v values, std::uint32_t weight) {
    return multiply(sum, reinterpret_cast<Many>(values), weight);
  }
  OXY_INLINE void in_order(const f32v (&sums)[2], f32v (&ordered)[2]) {
    unshuffled(sums[0], sums[1], ordered);
  }
};

#endif

#if defined(__AVX512F__)

OXY_INLINE Wide<16>::Whole multiply_pairs(Wide<16>::Whole sum, Wide<16>::Whole a, __m512i b) {
  const auto left = reinterpret_cast<__m512i>(a), total = reinterpret_cast<__m512i>(sum);
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Wide<16>::Whole>(_mm512_dpwssd_epi32(total, left, b));
#else
  return reinterpret_cast<Wide<16>::Whole>(_mm512_add_epi32(total, _mm512_madd_epi16(left, b)));
#endif
}

OXY_INLINE Wide<16>::Whole multiply_pairs(Wide<16>::Whole sum, Wide<16>::Whole a, std::uint32_t b) {
  return multiply_pairs(sum, a, _mm512_set1_epi32(static_cast<int>(b)));
}

#endif

#if defined(__AVX2__)

OXY_INLINE Wide<8>::Whole multiply_pairs(Wide<8>::Whole sum, Wide<8>::Whole a, std::uint32_t one) {
  const auto left = reinterpret_cast<__m256i>(a), total = reinterpret_cast<__m256i>(sum);
  const __m256i b = _mm256_set1_epi32(static_cast<int>(one));
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Wide<8>::Whole>(_mm256_dpwssd_epi32(total, left, b));
#elif defined(__AVXVNNI__)
  return reinterpret_cast<Wide<8>::Whole>(_mm256_dpwssd_avx_epi32(total, left, b));
#else
  return reinterpret_cast<Wide<8>::Whole>(_mm256_add_epi32(total, _mm256_madd_epi16(left, b)));
#endif
}

#else

OXY_INLINE i32v multiply_pairs(i32v sum, i32v a, std::uint32_t one) {
#if defined(__SSE2__)
  const __m128i b = _mm_set1_epi32(static_cast<int>(one));
  return sum + reinterpret_cast<i32v>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), b));
#else
  const i32v b = i32v{} + static_cast<std::int32_t>(one);
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#endif

// An int8 cache: its codes times whole numbers of 15 bits.
struct CodeOperands {
  using Unit = std::uint32_t;
  using Key = std::int16_t;
  using Value = std::int8_t;
  using Accuracy = bf16;
  using Values = i32v;
  static constexpr int kDepth = 2;
  static constexpr bool kWhole = true;
  template <int lanes>
  using Sum = typename Wide<lanes>::Whole;
  template <class V>
  OXY_INLINE V multiply(V sum, V many, std::uint32_t one) {
    return multiply_pairs(sum, many, one);
  }
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
    interleave(widened(first), widened(second), two);
  }
  OXY_INLINE i32v multiply_values(i32v sum, i32v values, std::uint32_t weight) {
    return multiply_pairs(sum, values, weight);
  }
  OXY_INLINE void in_order(const i32v (&sums)[2], f32v (&ordered)[2]) {
    unshuffled(__builtin_convertvector(sums[0], f32v), __builtin_convertvector(sums[1], f32v),
               ordered);
  }
};

}  // namespace oxytorch::OXY_LEVEL
