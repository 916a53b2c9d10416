"""Plans of alpa_lite against shardings written by hand, compiled and run on virtual CPU devices in one process.

For each contestant: the collectives of the compiled program by kind (from its HLO, loops counted), the compiler's own
memory, the loss of three steps, and the seconds of a step. The contestants take turns, in random order; the result is
the median, and its ratio to Auto's. Eight virtual devices share the machine's cores, so that seconds show the work
done and the bytes copied, not what a network would cost; bytes per device do not depend on that.

    python benchmarks/by_hand.py

writes benchmarks/results/by_hand.json and by_hand.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hand_written
import jax

import alpa_lite
from alpa_lite import models
from alpa_lite.passes.checks.hlo_text import parse_hlo
from alpa_lite.passes.checks.verification import memory_of

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/by_hand.py"
DEVICES = 8


@dataclass(frozen=True)
class Model:
    """A model of the zoo at a size that eight virtual devices can run."""

    name: str
    model: str
    batch: int
    overrides: dict[str, Any]


MODELS = (
    Model("gpt 2 x 128", "gpt", 16, {}),
    Model("mlp 4 x 1024", "mlp", 64, {"inputs": 512, "hidden": 1024, "outputs": 512, "layers": 4}),
    Model("gpt 4 x 256", "gpt", 16, {"vocab": 1024, "seq": 128, "hidden": 256, "layers": 4}),
)
METHODS = {
    "Auto": alpa_lite.Auto(),
    "DataParallel": alpa_lite.DataParallel(),
    "Zero(1)": alpa_lite.Zero(1),
    "Zero(3)": alpa_lite.Zero(3),
    "TensorParallel": alpa_lite.TensorParallel(),
}


@dataclass
class Contestant:
    """A step, ready to run: `advance()` runs it once and returns its loss."""

    name: str
    mesh: str
    advance: Callable[[], Any]
    collectives: dict[str, dict[str, int]]
    peak_bytes: int | None
    predicted_bytes: int | None = None
    predicted_seconds: float | None = None


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    about = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": COMMAND,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": DEVICES,
        "cores": os.cpu_count(),
        "rounds": arguments.rounds,
        "load_before": round(os.getloadavg()[0], 1),
    }
    rows = []
    for model in MODELS:
        contestants = enter(model)
        rows += measure(model, contestants, arguments.rounds)
        for row in rows[-len(contestants) :]:
            print(row, flush=True)
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "by_hand.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
        (RESULTS / "by_hand.md").write_text(table(about, rows))


def enter(model: Model) -> list[Contestant]:
    """Everyone who takes part, compiled and placed, all with the same initial state."""
    spec = models.get(model.model)
    step, args = spec.build("tiny", model.batch, **model.overrides)
    by_hand = [from_hand(step, plan, args) for plan in hand_written.plans(model.model, DEVICES)]
    return by_hand + [from_method(step, name, method, args) for name, method in METHODS.items()]


def from_hand(step: Callable[..., Any], plan: hand_written.HandPlan, args: Any) -> Contestant:
    """A sharding written by hand."""
    jitted, state, batch = hand_written.shard(step, plan, *args)
    compiled = jitted.lower(state, batch).compile()
    mesh = " x ".join(map(str, plan.mesh_shape))
    return Contestant(f"hand: {plan.name}", mesh, runner(compiled, state, batch), *weigh(compiled))


def from_method(step: Callable[..., Any], name: str, method: Any, args: Any) -> Contestant:
    """A method of alpa_lite."""
    parallel = alpa_lite.parallelize(step, method=method)
    plan = parallel.plan(*args)
    executable: Any = parallel._executable(args, {})
    state, batch = executable.place(*args)
    mesh = " x ".join(map(str, plan.stages[0].mesh_shape))
    return Contestant(
        f"alpa_lite: {name}", mesh, runner(executable, state, batch), *weigh(*executable.compiled()),
        plan.stages[0].memory.total, plan.step_seconds,
    )  # fmt: skip


def runner(call: Callable[..., Any], state: Any, batch: Any) -> Callable[[], Any]:
    """A function that advances the state by one step and waits for it."""

    def advance() -> float:
        nonlocal state
        state, metrics = call(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return advance


def weigh(compiled: Any) -> tuple[dict[str, dict[str, int]], int | None]:
    """The compiled collectives by kind ("count", "bytes" per device and step), and the peak bytes per device."""
    kinds: dict[str, dict[str, int]] = {}
    for c in parse_hlo(compiled.as_text(), DEVICES):
        entry = kinds.setdefault(c.kind, {"count": 0, "bytes": 0})
        entry["count"] += c.count
        entry["bytes"] += c.bytes * c.count
    memory = memory_of(compiled)
    return kinds, None if memory is None else memory.peak


def measure(model: Model, contestants: list[Contestant], rounds: int) -> list[dict[str, Any]]:
    """One row a contestant."""
    losses = {c.name: [c.advance() for _ in range(3)] for c in contestants}
    times: dict[str, list[float]] = {c.name: [] for c in contestants}
    order, rng = list(contestants), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for contestant in order:
            start = time.perf_counter()
            contestant.advance()
            times[contestant.name].append(time.perf_counter() - start)
    auto = next(c.name for c in contestants if c.name.endswith("Auto"))
    ratios = {
        name: statistics.median(mine / base for mine, base in zip(found, times[auto], strict=True))
        for name, found in times.items()
    }
    return [
        {
            "model": model.name, "contestant": c.name, "mesh": c.mesh, "collectives": c.collectives,
            "collective_bytes": sum(k["bytes"] for k in c.collectives.values()), "peak_bytes": c.peak_bytes,
            "predicted_bytes": c.predicted_bytes, "predicted_seconds": c.predicted_seconds,
            "seconds": statistics.median(times[c.name]), "fastest_seconds": min(times[c.name]),
            "times_auto": ratios[c.name], "losses": losses[c.name],
        }
        for c in contestants
    ]  # fmt: skip


def table(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# Against shardings written by hand",
        "",
        f"`{about['command']} --rounds {about['rounds']}`, {about['date']}, JAX {about['jax']}, "
        f"Python {about['python']}, {about['devices']} virtual CPU devices on {about['cores']} cores,",
        f"load {about['load_before']} before the start.",
        "",
        "Collectives are those of the compiled program, as count: kB per device and step; the payload is the result's,",
        "or a reduce-scatter's operand. Memory is the compiler's. Seconds are medians of interleaved runs; their ratio",
        "is the median over rounds of the ratio to Auto: above 1 Auto is faster, below 1 slower.",
        "",
        "An all-reduce sends twice what a gather or a reduce-scatter of the same payload sends: the sum of payloads",
        "over kinds is not what a network carries.",
        "",
        "Virtual devices share the cores and have no network: moving bytes costs them copies alone, and the seconds",
        "differ from those of the clusters that plans are made for.",
        "",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [
            f"## {model}",
            "",
            "| contestant | mesh | collectives | payload kB | peak MB | ms a step | times Auto | loss after 3 steps |",
            "|---|---|---|--:|--:|--:|--:|--:|",
            *[_row(row) for row in rows if row["model"] == model],
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _row(row: dict[str, Any]) -> str:
    kinds = ", ".join(f"{kind} {c['count']}: {c['bytes'] / 1e3:.1f}" for kind, c in sorted(row["collectives"].items()))
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.2f}"
    cells = [
        row["contestant"], row["mesh"], kinds or "none", f"{row['collective_bytes'] / 1e3:.1f}", peak,
        f"{row['seconds'] * 1e3:.1f}", f"{row['times_auto']:.2f}", f"{row['losses'][-1]:.6f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
