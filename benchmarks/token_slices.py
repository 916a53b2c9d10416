"""Slices of the sequence for the settings of TeraPipe: ours and the paper's under one model of latency.

For each setting of the paper (Li et al., ICML 2021, main table and the table of sequence lengths) whose slices are
known: a stage's seconds for b examples, l tokens behind c others, from the cost model of this project on the paper's
cluster (p3.16xlarge), Megatron's tensor parallelism over the paper's number of devices, forward and backward, nothing
computed again, and the transfer of the activations to the next node and of their cotangents back. Then T of the paper's
slices, of whole sequences, and of ours, which are the least for multiples of 8 tokens.

The paper gives two measured latencies for each setting, of whole sequences and of its slices. A second model,
a * t + b, has the factor and the seconds of overhead of each slice that reproduce both; the slices that are the least
under it stand in the second half of the table, and are what to compare with the paper's.

    python benchmarks/token_slices.py

writes benchmarks/results/token_slices.json and token_slices.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.tokens.lengths import TokenSlices, cut

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/token_slices.py"
STEP = 8  # tokens
HALF = np.dtype("float16")


@dataclass(frozen=True)
class Setting:
    """One row of the paper's tables.

    Attributes:
      batch: examples of a replica in a step. stages: of the pipeline. layers: of each. tensor: devices of each.
      slices: the paper's, of one example each. measured: seconds of whole sequences, and of these slices, by the paper.
    """

    name: str
    hidden: int
    heads: int
    sequence: int
    batch: int
    stages: int
    layers: int
    tensor: int
    slices: tuple[int, ...]
    measured: tuple[float, float]


SETTINGS = (
    Setting("1 (GPT-3 1B)", 2048, 16, 2048, 16, 24, 1, 1, (776, 640, 632), (1.517, 1.254)),
    Setting("5 (GPT-3 13B)", 5120, 40, 2048, 32, 40, 1, 8, (704, 688, 656), (1.863, 1.328)),
    Setting("8 (GPT-3 44B)", 6144, 48, 2048, 8, 48, 2, 8, (384, 384, 368, 320, 296, 296), (2.662, 1.111)),
    Setting("10 (GPT-3 175B)", 12288, 96, 2048, 2, 48, 2, 8, (128,) * 16, (5.822, 1.160)),
    Setting("13B, 4096 tokens", 5120, 40, 4096, 8, 40, 1, 8, (552, 536, 528, 512, 504, 496, 488, 480), (2.526, 0.913)),
)


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


def row_of(setting: Setting) -> dict[str, Any]:
    """One row."""
    seconds = stage_seconds(setting)
    start = time.process_time()
    found = cut(seconds, setting.batch, setting.stages, step=STEP)
    planning = time.process_time() - start
    whole, paper = (step_seconds(seconds, setting, lengths) for lengths in ((setting.sequence,), setting.slices))
    counts = [setting.batch * count + setting.stages - 1 for count in (1, len(setting.slices))]
    factor, overhead = np.linalg.solve([[whole, counts[0]], [paper, counts[1]]], setting.measured).tolist()
    fitted = cut(factor * seconds + overhead, setting.batch, setting.stages, step=STEP)
    return {
        "setting": setting.name,
        "predicted": {"whole": whole, "paper": paper, "ours": found.seconds},
        "slices": {
            "paper": _lengths(setting.slices),
            "ours": _written(found, setting),
            "ours fitted": _written(fitted, setting),
        },
        "fitted": {
            "factor": factor,
            "overhead": overhead,
            "whole": setting.measured[0],
            "paper": setting.measured[1],
            "ours": fitted.seconds,
        },
        "search": planning,
    }


def _written(found: TokenSlices, setting: Setting) -> str:
    """The slices of all examples."""
    return f"{setting.batch} x [{_lengths(found.lengths)}]"


def _lengths(lengths: tuple[int, ...]) -> str:
    runs = [(length, len(list(same))) for length, same in itertools.groupby(lengths)]
    return ", ".join(str(length) if count == 1 else f"{count} of {length}" for length, count in runs)


def table(rows: list[dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# Slices of the sequence for the settings of TeraPipe",
        "",
        f"Written by `{COMMAND}`, which says what is priced and how. The",
        "search takes CPU seconds, without the prices. What the paper did not measure is predicted.",
        "",
        "By the cost model of this project:",
        "",
        "| setting | whole sequences, s | paper's slices, s | ours, s | speed-up by paper's | by ours | our slices "
        "| search, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['setting']} | {_seconds(row['predicted'])} | {row['slices']['ours']} | {row['search']:.2f} |"
        )
    lines += [
        "",
        "By the model that reproduces the paper's two measurements (the speed-up by its slices is the measured one):",
        "",
        "| setting | whole sequences, s | paper's slices, s | ours, s | speed-up by paper's | by ours | paper's slices "
        "| our slices | factor | overhead of a slice, ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fitted, slices = row["fitted"], row["slices"]
        lines.append(
            f"| {row['setting']} | {_seconds(fitted)} | {slices['paper']} | {slices['ours fitted']} "
            f"| {fitted['factor']:.2f} | {1e3 * fitted['overhead']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _seconds(found: dict[str, float]) -> str:
    """Seconds and speed-ups, as cells of a row."""
    whole, paper, ours = found["whole"], found["paper"], found["ours"]
    return f"{whole:.3f} | {paper:.3f} | {ours:.3f} | {whole / paper:.2f} | {whole / ours:.2f}"


def main() -> None:
    """Prices every setting and writes the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for setting in SETTINGS:
        rows.append(row_of(setting))
        print(rows[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "token_slices.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "token_slices.md").write_text(table(rows))


if __name__ == "__main__":
    main()
