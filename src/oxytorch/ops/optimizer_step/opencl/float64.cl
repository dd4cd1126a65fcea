// Numbers of float64, for what is computed once a tensor and step, and for sums.
#pragma OPENCL EXTENSION cl_khr_fp64 : enable

typedef double number;
typedef double argument;  // a number as kernels are given it and as tables hold it

static number number_of(float x) { return x; }
static ulong bits_of(argument x) { return as_ulong(x); }
// x 2^shift
static number from_argument_scaled(argument x, int shift) { return ldexp(x, shift); }
static argument to_argument_scaled(number x, int shift) { return ldexp(x, shift); }
static number from_argument(argument x) { return x; }
static argument to_argument(number x) { return x; }
static float float_of(number x) { return (float)x; }
static long whole_of(number x) { return (long)x; }

static number add(number x, number y) { return x + y; }
static number subtract(number x, number y) { return x - y; }
static number multiply(number x, number y) { return x * y; }
static number quotient(number x, number y) { return x / y; }
static number negated(number x) { return -x; }
static number root(number x) { return sqrt(x); }
static int is_less(number x, number y) { return x < y; }
static int is_zero(number x) { return x == 0.0; }

// A value as the sum of two numbers (Dekker, A floating-point technique for extending the available
// precision, 1971).
typedef struct {
  double high;
  double low;
} precise;

static precise precise_of(number x) { return (precise){x, 0.0}; }
static number number_of_precise(precise x) { return x.high; }

static precise multiply_precisely(precise x, precise y) {
  const double product = x.high * y.high;
  const double error = fma(x.high, y.high, -product) + (x.high * y.low + x.low * y.high);
  const double high = product + error;
  return (precise){high, error - (high - product)};
}

// Squares of float32 are exact and neither too large nor too small.
#define BINS 1
static int bin_of(float x) { return 0; }
static int shift_of(int bin) { return 0; }

static number power_of_any(number base, number exponent) { return pow(base, exponent); }
