"""Plans of outside models under different conditions: the files are equal byte for byte.

A plan is a function of the program, the cluster and the options. Each case is planned in processes of its own: alone
(the reference), beside four busy processes, pinned to one core, with another `PYTHONHASHSEED`, and after ten other
plans in the same process. What is compared is the file that `plan.save` writes.

    python benchmarks/equal_plans.py [CASE ...]     cases of planning.py; others keep their rows

writes benchmarks/results/equal_plans.json and equal_plans.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import planning

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CASES = (
    "bert-large", "roberta-large", "gpt2-xl", "vit-huge", "xlm-roberta-large", "marian-big", "wav2vec2-large", "unet",
    "albert-xxlarge", "electra-large", "llama-7b-scan", "blenderbot-3b",
)  # fmt: skip
CONDITIONS = ("alone", "beside four busy processes", "on one core", "another hash seed", "after ten other plans")
LIMIT = 900  # seconds of one plan


def save(name: str, path: Path, after: bool) -> None:
    """Plans a case in this process and saves the plan, after ten other plans if asked for."""
    planning.prepare()
    import alpa_lite
    from alpa_lite.models import MODELS

    if after:
        methods = alpa_lite.Zero(1), alpa_lite.Zero(2), alpa_lite.Zero(3)
        others = [(model, method) for model in ("gpt", "vit") for method in methods]
        others += [(model, alpa_lite.Auto()) for model in ("gpt", "bert", "vit", "llama")]
        for model, method in others:
            step, args = MODELS[model].abstract("tiny", 16)[:2]
            alpa_lite.make_plan(step, *args, cluster=alpa_lite.Cluster.preset("a100"), method=method)
    plan = planning.planner(name)(planning.method_of(name), {})
    plan.save(path)


def digest(name: str, condition: str) -> str:
    """The digest of the file of a case that is planned under a condition."""
    command = [sys.executable, __file__, "--child", name]
    if condition == "on one core":
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]
    seed = "77" if condition == "another hash seed" else "0"
    busy = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        command += [str(path)] + ["--after"] * (condition == "after ten other plans")
        try:
            if condition == "beside four busy processes":
                busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
            subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, timeout=LIMIT)
        finally:
            for process in busy:
                process.kill()
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def page(rows: Mapping[str, Mapping[str, str]], made: str) -> str:
    """The rows in Markdown."""
    equal = sum(len(set(row.values())) == 1 for row in rows.values())
    lines = [
        "# Plans under different conditions",
        "",
        f"`python benchmarks/equal_plans.py`, {made}. Each cell is the start of the SHA-256 of the saved plan.",
        "",
        f"| case | {' | '.join(CONDITIONS)} | equal |",
        f"|---|{'---|' * (len(CONDITIONS) + 1)}",
    ]
    for name, row in rows.items():
        cells = [row[condition][:8] for condition in CONDITIONS]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if len(set(row.values())) == 1 else '**no**'} |")
    return "\n".join([*lines, "", f"{equal} of {len(rows)} are equal byte for byte.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FILE"))
    parser.add_argument("--after", action="store_true")
    given = parser.parse_args()
    if given.child:
        save(given.child[0], Path(given.child[1]), given.after)
        return
    import jax

    file = RESULTS / "equal_plans.json"
    stored = json.loads(file.read_text())["rows"] if file.exists() else {}
    for name in given.cases or CASES:
        stored[name] = {condition: digest(name, condition) for condition in CONDITIONS}
        print(name, "equal" if len(set(stored[name].values())) == 1 else stored[name], flush=True)
    rows = {name: stored[name] for name in CASES if name in stored}
    made = f"{time.strftime('%Y-%m-%d')} with JAX {jax.__version__}"
    file.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    (RESULTS / "equal_plans.md").write_text(page(rows, made))


if __name__ == "__main__":
    main()
