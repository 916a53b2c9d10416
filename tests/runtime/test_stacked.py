"""Stacked leaves: an array for the user, joined only when it is read, and parts for the stages, without copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization

from alpa_lite.ir.graph import Argument, Block, Graph, Pieces, StackedArguments, Traced, Value
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.program import Program, Submesh, buffer
from alpa_lite.runtime.binding import ArgumentBinder, NewSignature
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.placement import DeviceCopies
from alpa_lite.runtime.stacked import StackedArray
from tests.runtime.cases import pointers

FLOAT = np.dtype(np.float32)


class Cut:
    """A step with one leaf in parts (first device, devices, size, axes of its dims), all of which it may overwrite."""

    def __init__(self, places: list[tuple[int, int, int, tuple[Any, ...]]], rest: int = 8) -> None:
        submeshes = tuple(Submesh(LogicalMesh((count,), ("a",)), first) for first, count, _, _ in places)
        bounds = tuple(int(n) for n in np.cumsum([0, *(size for _, _, size, _ in places)]))
        buffers = tuple(
            buffer(m, submeshes[m], Layout(axes), (size, rest), FLOAT) for m, (_, _, size, axes) in enumerate(places)
        )
        numbers = tuple(range(len(places)))
        program = Program(submeshes, (), buffers, (), ((),) * len(places), tuple((n,) for n in numbers), (), numbers)
        values = tuple(Value(b.shape, FLOAT, jax.typeof(np.zeros(b.shape, FLOAT))) for b in buffers)
        graph, leaf = Graph(values, Block(numbers, (), numbers)), Pieces(numbers, bounds)
        parts = tuple(Argument(f"w[{n}]", "state") for n in numbers)
        traced = Traced(graph, parts, parts, (), None, None, stacked=StackedArguments((leaf,), (leaf,)))
        placed = ProgramBuffers(traced, program, None)
        self.binder = ArgumentBinder(traced, placed, (), DeviceCopies(), takes_uncommitted=False)
        self.shardings = list(map(placed.sharding, numbers))

    def split(self, leaf: Any, ours: bool = True) -> list[Any]:
        parts: list[Any] = [None] * len(self.shardings)
        self.binder.bind(parts, [leaf], lambda _: ours)
        return parts

    def join(self, parts: list[Any]) -> Any:
        return self.binder.stacked[0].array_of(parts)

    def ones(self) -> Any:
        return self.join([jax.device_put(np.ones((4, 8), np.float32), s) for s in self.shardings])


WAYS = {
    "in place": [(0, 2, 4, ((), ("a",))), (2, 2, 4, ((), ("a",)))],
    "in place, dim 0": [(4, 4, 4, (("a",), ())), (0, 4, 4, (("a",), ()))],
    "resharded": [(0, 2, 4, ((), ("a",))), (2, 2, 4, ((), ())), (6, 2, 4, (("a",), ()))],
    "unequal parts": [(0, 4, 3, ((), ("a",))), (4, 4, 5, ((), ()))],
    "unequal submeshes": [(0, 2, 4, ((), ("a",))), (2, 4, 4, (("a",), ()))],
}


@pytest.mark.parametrize("name", WAYS)
def test_there_and_back(name: str):
    cut = Cut(WAYS[name])
    rows = sum(size for _, _, size, _ in WAYS[name])
    whole = np.arange(rows * 8, dtype=np.float32).reshape(rows, 8)
    given = jax.device_put(whole, jax.devices()[0])
    parts = cut.split(given)
    assert [part.sharding for part in parts] == cut.shardings
    np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in parts]), whole)
    joined = cut.join(parts)
    np.testing.assert_array_equal(np.asarray(joined), whole)
    assert not given.is_deleted()
    for leaf in (joined, joined.array):
        again = cut.split(leaf)
        assert [part.sharding for part in again] == cut.shardings
        np.testing.assert_array_equal(np.concatenate([np.asarray(part) for part in again]), whole)
        is_shared = name.startswith("in place") or leaf is joined
        assert (set().union(*map(pointers, again)) == set().union(*map(pointers, parts))) == is_shared


def test_parts_are_donated_in_place():
    cut = Cut(WAYS["in place"])
    whole = cut.ones()
    before = pointers(whole)
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    results = [double(part) for part in cut.split(whole)]
    assert set().union(*map(pointers, results)) == before
    assert whole.is_deleted()
    np.testing.assert_array_equal(np.asarray(cut.join(results)), 2)


def test_memory_of_the_caller_is_never_shared():
    cut = Cut(WAYS["in place"])
    whole = cut.ones()
    for part in cut.split(whole, ours=False):
        assert not pointers(part) & pointers(whole)
    given = np.ones((8, 8), np.float32)
    parts = cut.split(given)
    given[:] = 7
    assert all((np.asarray(part) == 1).all() for part in parts)


def test_other_shapes_are_refused():
    for bad in (np.ones((6, 8), np.float32), np.ones((8, 8), np.int32), "text"):
        with pytest.raises(NewSignature):
            Cut(WAYS["in place"]).split(bad)


# -- as an array ------------------------------------------------------------------------------------------------------

VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)
ONES = jnp.ones((8, 8))


def made(name: str = "unequal parts") -> StackedArray:
    cut = Cut(WAYS[name])
    low = np.cumsum([0, *(size for _, _, size, _ in WAYS[name])])
    return cut.join([jax.device_put(VALUES[low[n] : low[n + 1]], sharding) for n, sharding in enumerate(cut.shardings)])


UNREAD: dict[str, Callable[[Any], Any]] = {
    "type": lambda x: (isinstance(x, jax.Array), x.shape, x.dtype, x.ndim, x.size, x.nbytes, x.weak_type, len(x)),
    "shapes": lambda x: (jax.tree.structure({"a": x}), jax.tree.map(jnp.shape, {"a": x})),
    "asarray": lambda x: (jnp.asarray(x) is x, equinox.is_array(x), x.is_deleted(), x.committed),
    "abstract": lambda x: (str(jax.typeof(x)), str(jax.eval_shape(lambda y: y * 2, x)), jnp.result_type(x, "bfloat16")),
}
READ: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: (np.asarray(x), np.sum(x), jnp.sum(x)),
    "methods": lambda x: (x.mean(), x.T, x.astype("int32"), x.reshape(-1), x.at[0].set(0)),
    "operators": lambda x: (x + 1, 1 - x, -x, x @ ONES, np.ones((8, 8)) @ x, ONES * x, x * x, x == x, x[2], x > 3),
    "iteration": list,
    "jit": lambda x: (
        jax.jit(lambda y: y * 2)(x),
        jax.jit(lambda y: y + x)(1.0),
        equinox.filter_jit(lambda y: y + 1)(x),
    ),
    "donated to jit": lambda x: jax.jit(lambda y: y * 2, donate_argnums=0)(x),
    "compiled": lambda x: jax.jit(lambda y: y + 1).lower(jax.ShapeDtypeStruct((8, 8), "float32")).compile()(x),
    "gradient": lambda x: (jax.grad(lambda y: (y**2).sum())(x), jax.vmap(jnp.sum)(x)),
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y.sum(), y), 0.0, x),
    "device_put": lambda x: (jax.device_put(x, jax.devices()[3]), jax.device_get({"a": x})),
    "stack": lambda x: (jnp.stack([x, x]), np.stack([x, x]), jnp.concatenate([x, ONES]), jnp.where(x > 1, x, 0)),
    "copy": lambda x: (jnp.array(x), copy.copy(x), copy.deepcopy(x), x.copy(), pickle.loads(pickle.dumps(x))),
    "bytes": lambda x: serialization.from_bytes({"a": np.zeros((8, 8))}, serialization.to_bytes({"a": x})),
    "optax": lambda x: (optax.apply_updates({"a": x}, {"a": x}), optax.adam(0.1).init({"a": x}), optax.tree.norm([x])),
    "nnx": lambda x: (nnx.Param(x) + 1, nnx.state(nnx.Dict(a=nnx.Param(x)))),
    "callback": lambda x: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((8, 8), "float32"), x),
    "text": lambda x: (str(x), repr(x), f"{x[0, 0]:.2f}", float(x[1, 1]), bool(x[0, 1]), x.tolist()),
}


def same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(b) is not type(VALUES) or isinstance(a, np.ndarray)
        if hasattr(b, "shape"):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            assert a == b


@pytest.mark.parametrize("use", UNREAD)
def test_what_is_known_of_it_joins_nothing(use, monkeypatch):
    monkeypatch.setattr(StackedArray, "make_array", lambda self: pytest.fail("joined"))
    same(UNREAD[use](made()), UNREAD[use](jax.device_put(VALUES, jax.devices()[0])))
    jax.block_until_ready({"a": made()})
    assert made().is_ready() and len(made().devices()) == 8 == len(made().sharding.device_set)


@pytest.mark.parametrize("use", READ)
def test_it_is_read_as_an_array(use):
    same(READ[use](made()), READ[use](jax.device_put(VALUES, jax.devices()[0])))


def test_it_is_joined_once():
    array, calls = made("unequal submeshes"), []
    original = array.make_array
    array.make_array = lambda: (calls.append(1), original())[1]
    for _ in range(3):
        np.asarray(array)
        jnp.sum(array)
    assert len(calls) == 1 and array.array.sharding == array.sharding


def test_orbax_saves_it(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"a": made(), "b": made("in place")})
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    for leaf in restored.values():
        np.testing.assert_array_equal(np.asarray(leaf), VALUES)
