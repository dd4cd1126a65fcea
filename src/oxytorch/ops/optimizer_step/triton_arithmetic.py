"""The functions that rules call, for Triton, with the same bits as those of arithmetic.h."""

import triton
import triton.language as tl

EXPONENT_BITS = tl.constexpr(31)
"""Of the largest whole exponent."""


def has_ptx(_semantic=None):
    """Whether the kernel is compiled for NVIDIA."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


has_ptx.__triton_builtin__ = True


def _four(steps, sound, least, slow):
    """PTX for four elements: `steps` for each, then `slow` for all if one is not sound.

    The instructions that round correctly branch for each element, and all that follows waits for
    it. The steps are those that they take where nothing overflows and no bit is lost on the way:
    then the magnitudes of the `sound` registers are at least `least`, else less or NaN. In the text
    # is the element, X and Y are the arguments, s is the result.
    """
    text = ["{", ".reg .pred ok;", ".reg .f32 r, n, e, g, h, c, s<4>, size, low;"]
    text.append("mov.f32 low, 0f3F800000;")
    for i in range(4):
        sizes = [f"abs.f32 size, {name}; min.NaN.f32 low, low, size;" for name in sound]
        text += [line.replace("#", str(i)) for line in [*steps, *sizes]]
    text += [f"setp.ge.f32 ok, low, {least};", "@ok bra done;"]
    text += [slow.replace("#", str(i)) for i in range(4)]
    text += ["done:", *(f"mov.f32 ${i}, s{i};" for i in range(4)), "}"]
    joined = "\n".join(text)
    for i in range(4):
        joined = joined.replace(f"X{i}", f"${4 + i}").replace(f"Y{i}", f"${8 + i}")
    return tl.constexpr(joined)


SQRT = _four(
    [
        "rsqrt.approx.ftz.f32 r, X#;",
        "mul.rn.f32 g, X#, r;",
        "mul.rn.f32 h, r, 0f3F000000;",
        "neg.f32 n, g;",
        "fma.rn.f32 e, n, g, X#;",
        "fma.rn.f32 s#, e, h, g;",
        # X, or NaN where the error is not finite: infinity, 0, and what rsqrt takes for 0.
        "fma.rn.f32 c, e, 0f00000000, X#;",
    ],
    ["c"],
    "0f0D800000",  # 2^-100
    "sqrt.rn.f32 s#, X#;",
)
DIVIDE = _four(
    [
        "rcp.approx.ftz.f32 r, Y#;",
        "neg.f32 n, Y#;",
        "fma.rn.f32 e, n, r, 0f3F800000;",
        "fma.rn.f32 r, e, r, r;",
        "mul.rn.f32 g, X#, r;",
        "fma.rn.f32 e, n, g, X#;",
        "fma.rn.f32 s#, e, r, g;",
    ],
    ["s#", "X#"],
    "0f0D800000",  # 2^-100
    "div.rn.f32 s#, X#, Y#;",
)

UNARY = tl.constexpr(",".join(["=f"] * 4 + ["f"] * 4))
BINARY = tl.constexpr(",".join(["=f"] * 4 + ["f"] * 8))
"""Operands of PTX for four elements, with one argument and with two."""


@triton.jit
def sqrt(x):
    """The square root, rounded once."""
    if has_ptx():
        return tl.inline_asm_elementwise(SQRT, UNARY, [x], dtype=tl.float32, is_pure=True, pack=4)
    else:
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
    if has_ptx():
        return tl.inline_asm_elementwise(
            DIVIDE, BINARY, [x, y], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
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
    """As Python's max, which leaves a NaN in the second place."""
    return tl.where(y > x, y, x)


@triton.jit
def smaller(x, y):
    """As Python's min, which leaves a NaN in the second place."""
    return tl.where(y < x, y, x)


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
