"""Labels of results from the start: only where transfers of one label are all that reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.program import Run
from alpa_lite.runtime import relabelling
from tests.passes.layers.division_cases import driven


def test_results_are_labelled_that_only_transfers_of_one_label_read() -> None:
    program = driven("plain", 2, "1f1b").pipeline.program
    labels = {number: [f"to {t.destination}"] * len(t.sent) for number, t in enumerate(program.transfers)}
    found = relabelling.of_results(program, labels)
    read = {b for items in program.lists for item in items if isinstance(item, Run) for b in item.inputs}
    sent = {b: t.destination for t in program.transfers for b in t.sent}
    labelled = 0
    for item in (item for items in program.lists for item in items if isinstance(item, Run)):
        for position, buffer in enumerate(item.outputs):
            label = found[item.executable].get(position)
            alone = buffer in sent and buffer not in read and buffer not in program.outputs
            assert label == (f"to {sent[buffer]}" if alone else None)
            labelled += alone
    assert labelled == len(program.transfers)  # an activation or its gradient each
    mixed = {number: [number] * len(t.sent) for number, t in enumerate(program.transfers)}
    assert not any(relabelling.of_results(program, mixed).values())  # one executable, another label each time
    assert not any(relabelling.of_results(program, {}).values())
    (loss,) = (b for b in program.outputs if not program.buffers[b].shape)
    (result,) = (one for one in relabelling.of_results(program, {}, {loss: "to all"}).values() if one)
    assert list(result.values()) == ["to all"]


def test_a_program_calls_its_results_by_another_sharding() -> None:
    devices = np.array(jax.devices()[:2])
    one, other = (
        NamedSharding(Mesh(d, (axis,), axis_types=(AxisType.Auto,)), PartitionSpec(axis))
        for d, axis in ((devices, "x"), (devices, "y"))
    )
    compiled = jax.jit(lambda x: (x + 1, x - 1), out_shardings=one).lower(
        jax.ShapeDtypeStruct((4,), jnp.float32, sharding=one)
    ).compile()  # fmt: skip
    _jax.call_results(compiled, {1: other})
    x = jax.device_put(np.arange(4, dtype=np.float32), one)
    for n in range(3):
        more, less = compiled(x)
        assert more.sharding is one or more.sharding == one
        assert (less.sharding is other) == (n > 0)  # the first call does not go through C++
        assert np.array_equal(less, np.arange(4) - 1) and np.array_equal(more, np.arange(4) + 1)
