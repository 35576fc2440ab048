import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.least_squares import not_negative, solve

SIZE = 4
samples = arrays.arrays(np.float64, (12, SIZE), elements=st.floats(-1, 1, width=16))
goals = arrays.arrays(np.float64, 12, elements=st.floats(-1, 1, width=16))
starts = st.lists(st.floats(0, 2), min_size=SIZE, max_size=SIZE)


def equations(x: np.ndarray, y: np.ndarray) -> tuple[list[list[float]], list[float]]:
    return (x.T @ x + 0.01 * np.eye(SIZE)).tolist(), (x.T @ y).tolist()


def best_of_all(gram: np.ndarray, target: np.ndarray) -> np.ndarray:
    """By trying every set of coefficients that may be above 0."""
    found = []
    for free in itertools.chain.from_iterable(itertools.combinations(range(SIZE), n) for n in range(SIZE + 1)):
        x = np.zeros(SIZE)
        x[list(free)] = np.linalg.solve(gram[np.ix_(free, free)], target[list(free)])
        if (x >= 0).all():
            found.append(x)
    return min(found, key=lambda x: x @ gram @ x / 2 - target @ x)


@settings(deadline=None)
@given(samples, goals, starts)
def test_the_solution_is_the_best_without_negative_coefficients_wherever_it_starts(x, y, start) -> None:
    gram, target = equations(x, y)
    assert not_negative(gram, target, start) == pytest.approx(best_of_all(np.array(gram), np.array(target)), abs=1e-6)


@settings(deadline=None)
@given(samples, goals)
def test_equations_are_solved(x, y) -> None:
    gram, target = equations(x, y)
    assert np.array(gram) @ solve(gram, target) == pytest.approx(np.array(target), abs=1e-9)
