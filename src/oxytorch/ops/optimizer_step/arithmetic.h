// The functions that rules call, in the arithmetic of torch: the same bits at every level.
#pragma once

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// x y + z, rounded once.
OXY_INLINE f32v fused_multiply_add(f32v x, f32v y, f32v z) {
#if defined(__FMA__)
  return multiply_add(x, y, z);
#else
  // The product is exact in float64. Rounding the sum to odd there makes the second rounding right
  // (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
  typedef double f64v __attribute__((vector_size(2 * kVectorBytes)));
  typedef std::int64_t i64v __attribute__((vector_size(2 * kVectorBytes)));
  const f64v product = __builtin_convertvector(x, f64v) * __builtin_convertvector(y, f64v);
  const f64v addend = __builtin_convertvector(z, f64v);
  const f64v total = product + addend;
  const f64v part = total - product;
  const f64v error = (product - (total - part)) + (addend - part);
  const i64v bits = reinterpret_cast<i64v>(total);
  const i64v towards = ((error > 0.0) == (total > 0.0)) ? (i64v{} + 1) : (i64v{} - 1);
  const i64v change = (error != 0.0) & ((bits & 1) == 0) & (total - total == 0.0);
  return __builtin_convertvector(reinterpret_cast<f64v>(bits + (towards & change)), f32v);
#endif
}

// x / y, rounded once, for a normal result; y is the same for all lanes and inverse is 1 / y. The
// remainder is exact (Markstein, IA-64 and Elementary Functions, 2000).
OXY_INLINE f32v divide(f32v x, f32v y, [[maybe_unused]] f32v inverse) {
#if defined(__FMA__)
  const f32v quotient = x * inverse;
  const f32v remainder = fused_multiply_add(-quotient, y, x);
  // Infinity and NaN have no remainder.
  return remainder == remainder ? fused_multiply_add(remainder, inverse, quotient) : quotient;
#else
  return x / y;
#endif
}

OXY_INLINE f32v square_root(f32v x) {
#if defined(__AVX512F__)
  return reinterpret_cast<f32v>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<f32v>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#else
  f32v result;
  for (int i = 0; i < kLanes; ++i) result[i] = __builtin_sqrtf(x[i]);
  return result;
#endif
}

// The larger of two values; NaN if either is.
OXY_INLINE f32v larger(f32v x, f32v y) { return ((x > y) | (x != x)) ? x : y; }

}  // namespace oxytorch::OXY_LEVEL
