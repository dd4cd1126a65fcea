#include "ops/gelu_mul/kernel.h"

#include "ops/_gated/rows.h"

namespace oxytorch::OXY_LEVEL {

// P(Z < -t) = exp(-t^2 / 2) u p(u) for a standard normal Z, u = 1 / (1 + 0.3 t).
// Coefficients: tools/fit_polynomials.py.
inline constexpr float kTail[] = {1.196144353e-01f,  1.209955612e-01f,  9.832776816e-02f,
                                  1.340211483e-01f,  -6.437430307e-02f, 2.183154581e-01f,
                                  -1.643185171e-01f, 3.741848192e-02f};

// v P(Z < v). The tail is taken on the side where it is small, so that no digits cancel.
OXY_INLINE f32v gelu(f32v v) {
  const f32v u = 1.0f / (1.0f + 0.3f * magnitude(v));
  f32v p = splat(kTail[7]);
  for (int i = 6; i >= 0; --i) p = p * u + kTail[i];
  const f32v tail = u * p * exponential(-0.5f * v * v);
  return v * (v < 0.0f ? tail : 1.0f - tail);
}

// v (1 + tanh(w)) / 2 = v / (1 + exp(-2 w)), w = sqrt(2 / pi) (v + 0.044715 v^3).
OXY_INLINE f32v gelu_tanh(f32v v) {
  const f32v twice = v * (1.59576912f + 0.0713548163f * v * v);
  return v / (1.0f + exponential(-twice));
}

static void gelu_mul(const GatedArgs& args, std::int64_t begin, std::int64_t end) {
  if (args.tanh_form) {
    gated(args, begin, end, [](f32v v) { return gelu_tanh(v); });
  } else {
    gated(args, begin, end, [](f32v v) { return gelu(v); });
  }
}

}  // namespace oxytorch::OXY_LEVEL
