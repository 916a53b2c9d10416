"""Pipelines with given stages, planned straight through the passes: what tests of pipelines run on.

The stage search is left out: the forward pass is cut into stages of about as many layers each, and every stage is
planned on the submesh that it is given. What follows is what the compiler does with the stages that it chose.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from alpa_lite.cluster import Cluster
from alpa_lite.ir import graph, schedules
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.schedules import Schedule
from alpa_lite.options import Sharded
from alpa_lite.passes.factors import rules_of
from alpa_lite.passes.layers import division
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.layers.types import Assignment, Layering
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs.staged import write
from alpa_lite.passes.programs.writing import WrittenProgram
from alpa_lite.passes.stages import planning, staging
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.passes.tokens import slice_sequence
from alpa_lite.passes.tracing import tracing
from alpa_lite.runtime.pipeline import PipelineExecutable
from tests import comparing

DEVICES = {1: (8,), 2: (4, 4), 3: (2, 2, 4), 4: (2, 2, 2, 2), 8: (1,) * 8}
"""Submeshes of eight devices, by their number."""


class TooFewLayers(ValueError):
    """A step cannot be cut into this many stages."""


@dataclass(frozen=True)
class Staged:
    """A step in stages, not planned yet."""

    traced: Traced
    accumulated: Accumulated
    layers: Layering
    assignment: Assignment
    graphs: tuple[StageGraph, ...]


@dataclass(frozen=True)
class Driven:
    """A planned pipeline."""

    staged: Staged
    stages: tuple[PlannedStage, ...]
    schedule: Schedule
    pipeline: WrittenProgram
    cluster: Cluster

    def executable(self) -> PipelineExecutable:
        """The pipeline on the devices that are here."""
        return PipelineExecutable(self.staged.traced, self.pipeline, self.cluster)


def staged(
    step: Callable[..., Any],
    args: Sequence[Any],
    stages: int,
    microbatches: int,
    *,
    cuts: Sequence[int] | None = None,
    remat: Sequence[Choice] = (),
    tokens: Sequence[int] = (),
) -> Staged:
    """The step as a loop over micro-batches, cut into stages; `cuts` are the first layers of all stages but one.

    With `tokens` it is in slices of the sequence of this many tokens each.
    """
    traced = tracing.trace(
        step, args, {}, batch_argnums="auto", batch_argnames=(), static_argnums=(), static_argnames=()
    )
    accumulated = loop.accumulate(traced, _rules(traced), microbatches)
    graph.check(accumulated.traced.graph)
    step_in_layers = division.find_layers(accumulated, max_layers=16)
    count = len(step_in_layers.layering.layers)
    if count < stages:
        raise TooFewLayers(f"the step has {count} layers")
    if cuts is None:
        cuts = [round(i * count / stages) for i in range(1, stages)]
    cut = division.divide_into_stages(step_in_layers, cuts, remat)
    if tokens:
        cut = slice_sequence(cut, tokens)
    accumulated, assignment = cut.accumulated, cut.assignment
    graphs = staging.stage_graphs(accumulated.traced, accumulated.scan, assignment)
    for one in graphs:
        graph.check(one.traced.graph)
    return Staged(accumulated.traced, accumulated, cut.layering, assignment, graphs)


def drive(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    devices: Sequence[int] = (4, 4),
    microbatches: int = 2,
    schedule: str = "1f1b",
    virtual: int = 1,
    cuts: Sequence[int] | None = None,
    remat: Sequence[Choice] = (),
    tokens: Sequence[int] = (),
    cluster: Cluster | None = None,
    price: float = 0.0,
) -> Driven:
    """Plans a step as a pipeline, one submesh of one axis for each number of `devices`; `tokens` as for `staged`.

    `price` is of memory.
    """
    cut = staged(step, args, len(devices) * virtual, microbatches, cuts=cuts, remat=remat, tokens=tokens)
    cluster = cluster or Cluster.local()
    tasks = schedules.schedule(schedule, len(devices), microbatches, virtual=virtual, slices=len(tokens) or 1)
    planned = tuple(
        planning.lower_stage(
            planning.decide(
                one, cluster.part(devices[tasks.mesh(number)]), Sharded((devices[tasks.mesh(number)],)),
                price=price, split_weights=tasks.splits_backward,
            ),
            split_weights=tasks.splits_backward,
        )
        for number, one in enumerate(cut.graphs)
    )  # fmt: skip
    return _written(cut, planned, devices, tasks, cluster)


def rescheduled(driven: Driven, schedule: str) -> Driven:
    """The same stages under another schedule, which must split the backward pass alike and have as many of them."""
    program, before = driven.pipeline.program, driven.schedule
    virtual = before.num_stages // before.num_meshes
    tasks = schedules.schedule(schedule, before.num_meshes, before.num_microbatches, virtual=virtual)
    assert tasks.splits_backward == before.splits_backward
    devices = [submesh.mesh.size for submesh in program.submeshes]
    return _written(driven.staged, driven.stages, devices, tasks, driven.cluster)


def _written(
    cut: Staged, planned: tuple[PlannedStage, ...], devices: Sequence[int], tasks: Schedule, cluster: Cluster
) -> Driven:
    first_devices = [sum(devices[:m]) for m in range(len(devices))]
    pipeline = write(cut.accumulated.traced, planned, first_devices, tasks, cluster)
    return Driven(cut, planned, tasks, pipeline, cluster)


def consecutive(step: Callable[..., Any], args: tuple[Any, ...], style: str, steps: int = 3) -> Iterator[Any]:
    """What each of consecutive steps returns, on copies of the arguments. It may be consumed by the next step."""
    args = _copied(args, style)
    for _ in range(steps):
        out = comparing.called(step, args, style)
        yield out
        if style != "nnx":  # modules are updated in place; of the others, the leading results are the next arguments
            args = (*out[:-1], *args[len(out) - 1 :])


def on_one_device(step: Callable[..., Any], args: tuple[Any, ...], style: str) -> list[Any]:
    """What three consecutive steps return on one device."""
    return list(consecutive((nnx.jit if style == "nnx" else jax.jit)(step), args, style))


def compare_steps(
    executable: Callable[..., Any], step: Callable[..., Any], args: tuple[Any, ...], style: str = "functional"
) -> None:
    """Runs consecutive steps beside the single-device step, and compares all that each returns with `compare`."""
    for got, want in zip(consecutive(executable, args, style), on_one_device(step, args, style), strict=True):
        comparing.compare(got, want)


def _copied(args: tuple[Any, ...], style: str) -> tuple[Any, ...]:
    """The arguments in arrays of their own. What is static in them (an optimizer's functions) is the same object."""
    if style != "nnx":
        return jax.tree.map(jnp.copy, args)
    definition, state = nnx.split(args)
    return nnx.merge(definition, jax.tree.map(jnp.copy, state))


def _rules(traced: Traced) -> Any:
    return rules_of(traced.graph.ops(), traced.graph.values)


def measure_peak(executable: PipelineExecutable, *args: Any) -> tuple[int, ...]:
    """Runs the step once on copies, and returns the most bytes that its live arrays took, of the fullest device.

    Every array of the process counts that was not there before, and constants of the step; arrays that share memory
    count once. It waits for each instruction. `program.peak_bytes` predicts it.

    Returns:
      For each submesh, bytes of the device that holds most.
    """
    executable.compiled_executables()
    constants = _blocks(x for x in executable._initial if x is not None)
    before, meshes = _blocks(jax.live_arrays()).keys() - constants.keys(), executable._buffers.meshes
    most = [0] * len(meshes)

    def count(_: int, buffers: Sequence[Any]) -> None:
        jax.block_until_ready([x for x in buffers if x is not None])
        held: Counter[int] = Counter()
        for (device, pointer), size in _blocks(jax.live_arrays()).items():
            held[device] += size if (device, pointer) not in before else 0
        for mesh, devices in enumerate(meshes):
            most[mesh] = max(most[mesh], *(held[d.id] for d in devices.devices.flat))

    buffers = executable._buffers_of_copies(args, {})
    count(-1, buffers)
    executable._dispatch(buffers, count)
    return tuple(most)


def _blocks(arrays: Iterable[jax.Array]) -> dict[tuple[int, int], int]:
    """Bytes of the distinct blocks of arrays, by device and address."""
    shards = (shard for array in arrays if not array.is_deleted() for shard in array.addressable_shards)
    return {(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards if s.data.nbytes}
