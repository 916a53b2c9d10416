"""Whether several processes compute what one process computes by the same plan, and what one device computes.

A *layout* is processes times devices of each. On every layout each method runs with one of the models, so chosen that
every method also meets every model, and every model every layout. Three consecutive steps; each process keeps the
blocks that its devices hold of losses, gradients and states. Then one process with as many devices as all of them runs
the plan that they had, and the step as written on one device, and compares. A leaf is put together from the blocks of
all processes; of copies of a block the worst counts. LLVM's optimisations are off on both sides, as in the tests.

    python -m benchmarks run process_correctness 2x4 4x1 --missing
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite
import gallery
from alpa_lite.ir import schedules
from benchmarks.harness import Benchmark, Row, Rows
from benchmarks.numerics import largest
from tests import comparing, pipeline_driver
from tests.processes import driver, worker

SECONDS = 240
"""After so long a case has hung, and its processes are ended."""

STEPS = 3

BATCH = {"2x3": 24, "4x4": 16}
"""Examples, where eight cannot be cut over all devices."""

MODELS: Mapping[str, Mapping[str, P]] = {
    "linen_gpt": {"*Block_*/Dense_0/kernel": P(None, "x"), "*Block_*/Dense_1/kernel": P("x")},
    "nnx_user_gpt": {"*up/kernel*": P(None, "x"), "*down/kernel*": P("x")},
    "linen_moe": {"*/up": P("x"), "*/down": P("x")},
    "nnx_moe": {"*/up": P("x"), "*/down": P("x")},
    "linen_unet": {"*Conv_*/kernel": P(None, None, None, "x")},
    "nnx_unet": {"*convs/*/kernel": P(None, None, None, "x")},
}
"""Models of the tests' zoo, and what of them `Manual` shards by hand: halves of layers, channels, or experts."""

PLAIN: Mapping[str, Any] = {
    "auto": alpa_lite.Auto(),
    "sharded": alpa_lite.Sharded(),
    "data parallel": alpa_lite.DataParallel(),
    "zero-1": alpa_lite.Zero(1),
    "zero-2": alpa_lite.Zero(2),
    "zero-3": alpa_lite.Zero(3),
    "tensor parallel": alpa_lite.TensorParallel(),
}
METHODS = (*PLAIN, "manual", *schedules.NAMES)

SUBMESHES: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "2x1": ((1, 1), (1, 1), (1, 1), (1, 1), (1, 1)),
    "2x2": ((2, 2), (1, 2), (1, 1, 2), (2, 2), (2, 1, 1)),
    "2x3": ((3, 3), (1, 3), (1, 1, 1, 3), (3, 3), (3, 1)),
    "2x4": ((4, 2), (2, 2, 4), (2, 2, 2, 2), ((2, 2), 4), (4, 4)),
    "4x1": ((1, 1, 1, 1), (2, 2), (1, 2), (2, 2), (2, 1, 1)),
    "4x2": ((2, 2, 2, 2), (4, 4), (2, 2, 4), (4, 4), (1, 1, 2, 4)),
    "4x4": ((4, 4, 4, 4), (8, 8), (8, 4, 4), (8, 8), ((2, 4), 8)),
}
"""For each layout the submeshes of the stages, one tuple for each schedule: stages on a process of their own, several
on one process, stages that span processes, unequal ones, and some that leave devices idle."""


@dataclass(frozen=True)
class Case:
    """What is trained, where and how."""

    layout: str
    method: str
    model: str

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return f"{self.layout}, {self.method}, {self.model}"

    @property
    def processes(self) -> int:
        """How many run it."""
        return int(self.layout.split("x")[0])

    @property
    def devices(self) -> int:
        """Of each process."""
        return int(self.layout.split("x")[1])

    def options(self) -> dict[str, Any]:
        """Those of `parallelize`."""
        if self.method in PLAIN:
            return {"method": PLAIN[self.method]}
        if self.method == "manual":
            shape = (self.processes * self.devices // 2, 2)
            return {"method": alpa_lite.Manual(MODELS[self.model], mesh_shape=shape, axis_names=("rest", "x"))}
        shapes = SUBMESHES[self.layout][schedules.NAMES.index(self.method)]
        method = alpa_lite.Pipeline(submesh_shapes=shapes, schedule=self.method)
        return {"method": method, "num_microbatches": 2 if len(shapes) == 2 else 4}


CASES = [
    Case(layout, method, list(MODELS)[(row + column) % len(MODELS)])
    for column, layout in enumerate(SUBMESHES)
    for row, method in enumerate(METHODS)
]


def made(case: Case) -> tuple[Any, tuple[Any, ...], str]:
    """The step of a case, its arguments, and its style."""
    found = gallery.get("zoo", case.model)
    step, args = found.make()
    times = BATCH.get(case.layout, 8) // 8
    place = 2 if found.style == "nnx" else 1
    batch = jax.tree.map(lambda x: jnp.concatenate([jnp.roll(x, n, -1) for n in range(times)]), args[place])
    return step, (*args[:place], batch, *args[place + 1 :]), found.style


# -- what several processes do -----------------------------------------------------------------------------------------

Blocks = list[tuple[tuple[tuple[int, int], ...], np.ndarray]]


def blocks_of(leaf: Any) -> Blocks:
    """The distinct blocks of an array that this process has, each with where it begins and ends along every dim."""
    data = worker.plain(leaf)
    if not isinstance(data, jax.Array):
        whole = np.asarray(data)
        return [(tuple((0, size) for size in whole.shape), whole)]
    found: Blocks = []
    for shard in data.addressable_shards:
        place = tuple(one.indices(size)[:2] for one, size in zip(shard.index, data.shape, strict=True))
        block = np.asarray(shard.data)
        if not any(other == place and same.tobytes() == block.tobytes() for other, same in found):
            found.append((place, block))
    return found


def train(case: Case, folder: Path) -> None:
    """Takes the steps of a case with the other processes, and writes the blocks of this one."""
    step, args, style = made(case)
    ours = alpa_lite.parallelize(step, **case.options())
    steps = []
    for out in pipeline_driver.consecutive(ours, args, style, STEPS):
        steps.append({
            jax.tree_util.keystr(path): blocks_of(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(out)
        })  # fmt: skip
    if jax.process_index() == 0:
        ours.plans[0].save(folder / "plan.json")
    (folder / f"{jax.process_index()}.pkl").write_bytes(pickle.dumps(steps))


# -- what one process does ---------------------------------------------------------------------------------------------


def joined(processes: list[dict[str, Any]], whole: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """The leaves of a step from the blocks of all processes, and how many blocks there are.

    Where several devices have a block, the one that is farthest from `whole` counts.

    Raises:
      AssertionError: the blocks of a leaf do not make it whole, or a process does not have the loss.
    """
    out, count = {}, 0
    for name, want in whole.items():
        found = [block for process in processes for block in process[name] if block[1].size]
        count += len(found)
        leaf, taken = np.zeros(want.shape, want.dtype), np.zeros(want.shape, bool)
        farthest: dict[Any, float] = {}
        for place, block in found:
            index = tuple(slice(*ends) for ends in place)
            assert block.dtype == want.dtype, name
            error = float(np.linalg.norm(np.ravel(block.astype(np.float64) - want[index].astype(np.float64))))
            if place not in farthest or not error <= farthest[place]:
                farthest[place], leaf[index] = error, block
            taken[index] = True
        assert taken.all(), f"{name}: no process has some of its elements"
        if "['loss']" in name or name == "[0]":
            assert all(process[name] for process in processes), f"{name}: a process cannot read it"
        out[name] = leaf
    return out, count


def measure(name: str) -> Row:
    """Trains in several processes, then in this one by the same plan and on one device; the largest errors."""
    case = Case(*name.split(", "))
    jax.config.update("jax_num_cpu_devices", case.processes * case.devices)
    with tempfile.TemporaryDirectory() as folder:
        ended = driver.run(__file__, case.processes, case.devices, folder, name, seconds=SECONDS)
        if any(one.code != 0 for one in ended):
            raise RuntimeError(" | ".join(f"{one.code}: {one.text[-900:]}" for one in ended))
        parts = [pickle.loads((Path(folder) / f"{n}.pkl").read_bytes()) for n in range(case.processes)]
        plan = alpa_lite.Plan.load(Path(folder) / "plan.json")
    step, args, style = made(case)
    plain = [comparing.leaves(out) for out in pipeline_driver.on_one_device(step, args, style)]
    again = alpa_lite.parallelize(step, plan=plan)
    alone = [comparing.leaves(out) for out in pipeline_driver.consecutive(again, args, style, STEPS)]
    (taken,) = again.plans
    assert taken.schedule == plan.schedule and taken.num_microbatches == plan.num_microbatches
    for one, other in zip(taken.stages, plan.stages, strict=True):  # seconds and buffers differ: one process, one node
        for field in ("mesh_shape", "arguments", "results"):
            assert getattr(one, field) == getattr(other, field), f"another plan: {field}"
    whole = [joined([steps[number] for steps in parts], want) for number, want in enumerate(plain)]
    got = [leaves for leaves, _ in whole]
    return largest(got, plain) | {
        "alone": largest(got, alone)["error"], "alone and plain": largest(alone, plain)["error"],
        "blocks": sum(count for _, count in whole), "meshes": [list(stage.mesh_shape) for stage in plan.stages],
        "micro-batches": plan.num_microbatches,
    }  # fmt: skip


def view(rows: Rows) -> Row:
    """The names of the cases by method and layout."""
    names = {method: [case.name for case in CASES if case.method == method] for method in METHODS}
    return {"layouts": SUBMESHES, "methods": METHODS, "names": names}


BENCHMARKS = (
    Benchmark(
        "process_correctness", lambda: [case.name for case in CASES], measure, view, versions=True, quickly=True
    ),
)  # fmt: skip


def main() -> None:
    """One process of a case."""
    folder, name = worker.start()
    train(Case(*name.split(", ")), Path(folder))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
