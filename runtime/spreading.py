"""Stacked leaves whose parts are unequal, over several processes: cut over all devices, and taken apart again.

Within one process every device is sent what it lacks by itself (`stacked`). Of several, whole rows cross between the
submesh of a part and all devices (`presence`), where one program joins or slices them: two programs and a crossing for
each part, in every step. Parts of equal size, which most divisions give, need none of this.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph import Bounds
from alpa_lite.runtime import presence


@_jax.without_mesh()
def together(parts: Sequence[Any], whole: NamedSharding) -> Any:
    """The whole of some parts, in a layout on the devices of all."""
    here = presence.put(parts, [_rows(whole)] * len(parts))
    return _joined(whole)(here)


@_jax.without_mesh()
def apart(leaf: Any, bounds: Bounds, goals: Sequence[NamedSharding]) -> list[Any]:
    """The parts of a whole, each on its submesh."""
    parts = _sliced(_rows(leaf.sharding), bounds)(leaf)
    return presence.put(parts, goals)


def _rows(whole: NamedSharding) -> NamedSharding:
    """The layout of a part on all devices: that of the whole, but that no device has some of the rows alone."""
    return NamedSharding(whole.mesh, PartitionSpec(None, *whole.spec[1:]))


@functools.lru_cache(maxsize=100)
def _joined(whole: NamedSharding) -> Any:
    return jax.jit(lambda parts: lax.concatenate(parts, 0), out_shardings=whole)


@functools.lru_cache(maxsize=100)
def _sliced(rows: NamedSharding, bounds: Bounds) -> Any:
    def slices(leaf: Any) -> list[Any]:
        return [lax.slice_in_dim(leaf, low, high) for low, high in itertools.pairwise(bounds)]

    return jax.jit(slices, out_shardings=[rows] * (len(bounds) - 1))
