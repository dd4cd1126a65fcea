// Four lines of bytes as quads: a quad has a byte of each line.
#pragma once

#include "core/bytes.h"

namespace oxytorch::OXY_LEVEL {

// Where channels of a pixel lie, and those of the next one.
struct ByteLine {
  const std::uint8_t* from;
  std::int64_t step;
};

// `width` bytes of each of as many pixels as a vector holds, side by side.
template <int width>
OXY_INLINE bytesv load_pixels(const ByteLine& line) {
  bytesv v;
#if defined(__AVX512F__)
  if constexpr (width == 32) {
    const auto* second = reinterpret_cast<const __m256i*>(line.from + line.step);
    const __m512i low =
        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(line.from)));
    return reinterpret_cast<bytesv>(_mm512_inserti64x4(low, _mm256_loadu_si256(second), 1));
  } else if constexpr (width == 16) {
    const auto pixel = [&](std::int64_t i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(line.from + i * line.step));
    };
    __m512i four = _mm512_castsi128_si512(pixel(0));
    four = _mm512_inserti32x4(four, pixel(1), 1);
    four = _mm512_inserti32x4(four, pixel(2), 2);
    return reinterpret_cast<bytesv>(_mm512_inserti32x4(four, pixel(3), 3));
  }
#elif defined(__AVX2__)
  if constexpr (width == 16) {
    const auto* second = reinterpret_cast<const __m128i*>(line.from + line.step);
    return reinterpret_cast<bytesv>(_mm256_setr_m128i(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(line.from)), _mm_loadu_si128(second)));
  }
#endif
  std::memcpy(&v, line.from, sizeof v);
  return v;
}

// The first `count` bytes of a pixel, 0 < count <= width, as those of the first one above.
OXY_INLINE bytesv load_some_bytes(const std::uint8_t* from, std::int64_t count) {
#if defined(__AVX512F__)
  const __mmask64 some = ~std::uint64_t{0} >> (64 - count);
  return reinterpret_cast<bytesv>(_mm512_maskz_loadu_epi8(some, from));
#else
  bytesv v{};
  std::memcpy(&v, from, static_cast<std::size_t>(count));
  return v;
#endif
}

// What of a vector is interleaved with others, so that quads come in the order of the bytes: its
// 128 bits of a result come from one lane of each vector.
OXY_INLINE bytesv in_order_of_quads(bytesv v) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return reinterpret_cast<bytesv>(_mm512_permutexvar_epi32(order, in_register(v)));
#elif defined(__AVX2__)
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  return reinterpret_cast<bytesv>(_mm256_permutevar8x32_epi32(in_register(v), order));
#else
  return v;
#endif
}

// Four vectors of quads, in the order of the bytes.
OXY_INLINE void interleave_bytes(const bytesv (&lines)[4], u32v (&quads)[4]) {
#if defined(__SSE2__)
  bytesv v[4];
  for (int i = 0; i < 4; ++i) v[i] = in_order_of_quads(lines[i]);
  const u32v low[] = {interleave_low(v[0], v[1]), interleave_low(v[2], v[3])};
  const u32v high[] = {interleave_high(v[0], v[1]), interleave_high(v[2], v[3])};
  quads[0] = interleave_pairs_low(low[0], low[1]);
  quads[1] = interleave_pairs_high(low[0], low[1]);
  quads[2] = interleave_pairs_low(high[0], high[1]);
  quads[3] = interleave_pairs_high(high[0], high[1]);
#else
  for (int i = 0; i < kVectorBytes; ++i) {
    std::uint32_t quad = 0;
    for (int line = 3; line >= 0; --line) quad = quad << 8 | lines[line][i];
    quads[i / kLanes][i % kLanes] = quad;
  }
#endif
}

}  // namespace oxytorch::OXY_LEVEL
