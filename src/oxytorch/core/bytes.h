// Vectors of bytes, as wide as those of float32, and what interleaves and looks them up within each
// 128 bits of them.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

typedef std::uint8_t bytesv __attribute__((vector_size(kVectorBytes)));

#if defined(__SSE2__)

// An instruction that the widths have under the same name, on registers of integers.
#if defined(__AVX512F__)
typedef __m512i Register;
#define OXY_OF_WIDTH(name) _mm512_##name
#elif defined(__AVX2__)
typedef __m256i Register;
#define OXY_OF_WIDTH(name) _mm256_##name
#else
typedef __m128i Register;
#define OXY_OF_WIDTH(name) _mm_##name
#endif

template <class V>
OXY_INLINE Register in_register(V v) {
  return reinterpret_cast<Register>(v);
}

OXY_INLINE u32v interleave_low(bytesv a, bytesv b) {
  return reinterpret_cast<u32v>(OXY_OF_WIDTH(unpacklo_epi8)(in_register(a), in_register(b)));
}
OXY_INLINE u32v interleave_high(bytesv a, bytesv b) {
  return reinterpret_cast<u32v>(OXY_OF_WIDTH(unpackhi_epi8)(in_register(a), in_register(b)));
}
// The same of pairs of bytes.
OXY_INLINE u32v interleave_pairs_low(u32v a, u32v b) {
  return reinterpret_cast<u32v>(OXY_OF_WIDTH(unpacklo_epi16)(in_register(a), in_register(b)));
}
OXY_INLINE u32v interleave_pairs_high(u32v a, u32v b) {
  return reinterpret_cast<u32v>(OXY_OF_WIDTH(unpackhi_epi16)(in_register(a), in_register(b)));
}

#if defined(__SSSE3__)
// 0 for indexes from 128 on.
OXY_INLINE bytesv look_up(bytesv table, bytesv index) {
  return reinterpret_cast<bytesv>(
      OXY_OF_WIDTH(shuffle_epi8)(in_register(table), in_register(index)));
}
#endif

#endif

}  // namespace oxytorch::OXY_LEVEL
