// Elementary functions of vectors of float32, each as accurate as a result of its type needs.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// Rounded for itself: the compiler would join a product with the sum that it is part of, on the
// levels that can, and the results of levels, or of two sweeps over the same numbers, would differ.
OXY_INLINE f32v rounded_product(f32v product) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(product));
#elif defined(__FMA__)
  __asm__("" : "+x"(product));
#endif
  return product;
}

// 1 / v for finite v, within 2 units in the last place. v has to be a normal number.
OXY_INLINE f32v reciprocal(f32v v) {
#if defined(__AVX512F__)
  const f32v guess = reinterpret_cast<f32v>(_mm512_rcp14_ps(reinterpret_cast<__m512>(v)));
  return guess * (2.0f - v * guess);
#else
  return 1.0f / v;
#endif
}

// 1 / v with at least 13 bits, enough for results of 16 bits.
OXY_INLINE f32v coarse_reciprocal(f32v v) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(_mm512_rcp14_ps(reinterpret_cast<__m512>(v)));
#else
  return 1.0f / v;
#endif
}

// v 2^n for an integer n between -152 and 130.
OXY_INLINE f32v scale_by_power(f32v v, f32v n) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(
      _mm512_scalef_ps(reinterpret_cast<__m512>(v), reinterpret_cast<__m512>(n)));
#else
  // Two factors, because 2^n alone leaves the range of float32.
  const i32v whole = __builtin_convertvector(n == n ? n : f32v{}, i32v);
  const i32v half = whole >> 1;
  const f32v first = reinterpret_cast<f32v>((half + 127) << 23);
  const f32v second = reinterpret_cast<f32v>((whole - half + 127) << 23);
  return v * first * second;
#endif
}

// exp(x), within 2 units in the last place; zero below exp(-87) = 1.6e-38, since subnormal results
// take a hundred times as long. Infinities and NaN as in C. 2^n exp(r) with
// x = n log(2) + r (Cody and Waite, Software Manual for the Elementary Functions, 1980).
// Coefficients: tools/fit_polynomials.py.
OXY_INLINE f32v exponential(f32v x) {
  constexpr float kLeast = -87.0f;
  const f32v given = x;
  x = maximum(splat(kLeast), x);
  x = minimum(splat(89.0f), x);
  const f32v n = nearest(x * 1.44269504f);
  f32v r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32v p = splat(1.392618181e-03f);
  p = p * r + 8.363177630e-03f;
  p = p * r + 4.166655463e-02f;
  p = p * r + 1.666657700e-01f;
  p = p * r + 5.000000000e-01f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return given < kLeast ? splat(0.0f) : scale_by_power(p, n);
}

// 2^r for |r| <= 1/2.
inline constexpr float kPower[] = {1.000000000e+00f, 6.931210452e-01f, 2.402234904e-01f,
                                   5.592197584e-02f, 9.666368515e-03f};

// 2^y for y <= 0 with at least 18 bits, enough for results of 16 bits; zero for y below -125.5.
OXY_INLINE f32v coarse_power_of_two(f32v y) {
  constexpr float kLeast = -125.5f;
  const f32v given = y;
  y = maximum(splat(kLeast), y);
  const f32v n = nearest(y);
  const f32v r = y - n;
  f32v p = splat(kPower[4]);
  for (int i = 3; i >= 0; --i) p = p * r + kPower[i];
  return given < kLeast ? splat(0.0f) : scale_by_power(p, n);
}

// exp(-m) for m >= 0, as accurate as a result of type T needs.
OXY_INLINE f32v decay(f32v m, float) { return exponential(-m); }

template <class T>
OXY_INLINE f32v decay(f32v m, T) {
  return coarse_power_of_two(m * -1.44269504f);
}

// 1 / v for a normal v, as accurate as a result of type T needs.
OXY_INLINE f32v inverse(f32v v, float) { return reciprocal(v); }

template <class T>
OXY_INLINE f32v inverse(f32v v, T) {
  return coarse_reciprocal(v);
}

// 1 / (1 + exp(-x)), as accurate as a result of type T needs; no digits cancel on either side.
template <class T>
OXY_INLINE f32v sigmoid(f32v x, T) {
  const f32v e = decay(magnitude(x), T{});
  return (x < 0.0f ? e : splat(1.0f)) * inverse(1.0f + e, T{});
}

// tanh(x), as accurate as a result of type T needs; small x by x + x^3 p(x^2), where the quotient
// would lose digits. Coefficients: tools/fit_polynomials.py.
template <class T>
OXY_INLINE f32v hyperbolic_tangent(f32v x, T) {
  constexpr float kTanh[] = {-3.333332894e-01f, 1.333276974e-01f, -5.385090958e-02f,
                             2.099717900e-02f, -6.096714166e-03f};
  const f32v z = x * x;
  f32v p = splat(kTanh[4]);
  for (int i = 3; i >= 0; --i) p = p * z + kTanh[i];
  const f32v small = x + x * z * p;
  const f32v e = decay(2.0f * magnitude(x), T{});
  const f32v large = (1.0f - e) * inverse(1.0f + e, T{});
  return magnitude(x) < 0.625f ? small : x < 0.0f ? -large : large;
}

}  // namespace oxytorch::OXY_LEVEL
