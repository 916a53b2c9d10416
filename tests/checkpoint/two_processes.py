"""What each of two processes with four devices does in `test_processes`; the parent compares what they leave."""

from __future__ import annotations

import errno
import faulthandler
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

import alpa_lite
from alpa_lite import _jax, checkpoint
from alpa_lite.checkpoint import CheckpointError, CheckpointManager, saving
from tests.checkpoint import states

TIMEOUT = 200.0
"""Seconds that the manager waits for files and for the other process."""


def on(value: np.ndarray, low: int, high: int, *spec: str | None) -> jax.Array:
    """An array on some of all devices; a process that has none of them has an array without blocks."""
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[low:high]), ("x",)), PartitionSpec(*spec))
    return placed(value, sharding)


def placed(value: np.ndarray, sharding: Sharding) -> jax.Array:
    here = sharding.addressable_devices_indices_map(value.shape)
    blocks = [jax.device_put(value[index], device) for device, index in here.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, blocks, dtype=value.dtype)


def values() -> dict[str, Any]:
    return {
        "all": states.draw(16, 8), "replicated": states.draw(5, seed=1), "first": states.draw(8, 4, seed=2),
        "second": states.draw(8, 4, seed=3), "one device": states.draw(3, seed=4), "across": states.draw(4, 4, seed=5),
        "own": np.int32(7), "host": np.arange(3), "number": 5,
    }  # fmt: skip


PLACES: dict[str, Any] = {
    "all": (0, 8, "x"), "replicated": (0, 8), "first": (0, 4, "x"), "second": (4, 8, None, "x"), "one device": (5, 6),
    "across": (2, 6, "x"),
}  # fmt: skip


def state() -> dict[str, Any]:
    """Stages that are on one process alone, and on both; leaves that each process has by itself."""
    placed = {name: on(value, *PLACES[name]) if name in PLACES else value for name, value in values().items()}
    return {**placed, "own": jnp.int32(7)}


def check(got: Any, want: Any) -> None:
    """Raises AssertionError unless every block that is here has the right bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(mine, jax.Array) and jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine = _jax.data_of_keys(mine)
        blocks = [(s.data, s.index) for s in mine.addressable_shards] if isinstance(mine, jax.Array) else [(mine, ())]
        for data, index in blocks:
            np.testing.assert_array_equal(np.asarray(data), np.asarray(other)[index])


class FullDisk:
    """The future of arrays that find no room."""

    def result(self, timeout: float | None = None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failure(call: Any) -> tuple[str, float]:
    """The message of the error that a call raises, and the seconds that it took."""
    begin = time.monotonic()
    try:
        call()
    except CheckpointError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("no error")


def train_in_stages(folder: Path, want: Any) -> None:
    """A pipeline of four stages, two on each process, goes on with what one process had, and saves what it has made."""
    method = alpa_lite.Pipeline(num_stages=4, schedule="gpipe", submesh_shapes=((2,),) * 4)
    step = alpa_lite.parallelize(states.train, method=method, num_microbatches=2)
    shapes, batch = jax.eval_shape(states.create, jax.random.key(0)), states.draw(16, states.WIDTH, seed=1)
    shardings = step.shardings(shapes, batch).arguments[0]
    found = checkpoint.restore(folder / "single", shapes, shardings=shardings)
    check(found, want)
    assert sum(bool(x.addressable_shards) for x in found["params"]) == 2
    state, _ = step(found, batch)
    checkpoint.save(folder / "stages", state, plan=step.plans[0])
    again = checkpoint.restore(folder / "stages", state)
    for mine, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert mine.sharding == other.sharding and len(mine.addressable_shards) == len(other.addressable_shards)


def main(folder: Path) -> None:
    me = jax.process_index()
    # What a single process of eight devices saved, under two plans of two processes.
    want = pickle.loads((folder / "want.pkl").read_bytes())
    shapes = jax.eval_shape(states.create, jax.random.key(0))
    for method in (alpa_lite.DataParallel(), alpa_lite.Zero(3)):
        step = alpa_lite.parallelize(states.train, method=method)
        shardings = step.shardings(shapes, jax.ShapeDtypeStruct((16, states.WIDTH), "float32")).arguments[0]
        found = checkpoint.restore(folder / "single", shapes, shardings=shardings)
        check(found, want)
        assert all(len(x.addressable_shards) == 4 for x in jax.tree.leaves(found))

    train_in_stages(folder, want)
    manager = CheckpointManager(folder / "run", timeout=TIMEOUT)
    manager.save(1, state())
    manager.save(2, state(), metadata={"from": 2})
    manager.wait()
    restored = manager.restore(state())
    assert restored.step == 2 and restored.metadata.user == {"from": 2}
    check(restored.state, values())
    # Every leaf elsewhere: what one process alone had is the other's now.
    like = {**state(), "first": on(states.draw(8, 4), 6, 8), "second": on(states.draw(8, 4), 0, 2, "x")}
    check(checkpoint.restore(folder / "run", like), values())

    # Errors are the same on both, in time.
    said = {"model": failure(lambda: manager.restore({**state(), "first": on(states.draw(8, 5), 0, 4)}))}
    serialize = saving.ArrayHandler.serialize

    async def full(*args: Any) -> list[Any]:
        return [FullDisk()]

    if me == 1:
        saving.ArrayHandler.serialize = full  # type: ignore[method-assign]
    manager.save(3, state())
    said["no room"] = failure(manager.wait)
    saving.ArrayHandler.serialize = serialize
    assert manager.latest_step() == 2
    if me == 0:
        path = max((folder / "run" / "2" / "state").glob("ocdbt.process_1/d/*"), key=lambda p: p.stat().st_size)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    restored = manager.restore(state())
    assert restored.step == 1
    check(restored.state, values())
    manager.save(2, state())
    manager.close()
    # The other does not come.
    if me == 0:
        lonely = CheckpointManager(folder / "other", timeout=5.0)
        lonely.save(1, state())
        said["alone"] = failure(lonely.wait)
    (folder / f"said {me}.pkl").write_bytes(pickle.dumps(said))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(500, exit=True)
    jax.distributed.initialize()
    main(Path(sys.argv[1]))
