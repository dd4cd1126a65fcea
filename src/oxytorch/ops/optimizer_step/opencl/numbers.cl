// What is the same for numbers of float64 and for pairs.

static int is_greater(number x, number y) { return is_less(y, x); }
// x where either is no number, as in Python and C++.
static number larger_number(number x, number y) { return is_less(x, y) ? y : x; }
static number smaller_number(number x, number y) { return is_less(y, x) ? y : x; }

// base^exponent for base >= 0. Whole powers are products of more digits than a number has:
// 1 - beta^step has none to lose.
static number power(number base, number exponent) {
  const float size = fabs(float_of(exponent));
  const long whole = size < 2147483648.0f ? whole_of(exponent) : 0;
  const number left = subtract(exponent, number_of((float)whole));
  if (!(size < 16777216.0f) || !is_zero(left)) return power_of_any(base, exponent);
  precise factor = precise_of(base);
  precise result = precise_of(number_of(1.0f));
#pragma unroll 1
  for (ulong rest = (ulong)(whole < 0 ? -whole : whole); rest; rest >>= 1) {
    if (rest & 1) result = multiply_precisely(result, factor);
    factor = multiply_precisely(factor, factor);
  }
  const number found = number_of_precise(result);
  return whole < 0 ? quotient(number_of(1.0f), found) : found;
}
