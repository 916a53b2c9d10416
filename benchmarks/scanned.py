"""Scanned and unrolled forms of eight models: predicted seconds, and the collectives of one step.

Each model is written twice, with its layers (or its accumulation of gradients) in a `lax.scan` and as a Python loop,
and planned for 8 A100 by four methods without a memory limit. The two forms compute the same function, so their plans
should take as long. Each row itemises the difference: seconds of products, of operations bound by memory, of links and
their latencies, of kernel starts; and the payload bytes of all collectives of one step per device.

    python -m benchmarks.scanned [MODEL ...]

writes benchmarks/results/scanned.json and scanned.md; models that are not named keep their rows.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import alpa_lite
from alpa_lite.models import MODELS
from benchmarks import outside_networks
from benchmarks.outside_cases import MLP, adam_step, initial, linen_llama, shape, token_loss
from benchmarks.published import kind

HERE = Path(__file__).parent / "results"
UNBOUNDED = 2**45  # bytes per device
METHODS: Mapping[str, tuple[Any, int]] = {
    "data parallel": (alpa_lite.DataParallel(), 1),
    "data parallel, 4 micro-batches": (alpa_lite.DataParallel(), 4),
    "ZeRO-3": (alpa_lite.Zero(3), 1),
    "tensor parallel": (alpa_lite.TensorParallel(), 1),
}
Built = tuple[Callable[..., Any], tuple[Any, ...]]


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

    return step, (params, shape(batch, length, hidden, dtype=jnp.float32), shape(batch, hidden, dtype=jnp.float32))


def accumulation(scan: bool, parts: int = 4, batch: int = 4096, width: int = 4096) -> Built:
    """A step that accumulates gradients over parts of its batch in a loop of its own."""
    model = MLP((width, width, width))
    params = initial(model, shape(1, width, dtype=jnp.float32))

    def loss(params: Any, x: Any, labels: Any) -> Any:
        return token_loss(model.apply(params, x), labels)

    def step(params: Any, x: Any, labels: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, total, (value, grads)), None

        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, labels))
        total = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        if scan:
            total, _ = jax.lax.scan(add, total, cut)
        else:
            for part in range(parts):
                total, _ = add(total, jax.tree.map(lambda a, part=part: a[part], cut))
        value, grads = jax.tree.map(lambda a: a / parts, total)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    return step, (params, shape(batch, width, dtype=jnp.float32), shape(batch))


class UnrolledFold(nn.Module):
    """`outside_networks.Fold` with its blocks one after another."""

    layers: int

    @nn.compact
    def __call__(self, rows: Any, apart: Any) -> tuple[Any, Any]:
        """As `Fold`."""
        dense = outside_networks.Dense
        x = dense(256)(jax.nn.one_hot(rows, 23, dtype=jnp.bfloat16))
        pairs = dense(128)(x[:, 0])[:, :, None] + dense(128)(x[:, 0])[:, None]
        pairs = pairs + nn.Embed(65, 128, dtype=jnp.bfloat16)(apart)
        for _ in range(self.layers):
            (x, pairs), _ = nn.remat(outside_networks.Evolution)()((x, pairs), None)
        return nn.Dense(64)(pairs + jnp.swapaxes(pairs, 1, 2)), nn.Dense(23)(x)


def fold(scan: bool, batch: int = 8, sequences: int = 64, length: int = 128, layers: int = 4) -> Built:
    """The alignment network of the outside models."""
    model = (outside_networks.Fold if scan else UnrolledFold)(layers)
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
    "accumulation": accumulation,
    "linen-llama (outside)": lambda scan: linen_llama(32, 2048, scan, layers=4),
    "fold (outside)": fold,
}


def planned(build: Callable[[bool], Built], scan: bool, method: Any, microbatches: int) -> dict[str, Any]:
    """Seconds of one form by what takes them, and its collectives."""
    step, args = build(scan)
    plan = alpa_lite.make_plan(
        step, *args, cluster=alpa_lite.Cluster.preset("a100", nodes=1), method=method, num_microbatches=microbatches,
        memory_per_device=UNBOUNDED, verify="off",
    )  # fmt: skip
    terms: dict[str, float] = collections.Counter()
    for spent in (spent for stage in plan.stages for spent in stage.spending):
        terms["products" if kind(spent) == "product" else "memory"] += spent.seconds - spent.starts
        for name in ("links", "latency", "starts"):
            terms[name] += getattr(spent, name)
    sent: dict[str, int] = collections.Counter()
    for collective in plan.collectives:
        sent[collective.kind] += collective.bytes * collective.count
    return {"seconds": plan.step_seconds, "terms": dict(terms), "bytes": dict(sent)}


def page(rows: Mapping[str, Any]) -> list[str]:
    """The page of the results."""
    lines = [
        "# Scanned and unrolled forms of a model",
        "",
        "Predicted for 8 A100 without a memory limit by `python -m benchmarks.scanned`. Differences are seconds of",
        "the scanned form less those of the unrolled one, over the unrolled step. The payload is a ratio of bytes.",
        "",
        "| model | method | unrolled, ms | scanned | ratio | products | memory | links | latency | starts | payload |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, of_model in rows.items():
        for method, (one, other) in of_model.items():
            whole = one["seconds"]
            keys = ("products", "memory", "links", "latency", "starts")
            shares = [(other["terms"].get(key, 0) - one["terms"].get(key, 0)) / whole for key in keys]
            sent = [sum(form["bytes"].values()) for form in (one, other)]
            payload = f"{sent[1] / sent[0]:.3f}" if sent[0] else ""
            cells = [f"{share:+.1%}" for share in shares]
            times = f"{whole * 1e3:.4g} | {other['seconds'] * 1e3:.4g} | {other['seconds'] / whole:.3f}"
            lines.append(f"| {name} | {method} | {times} | {' | '.join(cells)} | {payload} |")
    return lines


def main() -> None:
    """Plans the forms and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"any of {', '.join(CASES)}")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = HERE / "scanned.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    for name, build in CASES.items():
        if arguments.models and name.split()[0] not in arguments.models:
            continue
        rows[name] = {
            title: [planned(build, scan, method, count) for scan in (False, True)]
            for title, (method, count) in METHODS.items()
            if count == 1 or name != "accumulation"  # which is in micro-batches already
        }
        print("\n".join(page({name: rows[name]})[7:]), flush=True)
        rows = {name: rows[name] for name in CASES if name in rows}
        path.write_text(json.dumps(rows, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(page(rows)) + "\n")


if __name__ == "__main__":
    main()
