"""Batches of several processes: whole or in parts, placed in a thread, on every kind of mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa_lite
from alpa_lite.errors import OptionError
from alpa_lite.runtime import prefetch
from tests.processes import driver
from tests.test_daily_use import examples, initial, parallel, train

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
FED = """
import jax
import numpy as np
import alpa_lite
from tests.test_daily_use import create, examples, train

alpa_lite.initialize()
with jax.default_device(jax.local_devices()[0]):
    state, wanted = jax.jit(create)(jax.random.key(0)), []
    for number in range(4):
        state, loss = jax.jit(train)(state, examples(16, number))
        wanted.append(float(loss))


def losses(step, state, batches):
    for batch in batches:
        state, loss = step(state, batch)
        yield float(loss)


def part(number, rows):
    return jax.tree.map(lambda x, own: x[own], examples(16, number), rows)


for method in (alpa_lite.Zero(3), alpa_lite.TensorParallel()):
    step = alpa_lite.parallelize(train, method=method)
    state = step.init(lambda: create(jax.random.key(0)), rest=(examples(16),))
    rows = step.local_batch_indices()
    batches = [part(n, rows) if n % 2 else examples(16, n) for n in range(4)]
    placed = [step.place(batches[0]), *batches[1:]]
    for leaf in jax.tree.leaves(placed[0]):
        assert leaf.shape[0] == 16 and not leaf.is_fully_addressable
    np.testing.assert_allclose(list(losses(step, state, step.prefetch(batches))), wanted, rtol=1e-5)
    print(type(method).__name__, rows["x"].tolist(), len(step.plans))
short = step.place(examples(12))
assert jax.tree.leaves(short)[0].shape[0] == 12 and len(step.plans) == 2
"""


def test_rows_are_those_of_the_devices_that_are_here() -> None:
    for spec, shape in ((("a",), (8, 3)), ((None, "b"), (4, 6)), ((("b", "a"),), (8,)), ((), ())):
        sharding = NamedSharding(MESH, PartitionSpec(*spec))
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        own = prefetch.rows(sharding, shape)
        assert own.tolist() == list(range(shape[0] if shape else 0)) and prefetch.is_part(shape, sharding, shape)
        made = prefetch.assemble_leaf(array, sharding, shape, np.float32)
        assert made.sharding == sharding
        np.testing.assert_array_equal(made, array)
        array[...] = -1  # nothing is shared
        assert shape == () or np.asarray(made).max() > 0


def test_rows_of_a_step_are_asked_once_it_is_planned() -> None:
    step = parallel(train, "zero")
    with pytest.raises(OptionError, match=r"train\.local_batch_indices: it has no plan with a batch yet"):
        step.local_batch_indices()
    step.plan(initial(), examples(16))
    assert {name: own.tolist() for name, own in step.local_batch_indices().items()} == {
        key: list(range(16)) for key in "xy"
    }

    @alpa_lite.parallelize(method=alpa_lite.DataParallel())
    def sgd(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(w)

    sgd.plan(np.ones((4, 2), np.float32), np.ones((8, 4), np.float32), np.ones((8, 2), np.float32))
    assert [own.tolist() for own in sgd.local_batch_indices()] == [list(range(8))] * 2


@pytest.mark.slow
def test_each_process_gives_its_rows_or_all_of_them(tmp_path: Path) -> None:
    run = driver.launch(tmp_path, FED, "--devices-per-process", "2")
    assert run.returncode == 0, run.stderr
    halves = [list(range(8)), list(range(8, 16))]
    for number, own in enumerate(halves):
        for name, rows in (("Zero", own), ("TensorParallel", list(range(16)))):
            assert f"[{number}] {name} {rows} 1" in run.stdout
