"""Caches: of functions of one frozen value, which last as long as the value lives, and of tables of a search."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


def remembered(function: Callable[[K], V]) -> Callable[[K], V]:
    """Returns the same function with a cache by value; two values are the same only if they are one object.

    Callers must not change its results, and a result must not hold the value, which would then live for ever.
    """
    known: weakref.WeakKeyDictionary[K, V] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def of(value: K) -> V:
        if value not in known:
            known[value] = function(value)
        return known[value]

    return of


class Memo(dict[Hashable, Any]):
    """Results by key; a key begins with the name of its table."""

    def once(self, key: Hashable, make: Callable[[], V]) -> V:
        """Returns the result of `make`, called for each key once."""
        if key not in self:
            self[key] = make()
        return self[key]
