"""`alpa-lite verify`: a plan against the compiler of its target, in a process of its own.

A vendor's compiler is a large library made for its own machines. Away from them it may abort the process or wait for
something that is not there, so it runs in another process, which has a time limit, and which hands back JSON. It
compiles exactly the executables that would run: the plan is replayed, which fails if the step is not the plan's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from alpa_lite.api import ParallelStep
from alpa_lite.compiler import compile_step
from alpa_lite.errors import AlpaLiteError, OptionError, VerificationError
from alpa_lite.options import Options
from alpa_lite.passes.checks.verification import CompiledReport, compiled_reports
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime import aot
from alpa_lite.steps import NamedStep

TOLERANCE = 0.15
"""The largest relative difference of the predicted memory from the compiler's."""

_LINES = 12  # of the compiler's last words, where it says nothing else


def verify(plan_file: Path, step: NamedStep, target: str | None, time_limit: float) -> dict[str, Any]:
    """Compiles a plan for its target, and returns the comparison with the compiler's result.

    Args:
      plan_file: the plan.
      step: that it was made for.
      target: as `runtime.aot.target_of` reads it; None for the plan's own cluster.
      time_limit: seconds for all of it.

    Returns:
      JSON values: see `report`.

    Raises:
      AlpaLiteError: the plan, the step or the target cannot be used, or the compiler failed; the message has the cause.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        request = {
            "plan": str(plan_file.resolve()), "step": asdict(step), "target": target, "answer": str(answer)
        }  # fmt: skip
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "alpa_lite.verifying", json.dumps(request)]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=time_limit)
        except subprocess.TimeoutExpired:
            raise OptionError(
                f"--time-limit {time_limit:g}: the compiler did not finish in this time; allow more, or verify "
                "a smaller size of the model"
            ) from None
        if not answer.exists():
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LINES:])
            raise VerificationError(f"the compiler ended with exit code {done.returncode}:\n{said}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in found:
        raise AlpaLiteError(found["error"])
    return found


def report(plan_file: Path, step: NamedStep, target: str | None) -> dict[str, Any]:
    """`verify` in this process.

    Returns:
      plan, target, jax, compiler: what was compiled with what;
      collectives: of each kind and axes, how many the plan has, how many were found, and the bytes of each;
      rewrites, differences: as `checks.compare_hlo` names them, each with its executable in front;
      memory: of each executable the predicted and the compiler's bytes per device;
      communicates: whether there is no difference;
      fits: whether the memory of the step is within `TOLERANCE`; None of a pipeline, whose executables have temporaries
        alone to compare;
      seconds: of planning again, and of compiling.
    """
    plan = Plan.load(plan_file)
    chosen = aot.target_of(target, plan.cluster)
    devices = aot.devices_of(chosen)
    fun, args, kwargs = step.load()
    options = options_of(fun)
    start = time.perf_counter()
    given = Options(**{**options, "plan": plan, "cluster": plan.cluster, "verify": "off", "memory_per_device": None})
    compiled = compile_step(getattr(fun, "__wrapped__", fun) if options else fun, args, kwargs, given, plan.cluster)
    replayed = time.perf_counter()
    executables = aot.compile_for_devices(compiled.staged, compiled.plan, devices)
    found = list(compiled_reports(compiled.plan, compiled.staged, executables, chosen.platform))
    return {
        "plan": str(plan_file),
        "step": step.name,
        "target": str(chosen),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        "compiler": aot.compiler_version(chosen),
        "collectives": _collectives(found),
        "rewrites": [f"{one.name}: {rewrite}" for one in found if one.hlo for rewrite in one.hlo.rewrites],
        "differences": [f"{one.name}: {line}" for one in found if one.hlo for line in one.hlo.differences],
        "memory": [_memory(one) for one in found if one.memory is not None],
        "communicates": all(one.hlo is None or one.hlo.ok for one in found),
        "fits": next((_within(_memory(one)) for one in found if one.memory is not None and one.is_whole_step), None),
        "seconds": {"planning again": replayed - start, "compiling": time.perf_counter() - replayed},
    }


def options_of(fun: Any) -> dict[str, Any]:
    """Returns the options that a step was decorated with; {} for a plain function."""
    if not isinstance(fun, ParallelStep):
        return {}
    return {name: getattr(fun.options, name) for name in type(fun.options).__dataclass_fields__}


def _collectives(found: Sequence[CompiledReport]) -> list[dict[str, Any]]:
    """Returns planned and found executions of one run of each executable, by kind, axes and bytes."""
    counts: defaultdict[tuple[str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for one in found:
        if one.hlo is None:
            continue
        for column, collectives in enumerate((one.planned_collectives, one.hlo.collectives)):
            for c in collectives:
                counts[c.kind, ", ".join(c.axes), c.bytes][column] += c.count
    return [
        {"kind": kind, "axes": axes, "bytes": size, "planned": planned, "found": there}
        for (kind, axes, size), (planned, there) in sorted(counts.items())
    ]


def _memory(one: CompiledReport) -> dict[str, Any]:
    memory = one.memory
    assert memory is not None
    return {
        "executable": one.name,
        "submesh": one.submesh,
        "predicted": memory.predicted_bytes,
        "compiler": memory.data if one.is_whole_step else memory.temporaries,
        "arguments": memory.arguments,
        "outputs": memory.outputs - memory.aliases,
        "temporaries": memory.temporaries,
        "code": memory.code,
    }


def _within(row: dict[str, Any]) -> bool:
    predicted, measured = row["predicted"], row["compiler"]
    return bool(predicted) and abs(predicted - measured) <= TOLERANCE * measured


def _child(text: str) -> None:
    """Answers one request; an error that the user can mend is an answer, too."""
    request = json.loads(text)
    try:
        answer = report(Path(request["plan"]), NamedStep(**request["step"]), request["target"])
    except AlpaLiteError as error:
        answer = {"error": str(error)}
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    _child(sys.argv[1])
