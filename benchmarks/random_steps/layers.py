"""Random programs: operations in any order on arrays of any shape, or layers over examples, as models are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from benchmarks.random_steps.productions import GENERAL, LAYERS
from benchmarks.random_steps.program import Builder, Program, Value, is_float


def product(b: Builder) -> Value | None:
    """A product over random dims, some of them shared, with a random order of the results'."""
    v = b.pick(("float32", "bfloat16", "float32", "complex64"), least=1, most=3)
    if v is None:
        return None
    rng, letters = b.rng, "abcd"[: len(v.shape)]
    summed = [a for a in letters if rng.random() < 0.5]
    shared = [a for a in letters if a not in summed and rng.random() < 0.3]
    new = "xy"[: rng.randint(0, 2)]
    other = [*summed, *shared, *new]
    rng.shuffle(other)
    sizes = dict(zip(letters, v.shape, strict=True)) | {a: b.dim() for a in new}
    shape = tuple(sizes[a] for a in other)
    w = b.pick((v.dtype,), shape=shape) or b.leaf("state", shape, v.dtype)
    result = [a for a in letters if a not in summed] + list(new)
    rng.shuffle(result)
    scale = max(1, math.isqrt(math.prod(sizes[a] for a in summed)))
    spec = f"{letters},{''.join(other)}->{''.join(result)}"
    return b.add("product", f"jnp.einsum('{spec}', {v.name}, {w.name}) / {scale}", [v, w])


def general(seed: int) -> Program:
    """A step of many operations."""
    b = Builder(seed)
    rng = b.rng
    gradient = rng.random() < 0.45
    dims = [b.dim() for _ in range(3)] + [rng.choice((1, 8, 8, 0 if rng.random() < 0.15 else 2))]
    for where in ("state", "batch"):
        for _ in range(rng.randint(1, 3)):
            b.leaf(where, tuple(rng.choice(dims) for _ in range(rng.choice((1, 2, 2, 3)))))
        if rng.random() < 0.3:
            b.leaf(where, tuple(rng.choice(dims) for _ in range(2)), rng.choice(("bfloat16", "complex64", "uint8")))
    b.leaf("batch", (rng.choice(dims),), "int32")
    b.leaf("batch", tuple(rng.choice(dims) for _ in range(2)), "int32")
    b.leaf("state", (), rng.choice(("int32", "float32")))
    generator = rng.choice(("threefry2x32", "rbg", "unsafe_rbg"))
    if rng.random() < 0.5:
        b.leaf("state", (), "key")
    kinds = [*(one for one in GENERAL if not gradient or one.kind != "while"), product, product]
    wanted = rng.randint(4, 14)
    for _ in range(4 * wanted):
        rng.choice(kinds)(b)
        if len(b.lines) >= wanted:
            break
    return varied(b.finished(gradient, generator), b)


def varied(program: Program, b: Builder) -> Program:
    """The program with another optimizer, leaves that are returned as they came or swapped, one array for several."""
    rng, floats = b.rng, [v for v in program.state if is_float(v.dtype)]
    optimizers = ["descended", "momentum", "clipped", "skipped", "branched"] if floats else ["descended"]
    outputs, updates = program.outputs, dict(program.updates)
    if rng.random() < 0.3:
        leaves = [v.name for v in (*program.state, *program.batch) if v.dtype != "key"]
        outputs = (*outputs, rng.choice(leaves or outputs))
    fixed = [v for v in program.state if not (program.gradient and is_float(v.dtype)) and v.name not in updates]
    for one, two in itertools.combinations(fixed, 2):
        if (one.shape, one.dtype) == (two.shape, two.dtype) and rng.random() < 0.5:
            updates |= {one.name: two.name, two.name: one.name}
            break
    return dataclasses.replace(
        program, outputs=tuple(dict.fromkeys(outputs)), updates=tuple(updates.items()),
        optimizer=rng.choice(optimizers), feeding=rng.choice(("", "", "", "aliased", "on_host")),
    )  # fmt: skip


# -- layers -----------------------------------------------------------------------------------------------------------


def layered(seed: int) -> Program:
    """A chain of layers over examples, which can be cut into micro-batches and stages."""
    b = Builder(seed)
    rng = b.rng
    examples, width = rng.choice((8, 16, 16, 32)), rng.choice((8, 16, 8, 12))
    times = rng.choice((0, 0, 4, 8))
    h: Value = b.leaf("batch", (examples, times, width) if times else (examples, width))
    target, ids = b.leaf("batch", h.shape), b.leaf("batch", h.shape[:-1], "int32")
    given: dict[str, Any] = {"ids": ids, "key": b.leaf("state", (), "key"), "count": b.leaf("state", (), "int32")}
    for _ in range(rng.randint(3, 7)):
        h = rng.choice(LAYERS)(b, h=h, **given) or h
    outputs = []
    for _ in range(rng.randint(0, 2)):
        made = rng.choice(GENERAL)(b)
        outputs += [made.name] if made is not None and made.dtype != "key" and rng.random() < 0.7 else []
    error = b.add("loss", f"{h.name} - {target.name}", [h, target])
    assert error is not None
    outputs.append(error.name)
    metrics = {f"jnp.sum({ids.name} > 2)": ids, f"jnp.max({ids.name})": ids, f"{ids.name} * 2": ids}
    for source, read in (metrics | {f"jnp.mean({h.name}, 0)": h}).items():
        made = b.add("metric", source, [read]) if rng.random() < 0.25 else None
        outputs += [made.name] if made is not None else []
    b.add("key", f"jax.random.split({given['key'].name})[0]", [given["key"]])
    return varied(b.finished(rng.random() < 0.9, rng.choice(("threefry2x32", "rbg")), outputs), b)
