// Few channels that lie in planes of their own, side by side.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Lanes without their highest bytes, one after the other; up to 16 bytes behind are overwritten.
OXY_INLINE void store_three_bytes(std::uint8_t* to, u32v v) {
#if defined(__SSSE3__)
  const __m128i within = _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
#if defined(__AVX512F__)
  const __m512i joined = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 15, 15, 15),
      _mm512_shuffle_epi8(reinterpret_cast<__m512i>(v), _mm512_broadcast_i32x4(within)));
#elif defined(__AVX2__)
  const __m256i joined = _mm256_permutevar8x32_epi32(
      _mm256_shuffle_epi8(reinterpret_cast<__m256i>(v), _mm256_broadcastsi128_si256(within)),
      _mm256_setr_epi32(0, 1, 2, 4, 5, 6, 7, 7));
#else
  const __m128i joined = _mm_shuffle_epi8(reinterpret_cast<__m128i>(v), within);
#endif
  std::memcpy(to, &joined, sizeof joined);
#else
  for (int i = 0; i < kLanes; ++i) std::memcpy(to + 3 * i, reinterpret_cast<char*>(&v) + 4 * i, 3);
#endif
}

// Pixels of `channels` planes, `plane_stride` bytes apart; up to 16 bytes behind are overwritten.
static void join_planes(const std::uint8_t* from, std::int64_t plane_stride, std::int64_t channels,
                        std::int64_t pixels, std::uint8_t* to) {
  std::int64_t i = 0;
  if (channels == 3) {
    const std::uint8_t *second = from + plane_stride, *third = second + plane_stride;
    for (; i + kLanes <= pixels; i += kLanes) {
      const u32v low = zero_extend(load_raw<u8v>(from + i, Whole{}));
      const u32v middle = zero_extend(load_raw<u8v>(second + i, Whole{}));
      const u32v high = zero_extend(load_raw<u8v>(third + i, Whole{}));
      store_three_bytes(to + 3 * i, low | middle << 8 | high << 16);
    }
  }
  for (; i < pixels; ++i) {
    for (std::int64_t c = 0; c < channels; ++c) to[i * channels + c] = from[c * plane_stride + i];
  }
}

}  // namespace oxytorch::OXY_LEVEL
