// Vectors of float32 in the widest registers of the level: how each level loads, converts,
// compares, sums and stores them. core/functions.h has their elementary functions. Everything lies
// in the level's namespace, so that the linker cannot share it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/dtype.h"

namespace oxytorch::OXY_LEVEL {

#define OXY_INLINE static inline __attribute__((always_inline))
#define OXY_MEMBER inline __attribute__((always_inline))

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

// Number of float32 values in a vector.
inline constexpr int kLanes = kVectorBytes / 4;

typedef float f32v __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t i32v __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t u32v __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t u16v __attribute__((vector_size(kVectorBytes / 2)));
typedef std::uint8_t u8v __attribute__((vector_size(kVectorBytes / 4)));

inline constexpr float kMinusInfinity = -__builtin_huge_valf();

OXY_INLINE f32v splat(float value) { return f32v{} + value; }
OXY_INLINE u32v bits_of(f32v v) { return reinterpret_cast<u32v>(v); }
OXY_INLINE f32v from_bits(u32v v) { return reinterpret_cast<f32v>(v); }

// GCC 12 splits a vector in two for these when they are written as __builtin_convertvector.

OXY_INLINE u32v zero_extend(u16v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<u32v>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<u32v>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#elif defined(__SSE4_1__)
  return reinterpret_cast<u32v>(
      _mm_unpacklo_epi16(_mm_cvtsi64_si128(reinterpret_cast<long long>(v)), __m128i{}));
#else
  return __builtin_convertvector(v, u32v);
#endif
}

// Every lane has to be below 2^16.
OXY_INLINE u16v truncate(u32v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<u16v>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32(reinterpret_cast<__m256i>(v), __m256i{});
  return reinterpret_cast<u16v>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#elif defined(__SSE4_1__)
  const __m128i packed = _mm_packus_epi32(reinterpret_cast<__m128i>(v), __m128i{});
  return reinterpret_cast<u16v>(_mm_cvtsi128_si64(packed));
#else
  return __builtin_convertvector(v, u16v);
#endif
}

OXY_INLINE u32v zero_extend(u8v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<u32v>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<u32v>(
      _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(reinterpret_cast<long long>(v))));
#elif defined(__SSE4_1__)
  return reinterpret_cast<u32v>(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(reinterpret_cast<int>(v))));
#else
  return __builtin_convertvector(v, u32v);
#endif
}

// Every lane has to be below 2^8.
OXY_INLINE u8v truncate_8_bits(u32v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<u8v>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_packus_epi32(reinterpret_cast<__m256i>(v), __m256i{});
  const __m256i bytes = _mm256_packus_epi16(pairs, __m256i{});
  const __m256i joined =
      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1));
  return reinterpret_cast<u8v>(_mm_cvtsi128_si64(_mm256_castsi256_si128(joined)));
#elif defined(__SSE4_1__)
  const __m128i pairs = _mm_packus_epi32(reinterpret_cast<__m128i>(v), __m128i{});
  return reinterpret_cast<u8v>(_mm_cvtsi128_si32(_mm_packus_epi16(pairs, __m128i{})));
#else
  return __builtin_convertvector(v, u8v);
#endif
}

// The numbers of the lanes, from 0.
OXY_INLINE u32v lane_numbers() {
  u32v numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<std::uint32_t>(i);
  return numbers;
}

OXY_INLINE f32v magnitude(f32v v) { return from_bits(bits_of(v) & 0x7fffffff); }

// Conversions of a whole vector. To 16 bits: round to nearest, ties to even; NaN stays NaN.

OXY_INLINE f32v widen(u16v v, bf16) { return from_bits(zero_extend(v) << 16); }

OXY_INLINE u16v narrow(f32v v, bf16) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<u16v>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(v)));
#else
  const u32v bits = bits_of(v);
  const u32v rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const u32v quiet = bits >> 16 | 0x40;
  return truncate(v == v ? rounded : quiet);
#endif
}

OXY_INLINE f32v widen(u16v v, f16) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(v)));
#elif defined(__F16C__)
  return reinterpret_cast<f32v>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(v)));
#else
  // Exponent and mantissa moved into place are the value times 2^-112, subnormals included.
  const u32v wide = zero_extend(v);
  const u32v magnitude = (wide & 0x7fff) << 13;
  const f32v scaled = from_bits(magnitude) * splat(0x1p112f);
  const u32v special = magnitude | 0x7f800000;
  const u32v bits = magnitude >= 0x7c00u << 13 ? special : bits_of(scaled);
  return from_bits(bits | (wide & 0x8000) << 16);
#endif
}

OXY_INLINE u16v narrow(f32v v, f16) {
#if defined(__AVX512F__)
  return reinterpret_cast<u16v>(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return reinterpret_cast<u16v>(
      _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  const u32v sign = bits_of(v) >> 16 & 0x8000;
  const u32v magnitude = bits_of(v) & 0x7fffffff;
  // Normal: rebias the exponent by 15 - 127, then round the 13 bits that are cut off.
  const u32v normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Subnormal: adding 0.5 leaves the result, rounded by the addition, in the low bits.
  const u32v subnormal = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000;
  u32v result = magnitude < 113u << 23 ? subnormal : normal;
  // 65520 and above round to infinity; NaN stays NaN.
  result = magnitude >= 0x477ff000u ? u32v{} + 0x7c00 : result;
  result = magnitude > 0x7f800000u ? u32v{} + 0x7e00 : result;
  return truncate(result | sign);
#endif
}

// Loads and stores; memory may be misaligned. 16-bit values are widened and narrowed.

OXY_INLINE f32v load(const float* p) {
  f32v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OXY_INLINE void store(float* p, f32v v) { std::memcpy(p, &v, sizeof v); }

// The value after it was stored as T.
OXY_INLINE f32v rounded(f32v v, float) { return v; }

template <class T>
OXY_INLINE f32v rounded(f32v v, T) {
  return widen(narrow(v, T{}), T{});
}

template <class T>
OXY_INLINE f32v load(const T* p) {
  u16v v;
  std::memcpy(&v, p, sizeof v);
  return widen(v, T{});
}

template <class T>
OXY_INLINE void store(T* p, f32v v) {
  const u16v narrowed = narrow(v, T{});
  std::memcpy(p, &narrowed, sizeof narrowed);
}

// The first `count` elements, 0 < count < kLanes; nothing beyond them is read or written.
// Lanes beyond `count` are zero after a load.

#if defined(__AVX512F__)

OXY_INLINE f32v load(const float* p, std::int64_t count) {
  return reinterpret_cast<f32v>(_mm512_maskz_loadu_ps((1u << count) - 1, p));
}

OXY_INLINE void store(float* p, f32v v, std::int64_t count) {
  _mm512_mask_storeu_ps(p, (1u << count) - 1, reinterpret_cast<__m512>(v));
}

template <class T>
OXY_INLINE f32v load(const T* p, std::int64_t count) {
  return widen(reinterpret_cast<u16v>(_mm256_maskz_loadu_epi16((1u << count) - 1, p)), T{});
}

template <class T>
OXY_INLINE void store(T* p, f32v v, std::int64_t count) {
  _mm256_mask_storeu_epi16(p, (1u << count) - 1, reinterpret_cast<__m256i>(narrow(v, T{})));
}

#else

template <class T>
OXY_INLINE f32v load(const T* p, std::int64_t count) {
  T values[kLanes] = {};
  for (std::int64_t i = 0; i < count; ++i) values[i] = p[i];
  return load(values);
}

template <class T>
OXY_INLINE void store(T* p, f32v v, std::int64_t count) {
  T values[kLanes];
  store(values, v);
  for (std::int64_t i = 0; i < count; ++i) p[i] = values[i];
}

#endif

// One body for whole vectors and the tail: body(i, Whole{}) and once body(i, elements left).

struct Whole {};

template <class T>
OXY_INLINE f32v load(const T* p, Whole) {
  return load(p);
}

template <class T>
OXY_INLINE void store(T* p, f32v v, Whole) {
  store(p, v);
}

// Vectors of integers, as they are in memory.

template <class V, class T>
OXY_INLINE V load_raw(const T* p, Whole) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T>
OXY_INLINE V load_raw(const T* p, std::int64_t count) {
  V v{};
  for (std::int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

template <class V, class T>
OXY_INLINE void store_raw(T* p, V v, Whole) {
  std::memcpy(p, &v, sizeof v);
}

template <class V, class T>
OXY_INLINE void store_raw(T* p, V v, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) p[i] = v[i];
}

// Sets the lanes beyond `count` to `value`.
OXY_INLINE f32v fill_tail(f32v v, Whole, float) { return v; }

OXY_INLINE f32v fill_tail(f32v v, std::int64_t count, float value) {
  return lane_numbers() < static_cast<std::uint32_t>(count) ? v : splat(value);
}

template <class Body>
OXY_INLINE void sweep(std::int64_t begin, std::int64_t end, Body body) {
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, Whole{});
  if (i < end) body(i, end - i);
}

// Four sweeps in one, so that sums in `chain` 0 to 3 need not wait for each other:
// body(i, count, chain).
template <class Body>
OXY_INLINE void sweep_in_chains(std::int64_t end, Body body) {
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
    for (int chain = 0; chain < 4; ++chain) body(i + chain * kLanes, Whole{}, chain);
  }
  sweep(i, end, [&](std::int64_t j, auto count) { body(j, count, 0); });
}

// Calls body(T{}) with T the element type.
template <class Body>
OXY_INLINE void with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::bfloat16:
      return body(bf16{});
    case DType::float16:
      return body(f16{});
  }
}

// Stores past the caches. p has to be aligned to the stored size.

OXY_INLINE void stream(float* p, f32v v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#elif defined(__AVX2__)
  _mm256_stream_ps(p, reinterpret_cast<__m256>(v));
#elif defined(__SSE2__)
  _mm_stream_ps(p, reinterpret_cast<__m128>(v));
#else
  store(p, v);
#endif
}

template <class T>
OXY_INLINE void stream(T* p, f32v v) {
  const u16v narrowed = narrow(v, T{});
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(narrowed));
#elif defined(__AVX2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), reinterpret_cast<__m128i>(narrowed));
#elif defined(__SSE2__)
  long long half;
  std::memcpy(&half, &narrowed, sizeof half);
  _mm_stream_si64(reinterpret_cast<long long*>(p), half);
#else
  std::memcpy(p, &narrowed, sizeof narrowed);
#endif
}

// Orders streamed stores before whatever other threads do next.
OXY_INLINE void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

OXY_INLINE bool is_aligned(const void* p, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % static_cast<std::uintptr_t>(bytes) == 0;
}

// x y + z, rounded once where the level has an instruction for that. Where the compiler may decide
// it by itself, rows of a gemv and of a gemm would be rounded in two ways.
OXY_INLINE f32v multiply_add(f32v x, f32v y, f32v z) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(_mm512_fmadd_ps(
      reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(z)));
#elif defined(__FMA__)
  return reinterpret_cast<f32v>(_mm256_fmadd_ps(
      reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y), reinterpret_cast<__m256>(z)));
#else
  return z + x * y;
#endif
}

// Where a or b is NaN the result of these two is b.

OXY_INLINE f32v minimum(f32v a, f32v b) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(
      _mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<f32v>(
      _mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a < b ? a : b;
#endif
}

OXY_INLINE f32v maximum(f32v a, f32v b) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(
      _mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<f32v>(
      _mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

OXY_INLINE i32v clamp(i32v v, std::int32_t least, std::int32_t most) {
#if defined(__AVX512F__)
  return reinterpret_cast<i32v>(
      _mm512_min_epi32(_mm512_max_epi32(reinterpret_cast<__m512i>(v), _mm512_set1_epi32(least)),
                       _mm512_set1_epi32(most)));
#else
  v = v > least ? v : i32v{} + least;
  return v < most ? v : i32v{} + most;
#endif
}

OXY_INLINE float sum(f32v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  float pairs[kLanes];
  store(pairs, v);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) pairs[i] += pairs[i + step];
  }
  return pairs[0];
#endif
}

// The sum over the lanes of four chains.
OXY_INLINE float sum(const f32v chains[4]) {
  return sum((chains[0] + chains[1]) + (chains[2] + chains[3]));
}

OXY_INLINE float maximum(f32v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float values[kLanes];
  store(values, v);
  float result = values[0];
  for (int i = 1; i < kLanes; ++i) result = result > values[i] ? result : values[i];
  return result;
#endif
}

// The largest over the lanes of four chains.
OXY_INLINE float maximum(const f32v chains[4]) {
  return maximum(maximum(maximum(chains[0], chains[1]), maximum(chains[2], chains[3])));
}

OXY_INLINE std::uint32_t maximum(u32v v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32(reinterpret_cast<__m512i>(v));
#else
  std::uint32_t values[kLanes];
  std::memcpy(values, &v, sizeof v);
  std::uint32_t result = values[0];
  for (int i = 1; i < kLanes; ++i) result = result > values[i] ? result : values[i];
  return result;
#endif
}

// The largest magnitude of a row; NaN if there is one.
template <class T>
OXY_INLINE float largest_magnitude(const T* x, std::int64_t width) {
  u32v bits{};
  sweep(0, width, [&](std::int64_t i, auto count) {
    const u32v magnitudes = bits_of(load(x + i, count)) & 0x7fffffff;
    bits = magnitudes > bits ? magnitudes : bits;
  });
  return __builtin_bit_cast(float, maximum(bits));
}

// The nearest integer, for magnitudes below 2^22.
OXY_INLINE f32v nearest(f32v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(_mm512_roundscale_ps(
      reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  constexpr float kShift = 0x1.8p23f;
  return (v + kShift) - kShift;
#endif
}

}  // namespace oxytorch::OXY_LEVEL
