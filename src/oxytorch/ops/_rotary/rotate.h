// The arithmetic of rotary position embedding for one row. Included by kernel.cpp files only.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Pairs are (i, i + half): the second half is rotated against the first.
template <class T, class Angle, class Put>
OXY_INLINE void rotate_halves(const T* x, const Angle* cos, const Angle* sin, std::int64_t half,
                              Put put) {
  sweep(0, half, [&](std::int64_t i, auto count) {
    const f32v first = load(x + i, count);
    const f32v second = load(x + half + i, count);
    put(i, first * load(cos + i, count) - second * load(sin + i, count), count);
    put(half + i, second * load(cos + half + i, count) + first * load(sin + half + i, count),
        count);
  });
}

// Pairs are (2 i, 2 i + 1).
template <class T, class Angle, class Put>
OXY_INLINE void rotate_neighbours(const T* x, const Angle* cos, const Angle* sin, std::int64_t dim,
                                  Put put) {
  i32v swap;
  f32v sign;
  for (int i = 0; i < kLanes; ++i) {
    swap[i] = i ^ 1;
    sign[i] = i % 2 == 0 ? -1.0f : 1.0f;
  }
  sweep(0, dim, [&](std::int64_t i, auto count) {
    const f32v v = load(x + i, count);
    const f32v other = __builtin_shuffle(v, swap) * sign;
    put(i, v * load(cos + i, count) + other * load(sin + i, count), count);
  });
}

}  // namespace oxytorch::OXY_LEVEL
