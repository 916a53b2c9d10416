"""Comparison of leaves with those of plain `jit`, by the tolerances of `alpa_lite.check`, and what failures say."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from alpa_lite.errors import AlpaLiteError
from alpa_lite.runtime.debug import reference

_ENLARGED = 30.0


@dataclass(frozen=True)
class Failure(Exception):
    """Something went wrong: where, and what is said."""

    where: str
    message: str

    @property
    def kind(self) -> tuple[str, str]:
        """What a shorter program must fail with, too."""
        return self.where, re.sub(r"\W.*", "", self.message)


def guarded(where: str, function: Callable[[], Any]) -> Any:
    """The results of a function; whatever it raises is a failure."""
    try:
        return function()
    except Failure:
        raise
    except Exception as error:
        raise failure(where, error) from error


def failure(where: str, error: Exception) -> Failure:
    """An exception as a failure."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, AlpaLiteError) else f" ({Path(last.filename).name}:{last.lineno})"
    return Failure(where, f"{type(error).__name__}{place}: {error}")


class Conditioning:
    """By how much leaves change if the arguments change in their last place, on arguments looked at before."""

    def __init__(self, traced: Any):
        self.traced = traced

    def of(self, args: tuple[Any, ...]) -> list[float]:
        return self.with_passed_through(reference.ReferenceRun(self.traced, args, {}).conditioning())

    def with_passed_through(self, figures: list[float]) -> list[float]:
        """Figures of the results that are computed, with zeros for arguments that are handed through."""
        for place, _ in self.traced.returned_arguments:
            figures.insert(place, 0.0)
        return figures


def compare(where: str, got: Any, want: Any, fresh: Callable[[], tuple[Any, ...]], conditioning: Conditioning) -> int:
    """Compares leaves with the tolerances of `alpa_lite.check`; returns how many.

    Raises:
      Failure: naming those that differ.
    """
    mine, others = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
    if jax.tree.structure(got) != jax.tree.structure(want):
        raise Failure(where, "Structure differs")
    limits = conditioning.with_passed_through(reference.tolerances(conditioning.traced))
    wrong: dict[int, tuple[float, float]] = {}
    for i, ((_, a), b, allowed) in enumerate(zip(mine, others, limits, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Failure(where, f"Type differs: {a.dtype}{a.shape}, {b.dtype}{b.shape}")
        found = reference.error(a, b)
        if found > allowed:
            wrong[i] = found, allowed
    if wrong:
        changes = conditioning.of(fresh())
        texts = [
            f"{jax.tree_util.keystr(mine[i][0])} {others[i].dtype}{others[i].shape} error {e:.2g} of {t:.2g}"
            f" (conditioning {changes[i]:.2g})"
            for i, (e, t) in wrong.items()
            if t == 0 or e > max(t, _ENLARGED * changes[i])
        ]
        if texts:
            raise Failure(where, "Differs: " + "; ".join(texts[:6]))
    return len(others)


def copied(leaf: Any) -> Any:
    """A leaf in an array of its own."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = jax.numpy.asarray(np.asarray(jax.random.key_data(leaf)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    return jax.numpy.asarray(np.array(leaf))


def words(leaf: Any) -> Any:
    """The words of a random key; other leaves themselves."""
    return jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
