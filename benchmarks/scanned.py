"""Scanned and unrolled forms of eight models: predicted seconds, and the collectives of one step.

Each model is written twice, with its layers (or its accumulation of gradients) in a `lax.scan` and as a Python loop,
and planned for 8 A100 by four methods without a memory limit. The two forms compute the same function, so their plans
should take as long. Each row itemises the difference: seconds of products, of operations bound by memory, of links and
their latencies, of kernel starts; and the payload bytes of all collectives of one step per device.

Of the smallest models with scanned layers also the temporaries, by XLA's compiler for one CPU device.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax

import alpa_lite
from alpa_lite.models import MODELS
from alpa_lite.passes.ir.evaluation import evaluate_block
from alpa_lite.passes.layers.residuals import reduce_residuals
from alpa_lite.passes.tracing import tracing
from benchmarks.harness import Benchmark, Row, Rows
from benchmarks.published import kind
from gallery import Built
from gallery.outside.habits import lstm
from gallery.outside.tutorials import Llama, accumulation_step
from gallery.outside.unusual import fold
from gallery.steps import language

UNBOUNDED = 2**45  # bytes per device
METHODS: Mapping[str, tuple[Any, int]] = {
    "data parallel": (alpa_lite.DataParallel(), 1),
    "data parallel, 4 micro-batches": (alpa_lite.DataParallel(), 4),
    "ZeRO-3": (alpa_lite.Zero(3), 1),
    "tensor parallel": (alpa_lite.TensorParallel(), 1),
}
TERMS = ("products", "memory", "links", "latency", "starts")
TEMPORARIES = "temporaries of "


def library(name: str, size: str, batch: int, scan: bool) -> Built:
    """A model of the library with four layers."""
    step, args = MODELS[name].abstract(size, batch, scan=scan, layers=4)[:2]
    return step, args


CASES: Mapping[str, Callable[[bool], Built]] = {
    "gpt": lambda scan: library("gpt", "1.3B", 32, scan),
    "llama": lambda scan: library("llama", "8B", 32, scan),
    "moe": lambda scan: library("moe", list(MODELS["moe"].sizes)[1], 32, scan),
    "vit": lambda scan: library("vit", list(MODELS["vit"].sizes)[-1], 256, scan),
    "lstm": lstm,
    "accumulation": lambda scan: accumulation_step(4096, 4, 4096, 4096, 4096, 4096, scan=scan),
    "linen-llama (outside)": lambda scan: language(Llama(4, 4096, 32, 11008, 32000, scan), 32, 2048),
    "fold (outside)": fold,
}


def planned(build: Callable[[bool], Built], scan: bool, method: Any, microbatches: int) -> dict[str, Any]:
    """Seconds of one form by what takes them, and its collectives."""
    step, args = build(scan)
    plan = alpa_lite.make_plan(
        step, *args, cluster=alpa_lite.Cluster.preset("a100", nodes=1), method=method, num_microbatches=microbatches,
        memory_per_device=UNBOUNDED, verify="off",
    )  # fmt: skip
    terms: dict[str, float] = collections.defaultdict(float)
    for spent in (spent for stage in plan.stages for spent in stage.spending):
        terms["products" if kind(spent) == "product" else "memory"] += spent.seconds - spent.starts
        for name in ("links", "latency", "starts"):
            terms[name] += getattr(spent, name)
    sent: dict[str, int] = collections.defaultdict(int)
    for collective in plan.collectives:
        sent[collective.kind] += collective.bytes * collective.count
    return {"seconds": plan.step_seconds, "terms": dict(terms), "bytes": dict(sent)}


def forms(name: str) -> Row:
    """Both forms of a model by every method: (unrolled, scanned); or its temporaries in both."""
    if name.startswith(TEMPORARIES):
        return temporaries(name.removeprefix(TEMPORARIES))
    return {
        title: [planned(CASES[name], scan, method, count) for scan in (False, True)]
        for title, (method, count) in METHODS.items()
        if count == 1 or name != "accumulation"  # which is in micro-batches already
    }


def temporaries(name: str) -> Row:
    """MiB of temporaries of the smallest step with scanned layers, compiled as JAX traces it and as it is planned."""
    step, args = MODELS[name].abstract(next(iter(MODELS[name].sizes)), 16, scan=True)[:2]
    traced = tracing.trace(step, args, {})
    found = []
    for graph in (traced.graph, reduce_residuals(traced).graph):
        inputs = [jax.ShapeDtypeStruct(graph.values[v].shape, graph.values[v].dtype) for v in graph.block.inputs]
        compiled = jax.jit(lambda *args, block=graph.block: evaluate_block(block, args)).lower(*inputs).compile()
        memory = compiled.memory_analysis()
        assert memory is not None, "the compiler reports no memory"
        found.append(memory.temp_size_in_bytes / 2**20)
    return dict(zip(("traced", "planned"), found, strict=True))


def view(rows: Rows) -> Row:
    """Both forms of each model by each method."""
    pairs = [(name, method) for name in CASES if name in rows for method in METHODS if method in rows[name]]
    return {"terms": TERMS, "forms": [(name, method, *rows[name][method]) for name, method in pairs]}


BENCHMARKS = (
    Benchmark(
        "scanned", lambda: [*CASES, *(TEMPORARIES + name for name in ("gpt", "llama", "bert"))], forms, view, devices=1,
        sources=("alpa_lite", "passes"),
    ),
)  # fmt: skip
