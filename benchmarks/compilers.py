"""Predictions against the compilers of CPUs, GPUs and TPUs, without the hardware.

`bytes_accessed`: bytes that whole steps of the gallery move on one device, predicted by the model of fusion, and
compiled for the GPU that XLA's target configuration describes (`-o target=h100.txtpb`; JAX's CUDA plugin, the extra
`cuda-verify`). That is the compiler of most machines that plans are made for. The CPU's emits loops for a few threads,
and fuses by other rules; libtpu reports bytes, but of its own padded layouts, and with prefetches into on-chip memory.
Away from the hardware the CUDA compiler reports none, so that they are read off its program (`hlo_bytes.py`).

`stage_memory`: temporaries of the stages of pipelines, and all memory of one mesh. Each step is planned for two
devices, as a pipeline of two stages with four micro-batches, and as one mesh, and compiled with the CPU compiler, or
for a `target` as above. Of a stage the executable with most temporaries counts, since a stage needs memory for one at a
time; of one mesh the peak. A step that cannot be cut into four has no stages.

`target_compilers`: collectives, and memory predicted and compiled, of plans for v5e, or with a `target` for a GPU. Two
cases differ in their rematerialisation alone: compilers may merge what is computed again with the first time, or run
something so late that its operands are kept, and either shows in the memory.

Products that are small for an H100 are split along k by the CUDA compiler, which writes and adds up the parts. That is
how a kernel gets its parallelism, and comes and goes with the size: the compiler is told to leave it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import alpa_lite
import gallery
from alpa_lite import models, verifying
from alpa_lite import steps as named_steps
from alpa_lite.api import make_options, make_plan
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.errors import MicrobatchError
from alpa_lite.passes.checks.verification import compiled_reports
from alpa_lite.passes.costs import traffic
from alpa_lite.passes.tracing import tracing
from alpa_lite.runtime import aot
from alpa_lite.steps import NamedStep
from benchmarks import hlo_bytes
from benchmarks.harness import Benchmark, Row

CASES = {name: case for name, case in gallery.find("outside").items() if case.small}
SPLIT_K = "xla_gpu_experimental_force_split_k"


def settings(options: Mapping[str, Any]) -> dict[str, str]:
    """Variables of a process: two devices, and for a GPU no split products, of which not every compiler knows."""
    split = f" --{SPLIT_K}=1" if "target" in options else ""
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2" + split}


# -- bytes ------------------------------------------------------------------------------------------------------------


def moved(name: str, target: str) -> Row:
    """Bytes of a case predicted and compiled."""
    described = aot.target_of(f"cuda:{target}", Cluster.preset("h100").part(1))
    (device,) = aot.devices_of(described)
    step, arguments = CASES[name].make()
    graph = tracing.trace(step, arguments, {}).graph
    start = time.process_time()
    predicted = traffic.moved_bytes(graph.block, graph.values)
    seconds = time.process_time() - start
    mesh = jax.sharding.Mesh(np.array([device]), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    jitted = jax.jit(step, in_shardings=everywhere, out_shardings=everywhere)
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile(compiler_options={SPLIT_K: 1})
    total, by = hlo_bytes.accessed(compiled.as_text() or "")
    return {
        "operations": len(graph.block.ops), "predicted": predicted, "compiled": total, "ratio": predicted / total,
        "seconds": seconds, "by": dict(by.most_common(8)),
        "compiler": f"{aot.compiler_version(described)} for {device.device_kind}",
    }  # fmt: skip


# -- memory of stages -------------------------------------------------------------------------------------------------


def stages(name: str, target: str | None = None) -> Row:
    """For each stage of a case the predicted and compiled bytes, and those of one mesh."""
    cluster, compiler = Cluster.preset("h100").part(2), f"CPU compiler of JAX {jax.__version__}"
    if target is None:
        cluster, devices = dataclasses.replace(cluster, platform="cpu"), jax.devices()[:2]
    else:
        described = aot.target_of(f"cuda:{target}", cluster)
        devices = aot.devices_of(described)
        compiler = f"{aot.compiler_version(described)} for {devices[0].device_kind}"
    method = alpa_lite.Pipeline(num_stages=2, schedule="1f1b", remat="none")
    out: Row = {"stages": []}
    for kind, options in {
        "pipeline": {"method": method, "num_microbatches": 4, "allow_inexact": True},
        "mesh": {"method": alpa_lite.Sharded()},
    }.items():
        step, arguments = CASES[name].make()
        try:
            compiled = compile_step(step, arguments, {}, make_options({**options, "cluster": cluster}), cluster)
        except MicrobatchError:  # such as a loss that compares every example with every other
            continue
        executables = list(aot.compile_for_devices(compiled.staged, compiled.plan, devices))
        most: dict[int, list[int]] = {}
        for found in compiled_reports(compiled.plan, compiled.staged, executables, cluster.platform):
            assert found.memory is not None
            pair = most.setdefault(found.submesh, [0, 0])
            here = found.memory.data if kind == "mesh" else found.memory.temporaries
            pair[:] = max(pair[0], found.memory.predicted_bytes or 0), max(pair[1], here)
        pairs = [most[key] for key in sorted(most)]
        out |= {"stages": pairs} if kind == "pipeline" else {"mesh": pairs[0]}
    return out | {"variant": compiler}


# -- target compilers -------------------------------------------------------------------------------------------------

WIDE = {"hidden": 512, "layers": 4, "vocab": 8192, "seq": 256}
DEEP = NamedStep("gpt", "tiny", 256, {"hidden": 128, "layers": 4, "vocab": 256, "seq": 256})
STEPS: dict[str, tuple[NamedStep, Any]] = {
    f"{step.name} {step.size}, batch {step.batch}{''.join(f' {k}={v}' for k, v in step.settings.items())}": (step, None)
    for step in (
        NamedStep("gpt", "tiny", 32),
        NamedStep("moe", "tiny", 32),
        NamedStep("gpt", "tiny", 64, WIDE),
        NamedStep("moe", "tiny", 64, {**WIDE, "group": 256}),
        NamedStep("gpt", "small", 64, {"layers": 2}),
    )
} | {f"deep gpt, remat {remat}": (DEEP, remat) for remat in ("none", "layer")}
"""Steps by their names, and how they are rematerialised; by the plan's choice if None."""


def compiled_for(case: str, target: str | None = None) -> Row:
    """A step planned for a cluster, and compiled for a target."""
    step, remat = STEPS[case]
    fun, args = models.get(step.name).abstract(step.size, step.batch, **step.settings)
    method = alpa_lite.Auto() if remat is None else alpa_lite.Sharded((8,), remat=remat)
    # What does not fit is for the compiler to say.
    options: Any = {} if remat is None else {"num_microbatches": 1, "memory_per_device": "1000 GiB"}
    start = time.perf_counter()
    plan = make_plan(fun, *args, cluster="h100" if target else "v5e", method=method, **options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        plan.save(file)
        named_steps.remember(file, step)
        seconds = time.perf_counter() - start
        found = verifying.verify(file, step, f"cuda:{target}" if target else "v5e:2x4", time_limit=1200.0)
    (memory,) = found["memory"]
    return {key: found[key] for key in ("communicates", "differences", "rewrites", "compiler")} | {
        "mesh": plan.stages[0].mesh_shape, "planning_seconds": seconds,
        "compiling_seconds": found["seconds"]["compiling"],
        "planned_collectives": sum(row["planned"] for row in found["collectives"]),
        "found_collectives": sum(row["found"] for row in found["collectives"]), "memory": memory,
        "variant": "cuda" if target else found["target"],
    }  # fmt: skip


BENCHMARKS = (
    Benchmark("bytes_accessed", lambda: CASES, moved, settings=settings, sources=("passes/ir", "passes/tracing")),
    Benchmark("stage_memory", lambda: CASES, stages, settings=settings),
    Benchmark("target_compilers", lambda: STEPS, compiled_for, settings=settings, limit=1800),
)  # fmt: skip
