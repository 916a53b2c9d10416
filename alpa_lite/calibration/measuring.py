"""Measures devices, all at once: the only module of the library that times something to plan with it.

An operation of the device is repeated in a loop inside one compiled program, whose number of rounds is an argument: the
seconds of `n` rounds less those of none, divided by `n`. Each round depends on the one before by one element, so that
the compiler can neither leave a round out nor join two. The start of a task is measured as in a pipeline: every submesh
is given its turn, and nothing is waited for until the end.

All cases are compiled first and then measured in turn, several times, so that a disturbance of the machine for a second
affects a little of everything. Of each case the lower quartile counts: other processes can only slow it down.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.calibration import samples
from alpa_lite.calibration.fitting import Calibration, fit_cluster
from alpa_lite.calibration.samples import Grid, Sample
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.ir.layout import Axes, LogicalMesh

COMPILING = 0.6
"""The share of the time in which cases are compiled; cases not compiled by then are left out."""

ONE = 0.012
"""Seconds of one timing, about: a hundred times what the clock and the call disturb it by."""

WARM = 5.0
"""Seconds after which the clock of a device is taken to be that of long work."""

ROUNDS = 25
"""How often each case is timed at most."""

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "f64": jnp.float64}
_TASKS = 48  # of one timing of what starts tasks
_VALUES = 5  # arguments of a task, as pipelines have in the mean (benchmarks/results/pipeline_overhead.json)
_TINY = 1e-30

Case = Callable[[], float]
"""Times one operation once: its seconds."""

Count = Callable[[str, int, int], None]
"""A progress callback: called with the name of the counted items, the number done, and the total."""


def calibrate(
    devices: Sequence[Any] | int | None = None, *, seconds: float = 60.0, grid: Grid | None = None,
    progress: Count = lambda what, done, total: None,
) -> Calibration:  # fmt: skip
    """Measures devices and fits a cluster to them.

    Args:
      devices: or how many of those that JAX has here, by default all; they must belong to this process.
      seconds: about how long it may take, compiling included. Parameters left unmeasured stay as in the preset.
      grid: the sizes that are measured; by default those of `Grid.from_platform`.
      progress: called with the numbers of cases compiled and of rounds measured.

    Raises:
      OptionError: the devices belong to several processes, no preset describes them, or there is too little time.
    """
    found = list(jax.devices()[:devices] if devices is None or isinstance(devices, int) else devices)
    if any(device.process_index != jax.process_index() for device in found):
        raise OptionError("calibrate: the devices belong to several processes; run it in one process, on one node")
    started = time.perf_counter()
    cluster = Cluster.local(found, calibration=None)
    grid = Grid.from_platform(cluster.platform) if grid is None else grid
    wanted = list(samples.cases(grid, cluster))
    ready: list[tuple[Sample, Case]] = []
    for number, (sample, mesh, axes) in enumerate(wanted):
        if time.perf_counter() - started > COMPILING * seconds:
            break
        progress("cases compiled", number, len(wanted))
        ready.append((sample, case(sample, found, mesh, axes)))
    measured = list(rounds(ready, started + seconds, progress))
    if not measured:
        raise OptionError(f"seconds={seconds!r}: nothing could be compiled and measured in that time; give more")
    fits, fit = fit_cluster(cluster, measured, len(wanted) - len(measured))
    return Calibration.create(fit, fits, tuple(measured), len(wanted), time.perf_counter() - started)


def rounds(ready: Sequence[tuple[Sample, Case]], end: float, progress: Count) -> Iterator[Sample]:
    """Times all cases in turn until `end`, once at least and `ROUNDS` times at most: the samples with their seconds."""
    times: list[list[float]] = [[] for _ in ready]
    for turn in range(ROUNDS):
        progress("rounds measured", turn, ROUNDS)
        for own, (_, timed) in zip(times, ready, strict=True):
            if turn and time.perf_counter() > end:
                break
            own.append(timed())
    for own, (sample, _) in zip(times, ready, strict=True):
        least = float(np.quantile([one for one in own if one > 0] or [0.0], 0.25))
        if least > 0:
            yield dataclasses.replace(sample, seconds=least)


def case(sample: Sample, devices: Sequence[Any], mesh: LogicalMesh | None, axes: Axes) -> Case:
    """Compiles the operation that a sample measures, runs it once, and returns its case."""
    match sample.figure:
        case "run" | "transfer":
            return _tasks(sample.figure, sample.sizes[0], devices)
        case "product" | "sustained":
            m, n, k = sample.sizes
            dtype = _DTYPES[sample.dtype]
            timed = _loop(devices, None, _product, [((m, k), dtype), ((k, n), dtype)])
            return _sustained(timed) if sample.figure == "sustained" else timed
        case "kernel":
            once = _loop(devices, None, functools.partial(_kernels, sample.sizes[0]), [((256,), jnp.float32)])
            return lambda: once() / sample.sizes[0]
        case "attention":
            return _loop(devices, None, *attention(sample))
        case "elementwise":
            return _loop(devices, None, _elementwise, [((sample.sizes[0] // 4,), jnp.float32)])
        case "collective":
            assert mesh is not None
            operation, size = _collective(sample.kind, mesh, axes, max(1, sample.sizes[0] // 4))
            return _loop(devices, mesh, operation, [((size,), jnp.float32)])


# -- operations of devices --------------------------------------------------------------------------------------------


def _product(x: Any, weights: Any) -> Any:
    out = x @ weights
    return x.at[0, 0].set(out[0, 0] * _TINY)


def _elementwise(x: Any) -> Any:
    return x * 0.999 + 0.001


def _kernels(count: int, x: Any) -> Any:
    """Returns a chain of operations that the compiler cannot put into one kernel."""
    for _ in range(count):
        x = jax.lax.optimization_barrier(x * 0.999 + 0.001)
    return x


def attention(sample: Sample, implementation: Literal["cudnn", "xla"] = "cudnn") -> tuple[Callable[..., Any], Any]:
    """Returns a pass of causal attention whose operand goes round, and its operands.

    The backward pass runs the forward pass, too; `fitting` takes that off again.
    """
    shape, dtype = sample.sizes, _DTYPES[sample.dtype]

    def forward(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    def backward(q: Any, k: Any, v: Any) -> Any:
        return sum(jax.grad(lambda *xs: forward(*xs).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v))

    return forward if sample.kind == "forward" else backward, [(shape, dtype)] * 3


def _sustained(timed: Case) -> Case:
    """Returns seconds of an operation once it has run for `WARM` seconds; measured once."""

    @functools.cache
    def once() -> float:
        start = time.perf_counter()
        found = timed()
        while time.perf_counter() - start < WARM:
            found = timed()
        return found

    return once


def _collective(kind: str, mesh: LogicalMesh, axes: Axes, elements: int) -> tuple[Callable[[Any], Any], int]:
    """Returns a round's operation on each device's operand, and the operand's elements, for a payload in elements."""
    size = mesh.product(axes)
    rounded = max(1, elements // size) * size

    def then(x: Any, out: Any) -> Any:
        return x.at[0].set(out.reshape(-1)[0] * _TINY)

    ring = [(i, (i + 1) % size) for i in range(size)]
    rounds: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: then(x, jax.lax.psum(x, axes)),
        "all_gather": lambda x: then(x, jax.lax.all_gather(x, axes, tiled=True)),
        "reduce_scatter": lambda x: then(x, jax.lax.psum_scatter(x, axes, tiled=True)),
        "all_to_all": lambda x: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
        "collective_permute": lambda x: jax.lax.ppermute(x, axes, ring),
    }
    return rounds[kind], rounded // size if kind == "all_gather" else rounded


def _loop(
    devices: Sequence[Any], logical: LogicalMesh | None, operation: Callable[..., Any], operands: Sequence[Any]
) -> Case:
    """Times an operation on blocks of arrays that every device has: the first operand goes round."""
    logical = LogicalMesh((len(devices),), ("x",)) if logical is None else logical
    mesh = Mesh(np.array(devices).reshape(logical.shape), logical.axis_names)
    spec = PartitionSpec(logical.axis_names)
    sharding = NamedSharding(mesh, spec)

    def local(count: Any, first: Any, *rest: Any) -> Any:
        others = [x[0] for x in rest]
        return jax.lax.fori_loop(0, count, lambda _, x: operation(x, *others), first[0])[None]

    whole = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), *(spec for _ in operands)), out_specs=spec, check_vma=False
    )
    arrays = [
        jax.jit(lambda s=shape, d=dtype: jnp.full((len(devices), *s), 0.5, d), out_shardings=sharding)()
        for shape, dtype in operands
    ]
    run = jax.jit(whole).lower(jnp.int32(1), *arrays).compile()

    @functools.cache
    def on_devices(count: int) -> Any:
        return jax.block_until_ready(jax.device_put(np.int32(count), NamedSharding(mesh, PartitionSpec())))

    def seconds(count: int) -> float:
        rounds = on_devices(count)
        start = time.perf_counter()
        jax.block_until_ready(run(rounds, *arrays))
        return time.perf_counter() - start

    seconds(1)
    count = 1
    while count < 2**20 and (found := seconds(count)) < ONE:
        count = count * 2 if found < ONE / 8 else max(count + 1, int(count * ONE / found))
    return lambda: (seconds(count) - seconds(0)) / count


# -- what starts tasks ------------------------------------------------------------------------------------------------


def _tasks(figure: Literal["run", "transfer"], size: int, devices: Sequence[Any]) -> Case:
    """Times many tasks on submeshes in turn, from the first start to the last result, divided by their number.

    A run takes the results of the one before it on its submesh; a transfer moves an array to the next submesh.
    """
    parts = [devices[i : i + size] for i in range(0, len(devices), size)]
    shardings = [NamedSharding(Mesh(np.array(part), ("x",)), PartitionSpec("x")) for part in parts]
    start, runs = [], []
    for sharding in shardings:
        start.append([jax.device_put(np.full((8 * size,), 0.5, np.float32), sharding) for _ in range(_VALUES)])
        step = jax.jit(lambda *values: [x + 1.0 for x in values], out_shardings=[sharding] * _VALUES)
        runs.append(step.lower(*start[-1]).compile() if figure == "run" else None)

    def timed() -> float:
        values: dict[int, Any] = {}
        begin = time.perf_counter()
        for number in range(_TASKS):
            here = number % len(shardings)
            if run := runs[here]:
                values[here] = run(*values.get(here, start[here]))
            else:
                values[number] = jax.device_put(start[here][0], shardings[(here + 1) % len(shardings)])
        jax.block_until_ready(values)
        return (time.perf_counter() - begin) / _TASKS

    timed()
    return timed
