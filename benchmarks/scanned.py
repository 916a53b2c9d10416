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
import jax.numpy as jnp

import alpa_lite
from alpa_lite.models import MODELS
from alpa_lite.passes.ir.evaluation import evaluate_block
from alpa_lite.passes.layers.residuals import reduce_residuals
from alpa_lite.passes.tracing import tracing
from benchmarks.gallery import networks
from benchmarks.gallery.linen import Llama, accumulating
from benchmarks.gallery.steps import Built, adam_step, initial, language, numbers, shape, token_loss
from benchmarks.harness import Benchmark, Row, Rows
from benchmarks.published import kind

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


def lstm(scan: bool, layers: int = 4, hidden: int = 1024, batch: int = 256, length: int = 128) -> Built:
    """Stacked LSTM layers with biases; time is a scan in both forms."""
    sizes = {"own": (hidden, 4 * hidden), "below": (hidden, 4 * hidden), "bias": (4 * hidden,)}
    lead = (layers,) if scan else ()
    one = {name: jax.ShapeDtypeStruct(lead + dims, jnp.float32) for name, dims in sizes.items()}
    params = one if scan else [one] * layers

    def layer(x: Any, weights: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            gates = h @ weights["own"] + x @ weights["below"] + weights["bias"]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[1], hidden))
        return jax.lax.scan(cell, (start, start), x)[1], None

    def loss(params: Any, x: Any, y: Any) -> Any:
        if scan:
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for weights in params:
                x, _ = layer(x, weights)
        return jnp.mean((x[-1] - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, jnp.swapaxes(x, 0, 1), y)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    return step, (params, numbers(batch, length, hidden), numbers(batch, hidden))


def fold(scan: bool, batch: int = 32, sequences: int = 64, length: int = 128, layers: int = 4) -> Built:
    """The alignment network of the outside models."""
    model = networks.Fold(layers, scan)
    rows, apart = shape(batch, sequences, length), shape(batch, length, length)
    params = initial(model, shape(1, sequences, length), shape(1, length, length))

    def loss(params: Any, rows: Any, apart: Any) -> Any:
        logits, letters = model.apply(params, rows, apart)
        return token_loss(logits, apart) + token_loss(letters, rows)

    return adam_step(loss, params, rows, apart)


CASES: Mapping[str, Callable[[bool], Built]] = {
    "gpt": lambda scan: library("gpt", "1.3B", 32, scan),
    "llama": lambda scan: library("llama", "8B", 32, scan),
    "moe": lambda scan: library("moe", list(MODELS["moe"].sizes)[1], 32, scan),
    "vit": lambda scan: library("vit", list(MODELS["vit"].sizes)[-1], 256, scan),
    "lstm": lstm,
    "accumulation": lambda scan: accumulating(4096, 4, 4096, 4096, 4096, 4096, scan=scan),
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
