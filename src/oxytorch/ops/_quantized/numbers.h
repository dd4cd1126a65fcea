// Vectors of the numbers of tensors, bytes among them.
#pragma once

#include "core/functions.h"
#include "ops/_quantized/args.h"

namespace oxytorch::OXY_LEVEL {

// Calls body(T{}) with T the element type.
template <class Body>
OXY_INLINE void with_number(Number number, Body body) {
  static_assert(static_cast<int>(Number::float16) == static_cast<int>(DType::float16));
  if (number == Number::int8) return body(std::int8_t{});
  if (number == Number::uint8) return body(std::uint8_t{});
  with_type(static_cast<DType>(number), body);
}

template <class T>
inline constexpr bool kIsByte = sizeof(T) == 1;

OXY_INLINE f32v product(f32v a, f32v b) { return rounded_product(a * b); }

OXY_INLINE u8v load_byte_lanes(const void* p, Whole) {
  u8v v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OXY_INLINE u8v load_byte_lanes(const void* p, std::int64_t count) {
#if defined(__AVX512F__)
  return reinterpret_cast<u8v>(_mm_maskz_loadu_epi8((1u << count) - 1, p));
#else
  return load_raw<u8v>(static_cast<const std::uint8_t*>(p), count);
#endif
}

OXY_INLINE void store_byte_lanes(void* p, u8v v, Whole) { std::memcpy(p, &v, sizeof v); }

OXY_INLINE void store_byte_lanes(void* p, u8v v, std::int64_t count) {
#if defined(__AVX512F__)
  _mm_mask_storeu_epi8(p, (1u << count) - 1, reinterpret_cast<__m128i>(v));
#else
  store_raw(static_cast<std::uint8_t*>(p), v, count);
#endif
}

OXY_INLINE i32v widened(u8v v, std::uint8_t) { return reinterpret_cast<i32v>(zero_extend(v)); }

OXY_INLINE i32v widened(u8v v, std::int8_t) {
#if defined(__AVX512F__)
  return reinterpret_cast<i32v>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(v)));
#else
  return reinterpret_cast<i32v>(zero_extend(v) << 24) >> 24;
#endif
}

// Bytes as integers.
template <class T, class Count>
OXY_INLINE i32v load_whole(const T* p, Count count) {
  return widened(load_byte_lanes(p, count), T{});
}

// The lowest 8 bits of each lane.
OXY_INLINE u8v lowest_bytes(i32v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<u8v>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#else
  return truncate_8_bits(reinterpret_cast<u32v>(v) & 0xff);
#endif
}

// The nearest integers, ties to even, for magnitudes below 2^22.
OXY_INLINE i32v nearest_whole(f32v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<i32v>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__)
  return reinterpret_cast<i32v>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(v)));
#elif defined(__SSE2__)
  return reinterpret_cast<i32v>(_mm_cvtps_epi32(reinterpret_cast<__m128>(v)));
#else
  return __builtin_convertvector(nearest(v), i32v);
#endif
}

// How numbers are bytes: rounded to the nearest, ties to even, then the zero point is added, and
// what does not fit is the least or the largest byte. NaN is the least one.
template <class T>
struct Steps {
  static constexpr float kLeast = __is_same(T, std::int8_t) ? -128.0f : 0.0f;
  f32v inverse_scale, least, most;
  i32v zero_point;

  OXY_MEMBER Steps(float inverse, std::int32_t zero)
      : inverse_scale(splat(inverse)),
        least(splat(kLeast - static_cast<float>(zero))),
        most(least + 255.0f),
        zero_point(i32v{} + zero) {}

  OXY_MEMBER u8v bytes(f32v v) const {
    const f32v steps = minimum(maximum(product(v, inverse_scale), least), most);
    return lowest_bytes(nearest_whole(steps) + zero_point);
  }

#if defined(__AVX512F__)
  // The same of four vectors, one after the other: half as many instructions for each, which
  // saturate by themselves. fit: all are below 2^31.
  template <bool fit = false>
  OXY_MEMBER __m512i bytes(const f32v (&v)[4]) const {
    __m512i pairs[2];
    const __m512i zero = _mm512_set1_epi16(static_cast<short>(zero_point[0]));
    for (int i = 0; i < 2; ++i) {
      const __m512i whole =
          _mm512_packs_epi32(steps_of<fit>(v[2 * i]), steps_of<fit>(v[2 * i + 1]));
      pairs[i] = _mm512_adds_epi16(whole, zero);
    }
    const __m512i packed = __is_same(T, std::int8_t) ? _mm512_packs_epi16(pairs[0], pairs[1])
                                                     : _mm512_packus_epi16(pairs[0], pairs[1]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, packed);
  }

  // What does not fit into 32 bits becomes the least number, as NaN does.
  template <bool fit>
  OXY_MEMBER __m512i steps_of(f32v v) const {
    const f32v steps = product(v, inverse_scale);
    return reinterpret_cast<__m512i>(nearest_whole(fit ? steps : minimum(splat(0x1p30f), steps)));
  }
#endif
};

}  // namespace oxytorch::OXY_LEVEL
