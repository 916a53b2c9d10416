"""Caches: of functions of one frozen value, which last as long as the value lives, and of tables of a search."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
K = TypeVar("K")
V = TypeVar("V")


def memoise_by_identity(function: Callable[[K], V]) -> Callable[[K], V]:
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


def memoise_method(method: Callable[Concatenate[S, P], V]) -> Callable[Concatenate[S, P], V]:
    """Returns the same method with a cache by arguments, kept by the object, which is in no cycle by that.

    A cycle outlives planning until the cycle collector traverses all that planning made.
    """

    @functools.wraps(method)
    def of(self: S, *args: P.args, **kwargs: P.kwargs) -> V:
        memo: Memo = vars(self).setdefault("_memo", Memo())
        return memo.get_or_make((method, args, *kwargs.items()), lambda: method(self, *args, **kwargs))

    return of


class Memo(dict[Hashable, Any]):
    """Results by key; a key begins with the name of its table."""

    def get_or_make(self, key: Hashable, make: Callable[[], V]) -> V:
        """Returns the result of `make`, called for each key once."""
        if key not in self:
            self[key] = make()
        return self[key]
