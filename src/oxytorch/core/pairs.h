// Stores of two vectors at once.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Neighbouring vectors: those of 16 bits fill a register.
template <class T>
OXY_INLINE void store_pair(T* p, f32v first, f32v second) {
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, bf16)) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(
                               reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first))));
    return;
  }
#endif
  store(p, first);
  store(p + kLanes, second);
}

}  // namespace oxytorch::OXY_LEVEL
