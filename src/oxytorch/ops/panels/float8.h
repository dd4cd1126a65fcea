// Floating-point numbers of 8 bits (E4M3 of the Open Compute Project's OFP8: a sign, 4 bits of
// exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN, there is no infinity) as bfloat16,
// which holds each of them exactly, subnormals and zeros of both signs too.
#pragma once

#include "core/bytes.h"

namespace oxytorch::OXY_LEVEL {

// Two vectors of pairs: of each 32 bits of codes the first two, and the last two.
struct Float8Pairs {
  u32v first, last;
};

#if defined(__SSSE3__)

OXY_INLINE bytesv repeat_16(__m128i v) {
#if defined(__AVX512F__)
  return reinterpret_cast<bytesv>(_mm512_broadcast_i32x4(v));
#elif defined(__AVX2__)
  return reinterpret_cast<bytesv>(_mm256_broadcastsi128_si256(v));
#else
  return reinterpret_cast<bytesv>(v);
#endif
}

// `v`, and all ones where a byte of `magnitude` is 127.
OXY_INLINE bytesv ones_where_nan(bytesv v, bytesv magnitude) {
#if defined(__AVX512F__)
  const __mmask64 are_nan = _mm512_cmpeq_epi8_mask(in_register(magnitude), _mm512_set1_epi8(0x7f));
  return reinterpret_cast<bytesv>(
      _mm512_mask_blend_epi8(are_nan, in_register(v), _mm512_set1_epi8(-1)));
#else
  return v | reinterpret_cast<bytesv>(magnitude == 0x7f);
#endif
}

// The upper and the lower bytes of bfloat16 numbers, which half a code decides.
struct Float8Tables {
  // By sign and the upper 3 bits of the exponent: these with bfloat16's bias. Where they are zero,
  // the sign alone.
  alignas(16) std::uint8_t upper[16];
  // Codes below 16 are multiples of 2^-9: the lowest normal numbers have the subnormal ones'
  // distance.
  alignas(16) std::uint8_t small_upper[16], small_lower[16];

  constexpr Float8Tables() : upper{}, small_upper{}, small_lower{} {
    for (int i = 0; i < 16; ++i) {
      const int exponent = i & 7;
      upper[i] = static_cast<std::uint8_t>((i & 8) << 4 | (exponent ? 0x3c + exponent : 0));
      const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, i / 512.0f);
      small_upper[i] = static_cast<std::uint8_t>(bits >> 24);
      // What makes it of the code's lower half in the upper place.
      small_lower[i] = static_cast<std::uint8_t>(bits >> 16 ^ i << 4);
    }
  }
};

OXY_INLINE Float8Pairs float8_pairs(u32v codes) {
  static constexpr Float8Tables tables;
  const auto table = [](const std::uint8_t (&bytes)[16]) {
    return repeat_16(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  };
  const bytesv order =
      repeat_16(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
  const bytesv ordered = look_up(reinterpret_cast<bytesv>(codes), order);
  const u32v words = reinterpret_cast<u32v>(ordered);
  const bytesv magnitude = ordered & 0x7f;
  // 128 and above where it is not below 16.
  const bytesv small = magnitude + 0x70;
  bytesv upper = look_up(table(tables.upper), reinterpret_cast<bytesv>(words >> 4 & 0x0f0f0f0f)) |
                 look_up(table(tables.small_upper), small);
  upper = ones_where_nan(upper, magnitude);
  const bytesv lower =
      reinterpret_cast<bytesv>(words << 4 & 0xf0f0f0f0) ^ look_up(table(tables.small_lower), small);
  return {interleave_low(lower, upper), interleave_high(lower, upper)};
}

#else

// The code in the lowest 8 bits of each lane as float32.
OXY_INLINE u32v float8_bits(u32v code) {
  const u32v magnitude = code & 0x7f;
  const f32v small = __builtin_convertvector(magnitude, f32v) * splat(0x1p-9f);
  u32v bits = magnitude < 16 ? bits_of(small) : (magnitude << 20) + (120u << 23);
  bits = magnitude == 0x7f ? u32v{} + 0x7fc00000 : bits;
  return bits | (code & 0x80) << 24;
}

OXY_INLINE Float8Pairs float8_pairs(u32v codes) {
  return {float8_bits(codes & 0xff) >> 16 | float8_bits(codes >> 8 & 0xff),
          float8_bits(codes >> 16 & 0xff) >> 16 | float8_bits(codes >> 24)};
}

#endif

}  // namespace oxytorch::OXY_LEVEL
