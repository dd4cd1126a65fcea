// Elements: WIDTH of them at a time in float32, with the bits of arithmetic.h.
#pragma OPENCL FP_CONTRACT OFF

#define WIDTH 4
typedef float4 value;
typedef uint4 bits;

// The larger of two values; NaN if either is.
static value larger(value x, value y) { return ((x > y) | (x != x)) ? x : y; }

// The first `have` elements of x, zero after them.
static value keep(value x, int have) {
  return ((int4)(0, 1, 2, 3) < (int4)(have)) ? x : (value)(0.0f);
}
