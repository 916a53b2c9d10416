"""Random ways to plan random programs, and the program and the way of a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.ir import schedules
from benchmarks.random_steps import features as further
from benchmarks.random_steps import kinds, layers
from benchmarks.random_steps.program import Program
from benchmarks.workers import free_links

MESHES = {(8,): ("x",), (4, 2): ("x", "y"), (2, 2, 2): ("x", "y", "z")}
FREE_LINKS = free_links()
WIDER = 10_000
"""From this seed on, programs have the lines of `random_steps/wider.py`, too."""
FURTHER = 1_000_000
"""From this seed on, programs have the lines and features of `random_steps/features.py`, too."""


@dataclass(frozen=True)
class Contest:
    """How a program is planned: the name of the method, and options of `parallelize` as text that makes them."""

    method: str
    options: str
    reports: bool
    specs: tuple[tuple[str, str], ...] = ()
    features: further.Features = further.NO_FEATURES

    def text(self, program: Program) -> str:
        """The options for a program, specs of the leaves alone that it has."""
        paths = {f"{where}['{v.name}']" for where in ("state", "batch") for v in getattr(program, where)}
        specs = ", ".join(f"{path!r}: {spec}" for path, spec in self.specs if path in paths)
        return self.options.replace("SPECS", f"{{{specs}}}")

    def parallelized(self, program: Program, step: Any) -> Any:
        """The planned step."""
        space = {"alpa_lite": alpa_lite, "P": P, "Cluster": Cluster, "FREE_LINKS": FREE_LINKS}
        return alpa_lite.parallelize(step, **eval(f"dict({self.text(program)})", space))

    def script(self, program: Program) -> str:
        """The lines of a script that plan, run and compare."""
        cluster = f"from alpa_lite.cluster import Cluster, Dispatch, Link\nFREE_LINKS = {FREE_LINKS!r}\n"
        return (
            f"import alpa_lite\n{cluster if 'FREE_LINKS' in self.options else ''}"
            f"planned = alpa_lite.parallelize(step, {self.text(program)})\n"
            f"{self._again()}print(alpa_lite.check(planned, state, batch))\n"
        )

    def _again(self) -> str:
        """The lines of a script that show a feature."""
        features = self.features
        if not features.names():
            return ""
        returned = ""
        if features.returned is not None:
            state, batch = features.returned
            returned = f"    batch = {{**batch, {batch!r}: state[{state!r}]}}\n"
        context = further.SETTINGS.get(features.setting, "contextlib.nullcontext()")
        return (
            f"import contextlib\nstate, _ = planned(state, batch)\nwith {context}:\n{returned}"
            "    planned(state, batch)\n"
        )


def contest_of(program: Program, seed: int, is_layered: bool) -> Contest:
    """A random way to plan a program."""
    rng = random.Random(seed * 7919 + 1)
    shape = rng.choice(list(MESHES))
    kinds = ["manual"] * 5 + ["textbook"] * 2 + ["sharded"] * 3 + ["small"] * 1
    if is_layered:
        kinds = ["pipeline"] * 5 + ["manual"] * 2 + ["textbook", "sharded", "small", "manual pipeline"]
    kind = rng.choice(kinds)
    options: dict[str, str] = {}
    specs: tuple[tuple[str, str], ...] = ()
    parts = rng.choice((1, 2, 4, 4, 8)) if is_layered else 1
    if "pipeline" in kind:
        stages = rng.choice((2, 2, 2, 3, 4))
        submeshes = rng.choice({
            2: ["((1,), (1,))", "((2,), (2,))", "((4,), (4,))", "((2, 2), (2, 2))", "((4,), (2,))"],
            3: ["((2,), (2,), (2,))", "((4,), (2,), (2,))", "((1,), (1,), (1,))"],
            4: ["((2,), (2,), (2,), (2,))", "((1,), (1,), (1,), (1,))"],
        }[stages])  # fmt: skip
        parts = rng.choice((1, 2, 4, 4, 8))
        schedule = rng.choice(schedules.NAMES)
        if schedule == "interleaved-1f1b":
            parts = stages * rng.choice((1, 2) if stages != 3 else (1,))
        remat = rng.choice(("none", "none", "layer", "selective"))
        method = f"alpa_lite.Pipeline(schedule={schedule!r}, submesh_shapes={submeshes}, remat={remat!r})"
        name = f"pipeline {schedule}"
        if kind == "manual pipeline":
            specs = _specs(program, rng, ("x",), {"x": 2})
            names = ("x", "y") if "(2, 2)" in submeshes else ("x",)
            method = f"alpa_lite.Manual(SPECS, axis_names={names}, rest={method})"
            name = "manual pipeline"
    elif kind == "manual":
        axes = MESHES[shape]
        specs = _specs(program, rng, axes, dict(zip(axes, shape, strict=True)))
        rest = rng.choice(("Sharded()", "Sharded()", "DataParallel()", "Zero(3)", "TensorParallel()", "Zero(1)"))
        method = f"alpa_lite.Manual(SPECS, mesh_shape={shape}, axis_names={axes}, rest=alpa_lite.{rest})"
        name = "manual"
    elif kind == "textbook":
        text = rng.choice(("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel()"))
        method, name = f"alpa_lite.{text}", text
    elif kind == "small":
        method, name = f"alpa_lite.Sharded({shape})", "sharded, small memory"
        options["memory_per_device"] = str(rng.choice((2000, 4000, 8000, 20_000)))
    else:
        method, name = f"alpa_lite.Sharded({shape})", "sharded"
    options = {"method": method, **options, "num_microbatches": str(parts)}
    if kind in ("sharded", "manual", "textbook") and rng.random() < 0.6:
        options["cluster"] = "FREE_LINKS"
    if rng.random() < 0.5:
        options["verify"] = "'hlo'"
    if rng.random() < 0.1 and "pipeline" not in kind:
        options["communication"] = "'compiler'"
    if seed >= WIDER and program.feeding != "aliased" and rng.random() < 0.25:
        options["donate_argnums"] = rng.choice(("()", "(0,)", "(0, 1)"))
    if seed >= WIDER and is_layered and rng.random() < 0.15:
        name, specs = "auto", ()
        options |= {"method": "alpa_lite.Auto()", "effort": "'quick'"}
        options.pop("communication", None)
    return Contest(name, ", ".join(f"{k}={v}" for k, v in options.items()), rng.random() < 0.3, specs)


def _specs(
    program: Program, rng: random.Random, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> tuple[tuple[str, str], ...]:
    """Random specs of arguments: paths, and specs as text."""
    found = {}
    for where, leaves in (("state", program.state), ("batch", program.batch)):
        for leaf in leaves:
            if rng.random() < 0.35 or leaf.dtype == "key":
                continue
            free = rng.sample(axes, len(axes))
            spec: list[str] = []
            for size in leaf.shape:
                taken = tuple(free[: rng.choice((0, 1, 1, 2))])
                count = int(np.prod([sizes[a] for a in taken])) if taken else 1
                if not taken or (size % count and rng.random() < 0.97):
                    spec.append("None")
                    continue
                free = free[len(taken) :]
                spec.append(repr(taken[0]) if len(taken) == 1 else repr(taken))
            found[f"{where}['{leaf.name}']"] = f"P({', '.join(spec)})"
    return tuple(found.items())


def made(seed: int) -> tuple[Program, Contest]:
    """The program of a seed, and how it is planned."""
    layered = random.Random(seed).random() < 0.4
    make = layers.layered if layered else kinds.general
    program = make(seed, seed >= WIDER, seed >= FURTHER)
    contest = contest_of(program, seed, layered)
    if seed >= FURTHER:
        contest = dataclasses.replace(contest, features=further.features(program, seed))
    return program, contest


def reductions(program: Program) -> list[Program]:
    """Smaller programs, the least first."""
    found: list[Program | None] = []
    if program.gradient:
        found.append(dataclasses.replace(program, gradient=False).pruned())
    if len(program.outputs) > 1:
        for name in program.outputs:
            found.append(dataclasses.replace(program, outputs=(name,)).pruned())
            found.append(dataclasses.replace(program, outputs=tuple(n for n in program.outputs if n != name)).pruned())
    for i in range(len(program.updates)):
        updates = (*program.updates[:i], *program.updates[i + 1 :])
        found.append(dataclasses.replace(program, updates=updates).pruned())
    found += [program.without(line.value.name) for line in program.lines]
    whole = size(program)
    return sorted((one for one in found if one is not None and size(one) < whole), key=size)


def size(program: Program) -> tuple[int, int]:
    """Lines, of which constants count half, and outputs."""
    constants = sum(line.kind == "constant" for line in program.lines)
    return 2 * len(program.lines) - constants + program.gradient, len(program.outputs) + len(program.updates)
