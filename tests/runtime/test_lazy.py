"""A stacked array in parts is an array for whoever reads it, and is joined only then."""

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

from alpa_lite.runtime.stacked import StackedArray
from tests.runtime.test_stacked import WAYS, stacked_leaves

VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)
ONES = jnp.ones((8, 8))


def made(name: str = "unequal parts") -> StackedArray:
    leaves, shardings = stacked_leaves(WAYS[name])
    parts, low = [], 0
    for sharding, (_, _, size, _) in zip(shardings, WAYS[name], strict=True):
        parts.append(jax.device_put(VALUES[low : low + size], sharding))
        low += size
    (array,) = leaves.join(parts)
    assert isinstance(array, StackedArray)
    return array


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
