// Matrices of 32-bit units turned round in registers.
#pragma once

#include "core/vec.h"

#if defined(__AVX512F__)

namespace oxytorch::OXY_LEVEL {

// Turns 16 rows of 16 units round, in four steps that swap neighbours 8, 4, 2 and 1 apart.
OXY_INLINE void turn(__m512i (&rows)[16]) {
  for (int step = 8; step > 0; step /= 2) {
    alignas(64) std::int32_t low[16], high[16];
    for (int lane = 0; lane < 16; ++lane) {
      low[lane] = lane & step ? 16 + (lane ^ step) : lane;
      high[lane] = lane & step ? 16 + lane : lane ^ step;
    }
    const __m512i take_low = _mm512_load_si512(low), take_high = _mm512_load_si512(high);
    for (int i = 0; i < 16; ++i) {
      if (i & step) continue;
      const __m512i first = rows[i], second = rows[i + step];
      rows[i] = _mm512_permutex2var_epi32(first, take_low, second);
      rows[i + step] = _mm512_permutex2var_epi32(first, take_high, second);
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL

#endif
