"""The settings of TeraPipe (Li et al., ICML 2021), planned: our slices of the sequence and the paper's.

A GPT of the paper's layers, width, heads and tokens is traced, cut into the paper's stages of the paper's devices,
sharded, written in slices and simulated, for one replica and its examples, one to a micro-batch. The paper's stages
have layers alone: the vocabulary is 256. Adam's state is held, in float32; layers compute in float16. Of each setting

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

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError
from benchmarks.harness import Benchmark, Row, Rows


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


def view(rows: Rows) -> Row:
    """The settings, and the rows of long sequences."""
    long = itertools.product(LONG, ("30", "120", *EFFORTS))
    found = [(name, effort, rows[key]) for name, effort in long if (key := f"{name}: {effort}") in rows]
    return {"settings": SETTINGS, "forms": VARIANTS, "long": found}


BENCHMARKS = (
    Benchmark(
        "token_published", lambda: [f"{name}: {one}" for names, ones in ((SETTINGS, VARIANTS), (LONG, EFFORTS))
                                    for name in names for one in ones],
        planned, view, devices=1, sources=("alpa_lite", "passes"),
    ),
)  # fmt: skip
