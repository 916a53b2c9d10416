"""What follows from a frozen value alone, worked out once for as long as the value lives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remembered(function: Callable[[K], V]) -> Callable[[K], V]:
    """The same function, which looks at each value once; two values are the same only if they are one object.

    What it returns must not be changed by who gets it, nor hold the value, which else would live for ever.
    """
    known: weakref.WeakKeyDictionary[K, V] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def of(value: K) -> V:
        if value not in known:
            known[value] = function(value)
        return known[value]

    return of
