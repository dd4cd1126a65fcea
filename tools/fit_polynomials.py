"""Prints the polynomial coefficients of the kernels: near-minimax fits.

Interpolation at Chebyshev nodes in 60-digit arithmetic is within a small factor of the best
polynomial of the same degree; the residual printed beside each fit is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Callable

from mpmath import cos, erfc, exp, expm1, linspace, lu_solve, matrix, mp, mpf, pi, sqrt, tanh

mp.dps = 60


def fit(function: Callable[[mpf], mpf], low: float, high: float, degree: int) -> list[mpf]:
    """Coefficients, lowest first, of the polynomial through `function` at Chebyshev nodes."""
    count = degree + 1
    nodes = [
        (mpf(low) + mpf(high)) / 2
        + (mpf(high) - mpf(low)) / 2 * cos(pi * (2 * i + 1) / (2 * count))
        for i in range(count)
    ]
    powers = matrix([[node**power for power in range(count)] for node in nodes])
    return list(lu_solve(powers, matrix([function(node) for node in nodes])))


def show(name: str, function: Callable[[mpf], mpf], low: float, high: float, degree: int) -> None:
    """Prints one fit and its largest relative residual."""
    coefficients = fit(function, low, high, degree)
    residual = max(
        abs(sum(c * x**i for i, c in enumerate(coefficients)) / function(x) - 1)
        for x in linspace(mpf(low), mpf(high), 2000)
    )
    print(f"{name}: degree {degree} on [{low}, {high}], relative residual {float(residual):.1e}")
    print("  " + ", ".join(f"{float(c):.9e}f" for c in coefficients))


if __name__ == "__main__":
    tiny = mpf("1e-20")
    # exp(r) = 1 + r + r^2 p(r)
    show("exp", lambda r: (expm1(r + tiny) - (r + tiny)) / (r + tiny) ** 2, -0.3466, 0.3466, 4)
    # 2^y, enough for results of 16 bits
    show("power of two", lambda y: mpf(2) ** y, -0.5, 0.5, 4)
    # tanh(x) = x + x^3 p(x^2)
    show(
        "tanh",
        lambda z: (tanh(sqrt(z + tiny)) / sqrt(z + tiny) - 1) / (z + tiny),
        0.0,
        0.390625,
        4,
    )

    # P(Z < -t) = exp(-t^2 / 2) u p(u) for a standard normal Z, with u = 1 / (1 + slope t)
    def tail(slope: str) -> Callable[[mpf], mpf]:
        def of(u: mpf) -> mpf:
            t = (1 / u - 1) / mpf(slope)
            return erfc(t / sqrt(mpf(2))) / 2 * exp(t * t / 2) / u

        return of

    show("normal tail, slope 0.3", tail("0.3"), 1 / (1 + 0.3 * 14), 1.0, 7)
    show("normal tail, slope 0.4, 16 bits", tail("0.4"), 1 / (1 + 0.4 * 13), 1.0, 4)
