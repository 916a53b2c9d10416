"""Arrays of rows of unequal length, kept end to end in one vector: what NumPy lacks, in a few operations each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def offsets(lengths: np.ndarray | Sequence[int]) -> np.ndarray:
    """[n + 1] where each row begins, and the end of the last."""
    out = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def split(values: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
    """The rows, which begin at `at` [n + 1]."""
    return np.split(values, at[1:-1]) if len(at) > 1 else []


def ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The numbers of the ranges [begin, begin + length), end to end."""
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(begin - (ends - length), length) + np.arange(total)


def entries(at: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The numbers of the entries of some rows, end to end, where rows begin at `at` [n + 1]."""
    return ranges(at[rows], np.diff(at)[rows])


def joined(parts: Sequence[np.ndarray], dtype: type = np.int64) -> np.ndarray:
    """The arrays end to end, flat; empty without any."""
    return np.concatenate(parts, axis=None, dtype=dtype) if len(parts) else np.zeros(0, dtype=dtype)


def reduced(ufunc: np.ufunc, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The reduction of each row of `values`, whose rows begin at `at` [n + 1]; none of them is empty."""
    return ufunc.reduceat(values, at[:-1]) if len(at) > 1 else np.zeros(0, dtype=values.dtype)
