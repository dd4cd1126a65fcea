"""The functions that rules call, for Triton, with the same bits as those of arithmetic.h."""

import triton
import triton.language as tl

EXPONENT_BITS = tl.constexpr(31)


@triton.jit
def sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def maximum(x, y):
    """The larger of two values; NaN if either is."""
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def fused_multiply_add(x, y, z):
    """x y + z, rounded once."""
    return tl.fma(x, y, z)


@triton.jit
def divide(x, y):
    """x / y, rounded once."""
    return tl.div_rn(x, y)


@triton.jit
def divide_by_scalar(x, y):
    """x / y, rounded once, for a normal result; y is the same for all elements.

    The remainder is exact (Markstein, IA-64 and Elementary Functions, 2000).
    """
    inverse = tl.div_rn(1.0, y)
    quotient = x * inverse
    remainder = tl.fma(-quotient, y, x)
    # Infinity and NaN have no remainder.
    return tl.where(remainder == remainder, tl.fma(remainder, inverse, quotient), quotient)


# Of float64, for what is computed once a tensor and step.


@triton.jit
def square_root(x):
    return tl.sqrt(x)


@triton.jit
def larger(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def smaller(x, y):
    return tl.where(x < y, x, y)


@triton.jit
def power(base, exponent):
    """base ** exponent for base >= 0: to the last bit for whole exponents below 2^31, as in C.

    Whole powers are products of pairs of float64 whose sum is the value (Dekker, A floating-point
    technique for extending the available precision, 1971): 1 - beta ** step has no digits to lose.
    """
    size = tl.abs(exponent + base * 0.0)
    factor_high = base + exponent * 0.0
    factor_low = factor_high * 0.0
    high = factor_low + 1.0
    low = factor_low
    left = tl.where(size < 2147483648.0, size, 0.0).to(tl.int64)
    for _ in range(EXPONENT_BITS):
        is_used = (left & 1) != 0
        next_high, next_low = _multiply_pairs(high, low, factor_high, factor_low)
        high = tl.where(is_used, next_high, high)
        low = tl.where(is_used, next_low, low)
        factor_high, factor_low = _multiply_pairs(factor_high, factor_low, factor_high, factor_low)
        left = left >> 1
    whole = tl.where(exponent < 0.0, 1.0 / high, high)
    other = tl.exp2(exponent * tl.log2(base))
    return tl.where((size == tl.floor(size)) & (size < 2147483648.0), whole, other)


@triton.jit
def _multiply_pairs(x_high, x_low, y_high, y_low):
    product = x_high * y_high
    error = tl.fma(x_high, y_high, -product) + (x_high * y_low + x_low * y_high)
    high = product + error
    return high, error - (high - product)
