"""Slices of the sequence for the settings of TeraPipe (Li et al., ICML 2021): ours and the paper's.

`token_slices` prices them under one model of latency. For each setting of the paper (main table and the table of
sequence lengths) whose slices are known: a stage's seconds for b examples, l tokens behind c others, from the cost
model of this project on the paper's cluster (p3.16xlarge), Megatron's tensor parallelism over the paper's number of
devices, forward and backward, nothing computed again, and the transfer of the activations to the next node and of their
cotangents back. Then T of the paper's slices, of whole sequences, and of ours, which are the least for multiples of 8
tokens. The paper gives two measured latencies for each setting, of whole sequences and of its slices. A second model,
a * t + b, has the factor and the seconds of overhead of each slice that reproduce both; the slices that are the least
under it stand in the second half of the table, and are what to compare with the paper's.

`token_published` plans the pipelines: a GPT of the paper's layers, width, heads and tokens is traced, cut into the
paper's stages of the paper's devices, sharded, written in slices and simulated, for one replica and its examples, one
to a micro-batch. The paper's stages have layers alone: the vocabulary is 256. Adam's state is held, in float32; layers
compute in float16. Of each setting

    whole     Pipeline(...)
    paper     Pipeline(token_slices=the paper's lengths)
    auto      Pipeline(token_slices="auto"), with effort "thorough"
    Auto      Auto(), which is free to choose another division or no pipeline

and GPTs with long sequences and few micro-batches by `Auto()`, with two efforts.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import AlpaLiteError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.tokens.lengths import cut
from benchmarks.harness import Benchmark, Row, Rows, show, table

STEP = 8  # tokens
HALF = np.dtype("float16")


@dataclass(frozen=True)
class Setting:
    """One row of the paper's tables.

    Attributes:
      batch: examples of a replica in a step. stages: of the pipeline. layers: of each. tensor: devices of each.
      slices: the paper's, of one example each. measured: seconds of whole sequences, and of these slices, by the paper.
    """

    hidden: int
    heads: int
    sequence: int
    batch: int
    stages: int
    layers: int
    tensor: int
    slices: tuple[int, ...]
    measured: tuple[float, float]


SETTINGS = {
    "1 (GPT-3 1B)": Setting(2048, 16, 2048, 16, 24, 1, 1, (776, 640, 632), (1.517, 1.254)),
    "5 (GPT-3 13B)": Setting(5120, 40, 2048, 32, 40, 1, 8, (704, 688, 656), (1.863, 1.328)),
    "8 (GPT-3 44B)": Setting(6144, 48, 2048, 8, 48, 2, 8, (384, 384, 368, 320, 296, 296), (2.662, 1.111)),
    "10 (GPT-3 175B)": Setting(12288, 96, 2048, 2, 48, 2, 8, (128,) * 16, (5.822, 1.160)),
    "13B, 4096 tokens": Setting(5120, 40, 4096, 8, 40, 1, 8, (552, 536, 528, 512, 504, 496, 488, 480), (2.526, 0.913)),
}
LONG = {
    "1 x 8,192 tokens, 8 layers of 2,048, 4 nodes": (8, 2048, 16, 8192, 1, 4),
    "1 x 16,384 tokens, 8 layers of 1,024, 2 nodes": (8, 1024, 16, 16384, 1, 2),
    "4 x 4,096 tokens, 8 layers of 2,048, 4 nodes": (8, 2048, 16, 4096, 4, 4),
    "4 x 4,096 tokens, GPT 2.6B (32 layers of 2,560), 4 nodes": (32, 2560, 32, 4096, 4, 4),
}
"""Layers, hidden, heads, tokens, examples and nodes of eight V100, of models that `Auto()` plans."""
VARIANTS = ("whole", "paper", "auto", "Auto")
EFFORTS = ("normal", "thorough")


# -- one model of latency ---------------------------------------------------------------------------------------------


def stage_seconds(setting: Setting) -> np.ndarray:
    """[n, n] seconds of one example's slice of (i + 1) * STEP tokens behind j * STEP others on a stage; see `cut`."""
    cluster = Cluster.preset("p3.16xlarge", nodes=setting.stages * setting.tensor // 8)
    cost = MeshCost(cluster, LogicalMesh((setting.tensor,), ("x",)))
    pair = MeshCost(cluster, LogicalMesh((2, 8), ("node", "x")))
    size, wide, parts = setting.sequence // STEP, setting.hidden, setting.tensor
    head, heads = wide // setting.heads, setting.heads // parts

    def product(m: int, n: int, k: int, batch: int = 1) -> float:
        """Forward, and backward once for each operand."""
        sizes = ((m, n, k), (m, k, n), (k, n, m))
        return sum(cost.matmul(*some, batch, HALF, HALF.itemsize) for some in sizes)

    out = np.full((size, size), np.inf)
    for i in range(size):
        tokens = (i + 1) * STEP
        sides = ((3 * wide // parts, wide), (wide, wide // parts), (4 * wide // parts, wide), (wide, 4 * wide // parts))
        held = tokens * wide * HALF.itemsize
        # Two norms, two additions and the activation move about 20 times the tokens' bytes in both directions.
        fixed = sum(product(tokens, n, k) for n, k in sides) + cost.compute(0.0, 20.0 * held, HALF)
        fixed += 4 * cost.collective("all_reduce", ("x",), held)
        sent = 2 * pair.collective("collective_permute", ("node",), held / 8)  # a node's link carries each byte once
        for j in range(size - i):
            context = j * STEP + tokens
            scores = product(tokens, context, head, heads) + product(tokens, head, context, heads)
            # The scores are written, normalised and read again, forward and backward.
            scores += cost.compute(0.0, 6.0 * heads * tokens * context * HALF.itemsize, HALF)
            out[i, j] = setting.layers * (fixed + scores) + sent
    return out


def step_seconds(seconds: np.ndarray, setting: Setting, slices: tuple[int, ...]) -> float:
    """T of one cutting of each example."""
    ends = np.cumsum(slices)
    taken = [seconds[n // STEP - 1, (end - n) // STEP] for n, end in zip(slices, ends.tolist(), strict=True)]
    return float(setting.batch * sum(taken) + (setting.stages - 1) * max(taken))


def priced(name: str) -> Row:
    """A setting by both models of latency."""
    setting = SETTINGS[name]
    seconds = stage_seconds(setting)
    start = time.process_time()
    found = cut(seconds, setting.batch, setting.stages, step=STEP)
    search = time.process_time() - start
    whole, paper = (step_seconds(seconds, setting, lengths) for lengths in ((setting.sequence,), setting.slices))
    counts = [setting.batch * count + setting.stages - 1 for count in (1, len(setting.slices))]
    factor, overhead = np.linalg.solve([[whole, counts[0]], [paper, counts[1]]], setting.measured).tolist()
    fitted = cut(factor * seconds + overhead, setting.batch, setting.stages, step=STEP)
    ours, ours_fitted = (f"{setting.batch} x [{_lengths(one.lengths)}]" for one in (found, fitted))
    return {
        "predicted": {"whole": whole, "paper": paper, "ours": found.seconds},
        "slices": {"paper": _lengths(setting.slices), "ours": ours, "ours fitted": ours_fitted},
        "fitted": {
            "factor": factor, "overhead": overhead, "whole": setting.measured[0], "paper": setting.measured[1],
            "ours": fitted.seconds,
        },
        "search": search,
    }  # fmt: skip


def _lengths(lengths: tuple[int, ...]) -> str:
    runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
    return ", ".join(str(length) if count == 1 else f"{count} of {length}" for length, count in runs)


def _seconds(found: Row) -> list[str]:
    """Seconds and speed-ups, as cells of a row."""
    whole, paper, ours = found["whole"], found["paper"], found["ours"]
    return [show(whole, ".3f"), show(paper, ".3f"), show(ours, ".3f"), show(whole / paper), show(whole / ours)]


def priced_page(rows: Rows) -> list[str]:
    """Both halves of the table."""
    rows = {name: rows[name] for name in SETTINGS if name in rows}
    head = "setting | whole sequences, s | paper's slices, s | ours, s | speed-up by paper's | by ours"
    own = [[name, *_seconds(r["predicted"]), r["slices"]["ours"], show(r["search"])] for name, r in rows.items()]
    fitted = [
        [
            name, *_seconds(row["fitted"]), row["slices"]["paper"], row["slices"]["ours fitted"],
            show(row["fitted"]["factor"]), show(1e3 * row["fitted"]["overhead"]),
        ]
        for name, row in rows.items()
    ]  # fmt: skip
    return [
        "By the cost model of this project:", "", *table(f"{head} | our slices | search, s", own), "",
        "By the model that reproduces the paper's two measurements (the speed-up by its slices is the measured one):",
        "", *table(f"{head} | paper's slices | our slices | factor | overhead of a slice, ms", fitted),
    ]  # fmt: skip


# -- planned ----------------------------------------------------------------------------------------------------------


def planned(case: str, effort: Any = None) -> Row:
    """A case of `token_published`: the prediction, and how it was planned."""
    name, _, variant = case.rpartition(": ")
    if name in LONG:
        layers, hidden, heads, sequence, batch, nodes = LONG[name]
        options: dict[str, Any] = {"method": alpa_lite.Auto(), "effort": effort or variant}
    else:
        setting = SETTINGS[name]
        layers, hidden, heads, sequence, batch = (
            setting.stages * setting.layers, setting.hidden, setting.heads, setting.sequence, setting.batch
        )  # fmt: skip
        nodes, options = setting.stages * setting.tensor // 8, _options(setting, variant)
    step, args = models.get("gpt").abstract(
        "2.6B", batch, layers=layers, hidden=hidden, heads=heads, seq=sequence, vocab=256, dtype=jnp.float16
    )
    start, wall = time.process_time(), time.perf_counter()
    try:
        plan = alpa_lite.make_plan(step, *args, cluster=Cluster.preset("p3.16xlarge", nodes=nodes), **options)
    except AlpaLiteError as error:
        return {"refused": str(error)}
    return {
        "seconds": plan.step_seconds, "stages": len(plan.stages), "microbatches": plan.num_microbatches,
        "slices": list(plan.division.token_slices) if plan.division else [],
        "memory": max(stage.memory.total for stage in plan.stages),
        "others": {row.name: row.step_seconds for row in plan.comparisons},
        "notes": [note for note in plan.notes if "slices" in note or "slicings" in note],
        "planning": time.process_time() - start, "took": time.perf_counter() - wall,
    }  # fmt: skip


def _options(setting: Setting, variant: str) -> dict[str, Any]:
    """Those of `make_plan` for a variant of a setting."""
    if variant == "Auto":
        return {"method": alpa_lite.Auto(), "verify": "off"}
    method = alpa_lite.Pipeline(
        num_stages=setting.stages, submesh_shapes=((1, setting.tensor),) * setting.stages, schedule="1f1b",
        token_slices={"whole": None, "paper": setting.slices, "auto": "auto"}[variant],
    )  # fmt: skip
    return {"method": method, "num_microbatches": setting.batch, "effort": "thorough", "verify": "off"}


def published_page(rows: Rows) -> list[str]:
    """Both tables."""
    settings = []
    for name, variant in itertools.product(SETTINGS, VARIANTS):
        found, whole = (rows.get(f"{name}: {one}", {}) for one in (variant, "whole"))
        if "refused" in found:
            settings.append([name, variant, found["refused"], *[""] * 7])
        elif found:
            gain = whole["seconds"] / found["seconds"] if "seconds" in whole else None
            one, other = SETTINGS[name].measured
            settings.append([
                name, variant, show(found["seconds"], ".3f"), show(gain), show(one / other) * (variant == "paper"),
                found["stages"], found["microbatches"], _sliced(found), show(found["memory"] / 2**30, ".1f"),
                show(found["planning"], ".0f"),
            ])  # fmt: skip
    long = [
        [
            name, effort, show(found["seconds"], ".3f"), found["stages"], found["microbatches"], _sliced(found),
            *[show(found["others"].get(other), ".3f") for other in ("whole sequences", "one mesh")],
            show(found["took"], ".0f"),
        ]
        for name, effort in itertools.product(LONG, ("30", "120", *EFFORTS))
        if (found := rows.get(f"{name}: {effort}"))
    ]  # fmt: skip
    return [
        *table("setting | variant | step, s | speed-up | paper's speed-up | stages | micro-batches | slices "
               "| GiB per device | planning, s", settings), "",
        "## Long sequences with few micro-batches", "",
        "The choice of `Auto()` on nodes of eight V100 (`p3.16xlarge`); planning takes wall seconds, with tracing and "
        "checks. An effort of 30 or 120 is one of seconds, from before there were others.", "",
        *table("model | effort | step, s | stages | micro-batches | slices | whole sequences, s | one mesh, s "
               "| planning, s", long),
    ]  # fmt: skip


def _sliced(found: Row) -> str:
    return ", ".join(map(str, found["slices"])) or "none"


BENCHMARKS = (
    Benchmark(
        "token_slices", "Slices of the sequence for the settings of TeraPipe",
        "`benchmarks/slices.py` says how they are priced. The search takes CPU seconds, without the prices. What the "
        "paper did not measure is predicted.",
        lambda: SETTINGS, priced, priced_page, devices=1, sources=("alpa_lite/cluster", "passes/stages"),
    ),
    Benchmark(
        "token_published", "TeraPipe's published models, planned",
        "`benchmarks/slices.py` says how they are planned. Steps are predicted; the paper's speed-up, of its slices "
        "over whole sequences, is measured. Planning takes CPU seconds of a machine with other work.",
        lambda: [f"{name}: {one}" for names, ones in ((SETTINGS, VARIANTS), (LONG, EFFORTS)) for name in names
                 for one in ones],
        planned, published_page, devices=1, sources=("alpa_lite", "passes"),
    ),
)  # fmt: skip
