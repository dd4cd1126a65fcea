// GELU and its form with tanh. Included by files of a level only.
#pragma once

#include "core/functions.h"

namespace oxytorch::OXY_LEVEL {

// P(Z < -t) = exp(-t^2 / 2) u p(u) for a standard normal Z, u = 1 / (1 + slope t).
// Coefficients: tools/fit_polynomials.py.

OXY_INLINE f32v normal_tail(f32v t, float) {
  constexpr float kTail[] = {1.196144353e-01f,  1.209955612e-01f,  9.832776816e-02f,
                             1.340211483e-01f,  -6.437430307e-02f, 2.183154581e-01f,
                             -1.643185171e-01f, 3.741848192e-02f};
  const f32v u = reciprocal(1.0f + 0.3f * t);
  f32v p = splat(kTail[7]);
  for (int i = 6; i >= 0; --i) p = p * u + kTail[i];
  return u * p * exponential(-0.5f * t * t);
}

// For results of 16 bits; log2(e) / 2 = 0.7213...
template <class T>
OXY_INLINE f32v normal_tail(f32v t, T) {
  constexpr float kTail[] = {1.597473040e-01f, 1.589901461e-01f, 1.250827430e-01f, 1.386092761e-01f,
                             -8.246693041e-02f};
  const f32v u = coarse_reciprocal(1.0f + 0.4f * t);
  f32v p = splat(kTail[4]);
  for (int i = 3; i >= 0; --i) p = p * u + kTail[i];
  return u * p * coarse_power_of_two(t * t * -0.721347520f);
}

// v P(Z < v). The tail is taken on the side where it is small, so that no digits cancel. From 12.8
// on, where it would become subnormal, it is zero: minus infinity gives NaN, as the formula does.
template <class T>
OXY_INLINE f32v gelu(f32v v, T) {
  constexpr float kMost = 12.8f;
  const f32v t = magnitude(v);
  const f32v tail = t > kMost ? splat(0.0f) : normal_tail(minimum(splat(kMost), t), T{});
  return v * (v < 0.0f ? tail : 1.0f - tail);
}

// v (1 + tanh(w)) / 2 = v / (1 + exp(-2 w)), w = sqrt(2 / pi) (v + 0.044715 v^3).
template <class T>
OXY_INLINE f32v gelu_tanh(f32v v, T) {
  return v * sigmoid(v * (1.59576912f + 0.0713548163f * v * v), T{});
}

}  // namespace oxytorch::OXY_LEVEL
