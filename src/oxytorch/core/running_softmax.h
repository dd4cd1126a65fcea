// The softmax of scores that come block by block (Dao et al., FlashAttention, 2022, algorithm 1).
#pragma once

#include "core/functions.h"

namespace oxytorch::OXY_LEVEL {

// What is known of a row after some blocks: the largest score, and the total of the exponentials
// relative to it. V: float, or f32v for a row in each lane.
template <class V>
struct Running {
  V top = V{} + kMinusInfinity;
  V total{};
};

// What to subtract from scores with this top before exponentials: of a row of which nothing is kept
// so far these are then exp(-inf), not NaN.
OXY_INLINE f32v shift_of(f32v top) { return top == kMinusInfinity ? f32v{} : top; }
OXY_INLINE float shift_of(float top) { return top == kMinusInfinity ? 0.0f : top; }

// Takes the top of another block in. Returns the factor, as accurate as a result of type T needs,
// of what was summed before, the total included.

template <class T>
OXY_INLINE f32v raise_top(Running<f32v>& running, f32v block_top, T) {
  const f32v top = maximum(block_top, running.top);
  const f32v factor = decay(shift_of(top) - running.top, T{});
  running = {top, running.total * factor};
  return factor;
}

template <class T>
OXY_INLINE float raise_top(Running<float>& running, float block_top, T) {
  if (!(block_top > running.top)) return 1.0f;
  const float top = block_top;
  const float factor = decay(splat(shift_of(top) - running.top), T{})[0];
  running = {top, running.total * factor};
  return factor;
}

}  // namespace oxytorch::OXY_LEVEL
