"""Compiled numbering of labels (Numba): what presolve and windows ask most often, of the shortest arrays."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def numbered(code: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Number the distinct values of ``code`` in ascending order, as ``np.unique`` does.

    Args:
        code: values from 0 to ``total - 1``.
        total: how many there may be; as much memory is looked through.

    Returns:
        Per number, where its value is first; per entry of ``code``, its number.
    """
    number = np.full(total, -1, np.int64)
    for i in range(len(code)):
        number[code[i]] = 0
    count = 0
    for value in range(total):
        if number[value] == 0:
            number[value] = count
            count += 1
    first = np.full(count, -1, np.int64)
    numbers = np.empty(len(code), np.int64)
    for i in range(len(code)):
        numbers[i] = number[code[i]]
        if first[numbers[i]] < 0:
            first[numbers[i]] = i
    return first, numbers
