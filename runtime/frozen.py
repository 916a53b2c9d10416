"""Weights that steps read and do not return are placed once, and stay.

A caller passes the same frozen weights at every call. Where they are not as the plan wants them (on the host, on one
device), the first call copies them to the mesh, and the copy is found again by the identity of the caller's array, for
as long as that array lives: the next call moves nothing. Copies are shared by the executables of a step, and by the
steps that share its state.

That works for arrays that cannot change, which are those of JAX. A NumPy array is copied at every call, with a warning
once it comes again: even if it is read-only, other views of its memory may be written.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite.runtime import placement

logger = logging.getLogger(__name__)


class Copies:
    """Copies of callers' arrays on the mesh, each for as long as the caller's array lives."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, NamedSharding], tuple[weakref.ref[Any], jax.Array]] = {}
        self._hosts: weakref.WeakValueDictionary[tuple[int, NamedSharding], np.ndarray] = weakref.WeakValueDictionary()
        self._warned = False

    def of(self, leaf: Any, sharding: NamedSharding) -> jax.Array | None:
        """A leaf as `sharding` wants it: itself, or a copy that is kept; None if it may change and must be put again.

        Args:
          leaf: an array of the caller's.
          sharding: where it is read.
        """
        if placement.is_placed(leaf, sharding):
            return leaf
        if not isinstance(leaf, jax.Array):
            if not self._warned and isinstance(leaf, np.ndarray) and self._is_repeated(leaf, sharding):
                self._warned = True
                logger.warning(
                    "frozen weights come in NumPy arrays %s, such as one of %s bytes: they are copied to the devices "
                    "in every call; pass jax.Arrays, or what step.place returns",
                    "that can be written" if leaf.flags.writeable else "whose memory may be written", leaf.nbytes,
                )  # fmt: skip
            return None
        key = id(leaf), sharding
        found = self._held.get(key)
        if found is None or found[0]() is not leaf:
            (copy,) = placement.copies([leaf], [sharding])
            found = self._held[key] = weakref.ref(leaf, lambda _: self._held.pop(key, None)), copy
        return found[1]

    def _is_repeated(self, leaf: np.ndarray, sharding: NamedSharding) -> bool:
        """Whether an array of the host was passed before: data are others in every call."""
        before = self._hosts.get((id(leaf), sharding))
        self._hosts[id(leaf), sharding] = leaf
        return before is leaf


class Frozen:
    """The frozen weights among some arguments of an executable. Looks at identities alone if they are as before."""

    def __init__(self, positions: Sequence[int], shardings: Sequence[NamedSharding], copies: Copies) -> None:
        """Args:
        positions: of frozen weights among the arguments.
        shardings: where each is read.
        copies: those that exist.
        """
        self._places = list(zip(positions, shardings, strict=True))
        self._copies = copies
        # For each: the array that was seen last, and what stands for it (None: it is as it should be).
        self._seen: list[tuple[weakref.ref[Any], weakref.ref[Any] | None] | None] = [None] * len(self._places)

    def placed(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments with frozen weights where the plan wants them; a list or a tuple, as it came."""
        out: list[Any] | None = None
        for n, (position, sharding) in enumerate(self._places):
            leaf, seen = arguments[position], self._seen[n]
            if seen is not None and seen[0]() is leaf:
                if seen[1] is None:
                    continue
                copy = seen[1]()
            else:
                copy = self._copies.of(leaf, sharding)
                if copy is not None:
                    self._seen[n] = weakref.ref(leaf), None if copy is leaf else weakref.ref(copy)
            if copy is not None and copy is not leaf:
                out = list(arguments) if out is None else out
                out[position] = copy
        if out is None:
            return arguments
        return out if isinstance(arguments, list) else tuple(out)
