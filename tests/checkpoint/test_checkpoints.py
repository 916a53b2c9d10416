"""What is saved is restored, bit for bit, under any plan, by this module and by plain Orbax."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import alpa_lite
from alpa_lite import checkpoint
from alpa_lite.checkpoint import CheckpointError, CheckpointManager, saving
from tests.checkpoint import states

BATCH = states.draw(16, states.WIDTH, seed=1)


@pytest.fixture(autouse=True)
def nothing_is_said(caplog: pytest.LogCaptureFixture) -> Any:
    """No warning of Orbax, and none of this module but those that a test expects and clears."""
    yield
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not loud, [record.getMessage() for record in loud]


def sharded(*axes: str | None, devices: int = 8) -> jax.Array:
    return states.put(states.draw(16, 8), states.mesh(0, devices, devices), *axes)


def test_everything_comes_back_as_it_was_and_where_it_was(tmp_path: Path) -> None:
    state = states.everything()
    checkpoint.save(tmp_path / "one", state)
    states.same(checkpoint.restore(tmp_path / "one", state), state)


def test_abstract_leaves_say_what_is_wanted_where(tmp_path: Path) -> None:
    state = {"w": sharded("x", devices=4), "key": jax.random.split(jax.random.key(0), 4)}
    checkpoint.save(tmp_path / "one", state)
    there = jax.sharding.NamedSharding(states.mesh(2, 8, 6), jax.sharding.PartitionSpec())
    shapes = jax.eval_shape(lambda: state)
    found = checkpoint.restore(tmp_path / "one", shapes, shardings=jax.tree.map(lambda _: there, shapes))
    states.equal(found, state)
    assert all(leaf.sharding.is_equivalent_to(there, leaf.ndim) for leaf in jax.tree.leaves(found))


METHODS = {
    "data parallel": {"method": alpa_lite.DataParallel()},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=4, schedule="gpipe"), "num_microbatches": 2},
}


def test_a_state_of_eight_devices_goes_on_in_four_stages_and_on_one_device(tmp_path: Path) -> None:
    """Data parallel, a pipeline of four stages on eight, one device: each restores what the last one saved."""
    shapes = jax.eval_shape(states.create, jax.random.key(0))
    manager = CheckpointManager(tmp_path)
    want: Any = jax.jit(states.create)(jax.random.key(0))
    manager.save(0, want)
    for number, (name, options) in enumerate(METHODS.items()):
        step = alpa_lite.parallelize(states.train, **options)
        shardings = step.shardings(shapes, BATCH).arguments[0]
        state, number_of_it, _ = manager.restore(shapes, shardings=shardings)
        assert number_of_it == number
        states.equal(state, want)
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
        assert len({x.sharding.mesh.devices.flat[0] for x in state["params"]}) == (4 if name == "pipeline" else 1)
        state, _ = step(state, BATCH)
        want = jax.tree.map(lambda x: x.copy(), state)
        manager.save(number + 1, state, plan=step.plans[0])
    manager.close()
    (last,) = step.plans
    found = manager.restore(shapes).state
    assert {device for x in jax.tree.leaves(found) for device in x.devices()} == {jax.devices()[0]}
    states.equal(found, want)
    metadata = manager.metadata(2)
    assert metadata.step == 2 and metadata.jax == jax.__version__ and metadata.fingerprint == last.fingerprint
    plan = metadata.load_plan()
    assert plan is not None and plan.fingerprint == last.fingerprint


def test_a_state_that_is_donated_while_it_is_written_is_saved_as_it_was(tmp_path: Path) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    state = states.put(np.zeros((8, 1024), np.float32), states.mesh(0, 8, 8), "x")
    with CheckpointManager(tmp_path) as manager:
        for number in range(3):
            manager.save(number, state)
            state = step(state)
        for number in range(3):
            assert (np.asarray(manager.restore(state, step=number).state) == number).all()


# -- plain Orbax -------------------------------------------------------------------------------------------------------


def abstract(leaf: Any) -> Any:
    """The leaf without its values, if it is an array."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if isinstance(leaf, jax.Array) else leaf


def test_plain_orbax_reads_it(tmp_path: Path) -> None:
    state = {"w": sharded("x", devices=4), "opt": [states.Pair(jnp.ones(3), None)], "n": 3}
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, state, metadata={"seen": 5})
    shapes = jax.tree.map(abstract, state)
    with ocp.StandardCheckpointer() as orbax:
        states.same(orbax.restore(tmp_path / "7" / "state", shapes), state)
    with ocp.CheckpointManager(tmp_path) as orbax_manager:
        assert orbax_manager.latest_step() == 7
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), metadata=ocp.args.JsonRestore())
        found = orbax_manager.restore(7, args=args)
    states.same(found["state"], state)
    assert found["metadata"]["user"] == {"seen": 5} and found["metadata"]["step"] == 7


def test_what_plain_orbax_wrote_is_read(tmp_path: Path) -> None:
    state = {"w": sharded("x"), "key": jax.random.key(4), "n": 3}
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "one", state)
    states.same(checkpoint.restore(tmp_path / "one", state), state)


# -- chunks ------------------------------------------------------------------------------------------------------------


def test_no_chunk_is_larger_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that one device had whole is read by others in parts: it must not be one chunk."""
    monkeypatch.setattr(saving, "CHUNK_BYTES", 2**20)
    state = {"w": jnp.asarray(states.draw(7 * 64, 1024))}
    checkpoint.save(tmp_path / "one", state)
    entry = ocp.PyTreeCheckpointHandler().metadata(epath.Path(tmp_path) / "one" / "state").tree["w"]
    assert np.prod(entry.storage.chunk_shape) * 4 <= 2**20
    assert all(dim % chunk == 0 for dim, chunk in zip(entry.shape, entry.storage.chunk_shape, strict=True))
    there = jax.sharding.NamedSharding(states.mesh(0, 8, 8), jax.sharding.PartitionSpec(None, "x"))
    states.equal(checkpoint.restore(tmp_path / "one", state, shardings={"w": there}), state)


@pytest.mark.parametrize("spec", [("x",), (None, "x"), (), ("x", "y"), ("y",)])
def test_each_block_has_one_writer(spec: Any) -> None:
    array = states.put(states.draw(8, 8), states.mesh(0, 8, 4, 2), *spec)
    written = np.zeros((8, 8), int)
    for index, data, _ in saving.owned_blocks(array, "name"):
        written[index] += 1
        np.testing.assert_array_equal(np.asarray(data), np.asarray(array)[index])
    assert (written == 1).all()


def test_replicated_leaves_have_different_writers() -> None:
    array = states.put(states.draw(8), states.mesh(0, 8, 8))
    blocks = [block for name in "abcdefghijklmnop" for block in saving.owned_blocks(array, name)]
    writers = {block.data.devices().pop().id for block in blocks}
    assert len(writers) > 4


# -- another model -----------------------------------------------------------------------------------------------------


def test_the_state_of_another_model_is_an_error_that_names_the_leaves(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "one", {"w": jnp.ones((4, 2)), "old": jnp.ones(2), "k": jax.random.key(0), "n": 1})
    like = {"w": jnp.ones((4, 3), jnp.bfloat16), "new": jnp.ones(2), "k": jax.random.key(0, impl="rbg"), "n": 1}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(tmp_path / "one", like)
    said = str(caught.value)
    assert str(tmp_path / "one") in said
    for part in ("w is float32[4,2] there and bfloat16[4,3] here", "new is not in it", "old is in it alone"):
        assert part in said
    assert re.search(r"k is (uint32\[2\] there|random keys of threefry2x32 there)", said)
    assert "n is" not in said


def test_a_step_counter_may_be_a_number_in_one_and_an_array_in_the_other(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "number", {"step": 3})
    found = checkpoint.restore(tmp_path / "number", {"step": jnp.int32(0)})["step"]
    assert isinstance(found, jax.Array) and found.dtype == jnp.int32 and found == 3
    checkpoint.save(tmp_path / "array", {"step": jnp.int32(4)})
    assert checkpoint.restore(tmp_path / "array", {"step": 0}) == {"step": 4}
    with pytest.raises(CheckpointError, match=r"step is int32\[\] there and float32\[\] here"):
        checkpoint.restore(tmp_path / "array", {"step": jnp.float32(0)})


def donated() -> jax.Array:
    gone = jnp.ones(3)
    gone.delete()
    return gone


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"f": print}, "f is a builtin_function_or_method"),
        ({"a.b": 1, "a": {"b": 2}}, "several leaves of the state would be stored as 'a.b'"),
        ({"a/b": jnp.ones(1), "a": {"b": 2}}, "several leaves"),
        ({"w": donated()}, "w was donated"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "one", state)


# -- a run -------------------------------------------------------------------------------------------------------------


def test_the_newest_stay(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=2) as manager:
        assert manager.latest_step() is None
        for step in (1, 5, 10, 20):
            manager.save(step, {"n": step})
    assert manager.steps() == [10, 20] and manager.latest_step() == 20
    assert checkpoint.restore(tmp_path, {"n": 0}) == {"n": 20}
    assert checkpoint.restore(tmp_path, {"n": 0}, step=10) == {"n": 10}


def test_a_step_is_saved_once_and_not_found_before(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"n": 1})
        with pytest.raises(CheckpointError, match="1 is there already"):
            manager.save(1, {"n": 2})
        assert manager.restore({"n": 0}).state == {"n": 1}
    manager = CheckpointManager(tmp_path / "none")
    for call in (lambda: manager.restore({}), lambda: checkpoint.restore(tmp_path / "none", {})):
        with pytest.raises(CheckpointError, match=r"no (such folder|checkpoint)"):
            call()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        manager.restore({}, step=3)


@pytest.mark.parametrize(("options", "message"), [({"keep": 0}, "keep=0"), ({"timeout": 0}, "timeout=0")])
def test_options_are_checked(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(alpa_lite.OptionError, match=message):
        CheckpointManager(tmp_path, **options)


# -- damage ------------------------------------------------------------------------------------------------------------


def largest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


def rewrite(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = largest(folder, "state/ocdbt.process_0/d/*")
    path.write_bytes(change(path.read_bytes()))


def flip(folder: Path) -> None:
    def flipped(data: bytes) -> bytes:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    rewrite(folder, flipped)


DAMAGE = {
    "a file cut short": (lambda folder: rewrite(folder, lambda data: data[:-7]), "bytes of"),
    "a bit": (flip, "not what was written"),
    "a file gone": (lambda folder: largest(folder, "state/d/*").unlink(), "is missing"),
    "checksums gone": (lambda folder: (folder / "checksums.json").unlink(), "checksums.json is missing"),
    "checksums cut short": (lambda folder: (folder / "checksums.json").write_text('{"crc32": {"a'), "damaged"),
    "state gone": (lambda folder: shutil.rmtree(folder / "state"), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_replaced(kind: str, tmp_path: Path, caplog: Any) -> None:
    break_it, why = DAMAGE[kind]
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2):
        manager.save(step, {"w": jnp.asarray(states.draw(64, seed=step))})
    manager.wait()
    break_it(tmp_path / "2")
    manager = CheckpointManager(tmp_path, keep=2)  # as another process would
    found = manager.restore({"w": jnp.zeros(64)})
    assert found.step == 1
    np.testing.assert_array_equal(found.state["w"], states.draw(64, seed=1))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{tmp_path / '2'} is skipped" in record.getMessage() and why in record.getMessage()
    caplog.clear()
    assert manager.latest_step() == 1
    manager.save(2, {"w": jnp.zeros(64)})
    manager.wait()
    assert manager.restore({"w": jnp.ones(64)}).step == 2 and manager.steps() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_without_checksums_what_cannot_be_read_is_skipped(tmp_path: Path, caplog: Any) -> None:
    with CheckpointManager(tmp_path, verify=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": jnp.full(64, step)})
    shutil.rmtree(tmp_path / "3" / "state" / "d")
    (tmp_path / "2" / "metadata" / "metadata").write_text("{")
    found = manager.restore({"w": jnp.zeros(64, int)})
    assert found.step == 1 and (found.state["w"] == 1).all()
    assert "metadata/metadata is damaged" in caplog.text
    caplog.clear()


def test_an_error_within_a_run_is_not_hidden_by_one_of_its_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(saving.ArrayHandler, "serialize", None)
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.ones(4)})
        raise ZeroDivisionError
    assert "could not be saved" in caplog.text
    caplog.clear()


def test_all_damaged_is_an_error_that_says_why(tmp_path: Path, caplog: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.ones(64)})
    flip(tmp_path / "1")
    with pytest.raises(CheckpointError, match="not damaged; 1: the contents of state/"):
        CheckpointManager(tmp_path).restore({"w": jnp.ones(64)})
    with pytest.raises(CheckpointError, match="is damaged: the contents of"):
        checkpoint.restore(tmp_path / "1", {"w": jnp.ones(64)})
    caplog.clear()


def test_a_checkpoint_that_was_not_finished_is_none(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"n": 1})
        manager.wait()
        shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
        assert manager.steps() == [1]
        manager.save(2, {"n": 2})
    assert manager.steps() == [1, 2] and not list(tmp_path.glob("*tmp"))


def test_metadata_is_json(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="stored as JSON"):
        checkpoint.save(tmp_path / "one", {"n": 1}, metadata=object())
    checkpoint.save(tmp_path / "one", {"n": 1}, metadata=[1])
    assert json.loads((tmp_path / "one" / "metadata" / "metadata").read_text())["user"] == [1]
