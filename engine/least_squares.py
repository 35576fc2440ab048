"""Least squares with coefficients that are not negative, from the normal equations. Plain Python: they are a dozen.

The active-set method of C. L. Lawson and R. J. Hanson, Solving Least Squares Problems (1974), chapter 23, started from
the last solution: between two fits hardly anything changes, and then one set of equations is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Final

Vector = list[float]
Matrix = list[Vector]

_TOLERANCE: Final = 1e-9  # of a gradient, the diagonal being 1


def not_negative(gram: Matrix, target: Vector, start: Vector) -> Vector:
    """The x ≥ 0 of least ½ xᵀ·gram·x - target·x. ``gram`` is positive definite with a diagonal of about 1."""
    x = list(start)
    free = [j for j, value in enumerate(x) if value > 0]
    for _ in range(3 * len(x)):
        x, free = _descend(gram, target, x, free)
        gradient = [t - dot(row, x) for t, row in zip(target, gram, strict=True)]
        best = max((j for j in range(len(x)) if j not in free), key=gradient.__getitem__, default=None)
        if best is None or gradient[best] <= _TOLERANCE:
            break
        free = [*free, best]
    return x


def _descend(gram: Matrix, target: Vector, x: Vector, free: list[int]) -> tuple[Vector, list[int]]:
    """Towards the least over the free coefficients, giving up those that reach 0."""
    while free:
        among_free = [[gram[i][j] for j in free] for i in free]
        least = dict(zip(free, solve(among_free, [target[i] for i in free]), strict=True))
        falling = [j for j in free if least[j] <= 0]
        if not falling:
            return [least.get(j, 0.0) for j in range(len(x))], free
        step = min(x[j] / (x[j] - least[j]) if x[j] > 0 else 0.0 for j in falling)
        x = [value + step * (least[j] - value) if j in least else 0.0 for j, value in enumerate(x)]
        stopped = min(falling, key=x.__getitem__)
        free = [j for j in free if j != stopped and x[j] > 0]
        x = [value if j in free else 0.0 for j, value in enumerate(x)]
    return [0.0] * len(x), free


def solve(matrix: Matrix, right: Vector) -> Vector:
    """Of a positive definite matrix, by Cholesky's factors."""
    lower: Matrix = []
    for i, row in enumerate(matrix):
        line: Vector = []
        for j in range(i):
            line.append((row[j] - dot(line, lower[j])) / lower[j][j])
        line.append(max(row[i] - dot(line, line), 1e-300) ** 0.5)
        lower.append(line)
    half: Vector = []
    for line, value in zip(lower, right, strict=True):
        half.append((value - dot(line, half)) / line[-1])
    x = [0.0] * len(right)
    for i in reversed(range(len(right))):
        x[i] = (half[i] - sum(lower[j][i] * x[j] for j in range(i + 1, len(right)))) / lower[i][i]
    return x


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    """Over as many as the shorter has."""
    total: float = sum(map(mul, left, right))
    return total
