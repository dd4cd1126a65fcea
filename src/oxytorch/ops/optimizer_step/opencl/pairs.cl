// Numbers on chips without float64: the sum of two float32, of about 48 bits and with the range of
// float32 (Dekker, A floating-point technique for extending the available precision, 1971). Tables
// and arguments hold the bits of float64 nonetheless.
typedef struct {
  float high;
  float low;
} number;
typedef ulong argument;

// high + low, where low is small; without a low part if high is no number.
static number normal(float high, float low) {
  const float sum = high + low;
  return isfinite(sum) ? (number){sum, low - (sum - high)} : (number){sum, 0.0f};
}

static number number_of(float x) { return (number){x, 0.0f}; }
static float float_of(number x) { return x.high; }
static long whole_of(number x) { return (long)x.high + (long)x.low; }

static ulong bits_of(argument x) { return x; }

// x 2^shift
static number from_argument_scaled(argument x, int shift) {
  const int exponent = (int)(x >> 52 & 0x7ff);
  const ulong mantissa = x & 0xffffffffffffful;
  const float sign = x >> 63 ? -1.0f : 1.0f;
  if (exponent == 0x7ff) return number_of(mantissa ? NAN : sign * INFINITY);
  if (exponent == 0) return number_of(sign * 0.0f);
  const ulong whole = mantissa | 1ul << 52;
  const float high = convert_float_rte(whole);
  const float low = convert_float_rte((long)whole - (long)high);
  const int power = exponent - 1075 + shift;
  return normal(sign * ldexp(high, power), sign * ldexp(low, power));
}

static argument to_argument_scaled(number x, int power) {
  const ulong sign = (ulong)(as_uint(x.high) >> 31) << 63;
  if (isnan(x.high)) return 0x7ff8000000000000ul;
  if (isinf(x.high)) return sign | 0x7ff0000000000000ul;
  if (x.high == 0.0f) return sign;
  // 2^52 <= |x| 2^shift < 2^53: integers hold the high part, and the low part but for bits
  // that float64 has no place for either.
  const int shift = 52 - ilogb(x.high);
  const float at = sign ? -1.0f : 1.0f;
  ulong whole =
      (ulong)((long)ldexp(at * x.high, shift) + convert_long_rte(ldexp(at * x.low, shift)));
  int exponent = 1075 - shift + power;
  if (whole < 1ul << 52) {
    whole <<= 1;
    --exponent;
  }
  return sign | (ulong)exponent << 52 | (whole & 0xffffffffffffful);
}

static number from_argument(argument x) { return from_argument_scaled(x, 0); }
static argument to_argument(number x) { return to_argument_scaled(x, 0); }

static number add(number x, number y) {
  const float sum = x.high + y.high;
  const float part = sum - x.high;
  const float error = (x.high - (sum - part)) + (y.high - part);
  return isfinite(sum) ? normal(sum, error + (x.low + y.low)) : number_of(sum);
}

static number negated(number x) { return (number){-x.high, -x.low}; }
static number subtract(number x, number y) { return add(x, negated(y)); }

static number multiply(number x, number y) {
  const float product = x.high * y.high;
  if (!isfinite(product)) return number_of(product);
  const float error = fma(x.high, y.high, -product) + (x.high * y.low + x.low * y.high);
  return normal(product, error);
}

static number quotient(number x, number y) {
  const float first = x.high / y.high;
  if (!isfinite(first) || first == 0.0f) return number_of(first);
  const number rest = subtract(x, multiply(y, number_of(first)));
  const float second = rest.high / y.high;
  const number more = subtract(rest, multiply(y, number_of(second)));
  return add(normal(first, second), number_of(more.high / y.high));
}

static number root(number x) {
  const float first = sqrt(x.high);
  if (!isfinite(first) || first == 0.0f) return number_of(first);
  const number rest = subtract(x, multiply(number_of(first), number_of(first)));
  return normal(first, rest.high / (2.0f * first));
}

static int is_less(number x, number y) {
  return x.high < y.high || (x.high == y.high && x.low < y.low);
}

static int is_zero(number x) { return x.high == 0.0f; }

typedef number precise;
static precise precise_of(number x) { return x; }
static number number_of_precise(precise x) { return x; }
static precise multiply_precisely(precise x, precise y) { return multiply(x, y); }

// The natural logarithm of 2.
#define LOG_2 ((number){0.693147182464599609375f, -1.904654323148236e-9f})

// e^x by its series, of what is left of x after whole powers of 2.
static number exponential(number x) {
  const float powers = rint(x.high / LOG_2.high);
  const number rest = subtract(x, multiply(number_of(powers), LOG_2));
  number sum = number_of(1.0f);
#pragma unroll 1
  for (int i = 16; i > 0; --i) {
    sum = add(number_of(1.0f), quotient(multiply(rest, sum), number_of((float)i)));
  }
  return (number){ldexp(sum.high, (int)powers), ldexp(sum.low, (int)powers)};
}

// By Newton's method from the logarithm in float32.
static number logarithm(number x) {
  const int powers = ilogb(x.high);
  const number part = {ldexp(x.high, -powers), ldexp(x.low, -powers)};
  const number first = number_of(log(part.high));
  const number error = subtract(multiply(part, exponential(negated(first))), number_of(1.0f));
  // log(1 + e) = e - e^2 / 2 + ...
  const number more = subtract(error, multiply(error, multiply(error, number_of(0.5f))));
  return add(multiply(number_of((float)powers), LOG_2), add(first, more));
}

static number power_of_any(number base, number exponent) {
  if (!(base.high > 0.0f) || !isfinite(base.high)) {
    return number_of(pow(base.high, exponent.high));
  }
  return exponential(multiply(exponent, logarithm(base)));
}

// Squares of float32 are kept in three sums by size, scaled, so that none is too large or too small
// (Blue, A portable Fortran program to find the Euclidean norm of a vector, 1978).
#define BINS 3
static int bin_of(float x) { return fabs(x) > 0x1p40f ? 2 : fabs(x) < 0x1p-40f ? 0 : 1; }
static int shift_of(int bin) { return 80 * (bin - 1); }
