"""The cases of `process_correctness.py`, and what a process of them does: it trains, and writes down what it has.

A *layout* is processes times devices of each. On every layout each method runs with one of the models, so chosen that
every method also meets every model, and every model every layout. Three consecutive steps; each process keeps the
blocks that its devices hold of losses, gradients and states. Then one process with as many devices as all of them runs
the plan that they had, and the step as written on one device, and compares.

`process_correctness.py` starts this file in every process. Its arguments, after those of the driver: a folder, and the
cases by name.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import pickle
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.ir import schedules
from tests import comparing, pipeline_driver, zoo
from tests.processes import worker

SECONDS = 240
"""After so long a case has hung, and its process ends."""

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
    found = zoo.get(case.model)
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
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        ours.plans[0].save(folder / "plan.json")
    part = folder / f"{jax.process_index()}.part"
    part.write_bytes(pickle.dumps(steps))
    part.rename(part.with_suffix(".pkl"))


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


def largest(got: list[dict[str, np.ndarray]], want: list[dict[str, np.ndarray]]) -> tuple[float, str]:
    """The largest error of any leaf of any step as a share of what is allowed, and the leaf."""
    found = {
        f"step {number} {name}": error
        for number, (one, other) in enumerate(zip(got, want, strict=True))
        for name, error in comparing.errors(one, other).items()
    }
    leaf = max(found, key=found.__getitem__)
    return float(found[leaf]), leaf


@functools.cache
def on_one_device(model: str, batch: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """What the step as written gives; kept in a file, since layouts share it."""
    path = folder / f"{model} {batch}.pkl"
    if not path.exists():
        case = next(case for case in CASES if case.model == model and BATCH.get(case.layout, 8) == batch)
        step, args, style = made(case)
        found = [comparing.leaves(out) for out in pipeline_driver.on_one_device(step, args, style)]
        path.write_bytes(pickle.dumps(found))
    return pickle.loads(path.read_bytes())


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Runs the plan of a case in this process alone; the row of the results."""
    here = folder / case.name
    processes = [pickle.loads((here / f"{n}.pkl").read_bytes()) for n in range(case.processes)]
    plain = on_one_device(case.model, BATCH.get(case.layout, 8), folder)
    step, args, style = made(case)
    plan = alpa_lite.Plan.load(here / "plan.json")
    again = alpa_lite.parallelize(step, plan=plan)
    alone = [comparing.leaves(out) for out in pipeline_driver.consecutive(again, args, style, STEPS)]
    (taken,) = again.plans
    assert taken.schedule == plan.schedule and taken.num_microbatches == plan.num_microbatches
    for one, other in zip(taken.stages, plan.stages, strict=True):  # seconds and buffers differ: one process, one node
        for field in ("mesh_shape", "arguments", "results"):
            assert getattr(one, field) == getattr(other, field), f"another plan: {field}"
    got, blocks = [], 0
    for number, want in enumerate(plain):
        one, count = joined([steps[number] for steps in processes], want)
        got.append(one)
        blocks += count
    error, leaf = largest(got, plain)
    return {
        "error": error, "leaf": leaf, "alone": largest(got, alone)[0], "alone and plain": largest(alone, plain)[0],
        "leaves": sum(map(len, plain)), "blocks": blocks,
        "meshes": [list(stage.mesh_shape) for stage in plan.stages], "micro-batches": plan.num_microbatches,
    }  # fmt: skip


def error_of(own: Path) -> Path:
    """The file for the error of a case in this process."""
    return own / f"{jax.process_index()} of {jax.process_count()}.error"


def attempts(folder: Path, names: list[str]) -> Iterator[tuple[Case, Path]]:
    """The cases with their folders; an error of one is written there, and does not keep the others from running."""
    for name in names:
        case = Case(*name.split(", "))
        (folder / name).mkdir(parents=True, exist_ok=True)
        error_of(folder / name).unlink(missing_ok=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        yield case, folder / name


def main() -> None:
    folder, *names = worker.start()
    for case, own in attempts(Path(folder), names):
        begin = time.monotonic()
        try:
            if jax.process_count() == 1:
                (own / "row.json").write_text(json.dumps(compare(case, Path(folder))))
            else:
                train(case, own)
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
            error_of(own).write_text(text)
            worker.say(case.name, text)
        worker.say(case.name, f"{time.monotonic() - begin:.1f} s, {time.process_time():.1f} s of the processor so far")
        jax.clear_caches()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
