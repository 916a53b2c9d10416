"""What daily use costs: twelve train loops from public practice, with evaluation and a short last batch.

Each loop of `tests/loops/` runs 20 steps under plain `jit` on one device and under `parallelize` on eight virtual CPU
devices; an epoch of ten steps ends with a batch of 6 examples in place of 16 and an evaluation (`like=step`). Of each:

- planning seconds, of all signatures and of evaluation together, and of them the first one;
- signatures: how many plans were made (a full batch, a short one, evaluation);
- compilations: of XLA, by JAX's own count, during all calls of the parallel steps; beside it, of the plain run;
- bytes of state moved: what steps and evaluation log that they move after the first call;
- the largest relative error of a leaf, as `tests/loops/base.py` defines it; at most 1e-5 passes.

    PYTHONPATH=. python benchmarks/loops.py              every loop
    PYTHONPATH=. python benchmarks/loops.py ema lora     the named loops; others keep their results

writes benchmarks/results/loops.json and loops.md. Seconds are wall seconds on a machine that may be shared.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import alpa_lite
from tests.loops import base
from tests.loops.every import NAMES, loop

RESULTS = Path(__file__).parent / "results"
COMMAND = "PYTHONPATH=. python benchmarks/loops.py"
DEVICES = 8
COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event that JAX records for each compilation."""


class Compilations:
    """Counts the compilations of this process."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILED


class Counted:
    """A step that adds up the compilations of its calls."""

    def __init__(self, step: Any, compilations: Compilations) -> None:
        self.compiled = 0
        self._step, self._compilations = step, compilations

    def __call__(self, *args: Any) -> Any:
        before = self._compilations.count
        try:
            return self._step(*args)
        finally:
            self.compiled += self._compilations.count - before


class Moves(logging.Handler):
    """Adds up the bytes of state that steps say they move."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.bytes = 0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"moves (\d+) bytes of state", record.getMessage())
        self.bytes += int(found[1]) if found else 0


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", metavar="LOOP", help="one of " + ", ".join(NAMES))
    names = parser.parse_args().loops or NAMES
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    file = RESULTS / "loops.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else {}
    compilations = Compilations()
    for name in names:
        rows[name] = measure(name, compilations)
        print(name, rows[name], flush=True)
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps({"command": COMMAND, "rows": rows}, indent=1) + "\n")
        (RESULTS / "loops.md").write_text(table(rows))


def measure(name: str, compilations: Compilations) -> dict[str, Any]:
    """One loop under plain `jit` and in parallel."""
    one = loop(name)
    load = os.getloadavg()[0]
    plain = [Counted(step, compilations) for step in base.plain(one)]
    want = base.run(one, plain[0], plain[1])
    train = alpa_lite.parallelize(one.train_step, **one.options)
    evaluation = alpa_lite.parallelize(one.eval_step, like=train, **one.eval_options)
    parallel = [Counted(step, compilations) for step in (train, evaluation)]
    moves = Moves()
    logger = logging.getLogger("alpa_lite")
    logger.addHandler(moves)
    start = time.perf_counter()
    try:
        got = base.run(one, parallel[0], parallel[1])
    finally:
        logger.removeHandler(moves)
    wall = time.perf_counter() - start
    seconds = [sum(plan.planning_seconds.values()) for plan in (*train.plans, *evaluation.plans)]
    errors = base.errors(got, want)
    worst = max(errors, key=lambda path: errors[path])
    state = [leaf for leaf in jax.tree.leaves(base.values(one.make_state())) if hasattr(leaf, "nbytes")]
    return {
        "signatures": len(seconds),
        "planning_seconds": sum(seconds),
        "first_planning_seconds": seconds[0],
        "compilations": sum(step.compiled for step in parallel),
        "compilations_plain": sum(step.compiled for step in plain),
        "state_bytes": sum(leaf.nbytes for leaf in state),
        "moved_bytes": moves.bytes,
        "max_error": errors[worst],
        "worst_leaf": worst,
        "wall_seconds": wall,
        "environment": {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "flax": metadata.version("flax"),
            "optax": metadata.version("optax"),
            "haiku": metadata.version("dm-haiku"),
            "equinox": metadata.version("equinox"),
            "devices": DEVICES,
            "cores": os.cpu_count(),
            "load_before": round(load, 1),
        },
    }


def table(rows: dict[str, Any]) -> str:
    """The results for people."""
    lines = [
        "# Train loops from public practice",
        "",
        f"`{COMMAND}`: 20 steps, two short last batches and two evaluations on 8 virtual CPU",
        "devices; each loop against plain `jit` on one device. Signatures: a full batch, a short one, evaluation.",
        "Compilations are all of XLA's, those of copies included. An error of at most 1e-5 passes.",
        "",
        "| loop | signatures | planning s, all | planning s, first | compilations | of plain `jit` | state | moved "
        "| max error | load before |",
        "|---|" + "--:|" * 9,
    ]
    for name in (n for n in NAMES if n in rows):
        row = rows[name]
        cells = [
            name, row["signatures"], f"{row['planning_seconds']:.2f}", f"{row['first_planning_seconds']:.2f}",
            row["compilations"], row["compilations_plain"], f"{row['state_bytes'] / 2**10:.1f} KiB",
            f"{row['moved_bytes']} B", f"{row['max_error']:.1e}", row["environment"]["load_before"],
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    seen = {tuple((k, v) for k, v in row["environment"].items() if k != "load_before") for row in rows.values()}
    lines += [""] + ["Measured with " + ", ".join(f"{k} {v}" for k, v in sorted(about)) + "." for about in sorted(seen)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
