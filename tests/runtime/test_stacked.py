"""Stacked leaves: whole for the user and in parts for the stages, without copies where that can be."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.ir.graph import Block, Graph, Pieces, Stacked, Traced, Value
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.program import Program, Submesh, buffer
from alpa_lite.runtime.binding import NewSignature
from alpa_lite.runtime.stacked import StackedLeaves

FLOAT = np.dtype(np.float32)


def stacked_leaves(places: list[tuple[int, int, int, tuple[Any, ...]]], rest: int = 8) -> tuple[StackedLeaves, Any]:
    """One leaf in parts (first device, devices, size, axes of its dims), and how each part is sharded."""
    submeshes = tuple(Submesh(LogicalMesh((count,), ("a",)), first) for first, count, _, _ in places)
    bounds = tuple(int(n) for n in np.cumsum([0, *(size for _, _, size, _ in places)]))
    buffers = tuple(
        buffer(m, submeshes[m], Layout(axes), (size, rest), FLOAT) for m, (_, _, size, axes) in enumerate(places)
    )
    numbers = tuple(range(len(places)))
    program = Program(submeshes, (), buffers, (), ((),) * len(places), tuple((n,) for n in numbers), (), numbers)
    leaf = Pieces(numbers, bounds)
    values = tuple(Value(b.shape, FLOAT, jax.typeof(np.zeros(b.shape, FLOAT))) for b in buffers)
    traced = Traced(
        Graph(values, Block(numbers, (), numbers)), (), (), (), None, None, stacked=Stacked((leaf,), (leaf,))
    )
    devices = np.array(jax.devices())

    def sharding(number: int) -> NamedSharding:
        submesh = submeshes[buffers[number].mesh]
        dims = [axes[0] if axes else None for axes in buffers[number].layout.dims]
        return NamedSharding(Mesh(devices[list(submesh.devices)], ("a",)), PartitionSpec(*dims))

    return StackedLeaves(traced, program, sharding), [sharding(n) for n in numbers]


def pointers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


WAYS = {
    "in place": [(0, 2, 4, ((), ("a",))), (2, 2, 4, ((), ("a",)))],
    "in place, dim 0": [(4, 4, 4, (("a",), ())), (0, 4, 4, (("a",), ()))],
    "resharded": [(0, 2, 4, ((), ("a",))), (2, 2, 4, ((), ())), (6, 2, 4, (("a",), ()))],
    "unequal parts": [(0, 4, 3, ((), ("a",))), (4, 4, 5, ((), ()))],
    "unequal submeshes": [(0, 2, 4, ((), ("a",))), (2, 4, 4, (("a",), ()))],
}


@pytest.mark.parametrize("name", WAYS)
def test_there_and_back(name: str):
    leaves, shardings = stacked_leaves(WAYS[name])
    rows = sum(size for _, _, size, _ in WAYS[name])
    whole = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
    given = jax.device_put(whole, jax.devices()[0])
    parts = leaves.split([given], lambda _: True)
    assert [part.sharding for part in parts] == shardings
    np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in parts]), whole)
    (joined,) = leaves.join(parts)
    np.testing.assert_array_equal(np.asarray(joined), whole)
    assert not given.is_deleted()
    again = leaves.split([joined], lambda _: True)
    assert [part.sharding for part in again] == shardings
    np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in again]), whole)
    assert (set().union(*map(pointers, again)) == pointers(joined)) == name.startswith("in place")


def test_parts_are_donated_in_place():
    leaves, shardings = stacked_leaves(WAYS["in place"])
    (whole,) = leaves.join([jax.device_put(np.ones((4, 8), np.float32), s) for s in shardings])
    before = pointers(whole)
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    results = [double(part) for part in leaves.split([whole], lambda _: True)]
    assert set().union(*map(pointers, results)) == before
    assert whole.is_deleted()
    np.testing.assert_array_equal(np.asarray(leaves.join(results)[0]), 2)


def test_memory_of_the_caller_is_never_shared():
    leaves, shardings = stacked_leaves(WAYS["in place"])
    (whole,) = leaves.join([jax.device_put(np.ones((4, 8), np.float32), s) for s in shardings])
    for part in leaves.split([whole], lambda _: False):
        assert not pointers(part) & pointers(whole)
    given = np.ones((8, 8), np.float32)
    parts = leaves.split([given], lambda _: True)
    given[:] = 7
    assert all((np.asarray(part) == 1).all() for part in parts)


def test_other_shapes_are_refused():
    leaves, _ = stacked_leaves(WAYS["in place"])
    for bad in (np.ones((6, 8), np.float32), np.ones((8, 8), np.int32), "text"):
        with pytest.raises(NewSignature):
            leaves.split([bad], lambda _: True)
