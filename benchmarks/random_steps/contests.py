"""Random ways to plan and to call random programs, and the program and the way of a seed."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.ir import schedules
from benchmarks.random_steps import layers
from benchmarks.random_steps.program import Program
from tests.helpers import FREE_LINKS

MESHES = {(8,): ("x",), (4, 2): ("x", "y"), (2, 2, 2): ("x", "y", "z")}
SUBMESHES = {
    2: ("((1,), (1,))", "((2,), (2,))", "((4,), (4,))", "((2, 2), (2, 2))", "((4,), (2,))"),
    3: ("((2,), (2,), (2,))", "((4,), (2,), (2,))", "((1,), (1,), (1,))"),
    4: ("((2,), (2,), (2,), (2,))", "((1,), (1,), (1,), (1,))"),
}
SETTINGS = {
    "matmul precision": "jax.default_matmul_precision('highest')",
    "threefry partitionable": "jax.threefry_partitionable(False)",
    "x64": "jax.enable_x64(True)",
    "generator": "jax.default_prng_impl('rbg')",
    "rank promotion": "jax.numpy_rank_promotion('allow')",
}
"""Contexts of JAX in which a program is called again, by the names of their features."""


@dataclass(frozen=True)
class Contest:
    """How a program is planned and called.

    Attributes:
      method: its name. options: of `parallelize`, as text that makes them. reports: whether all reports are written.
      specs: of arguments by path, as text.
      setting: of `SETTINGS`, under which the second call runs; "" for none.
      returned: (state leaf, batch leaf): the array of the former, as the first call returned it, is the latter, too.
    """

    method: str
    options: str
    reports: bool = False
    specs: tuple[tuple[str, str], ...] = ()
    setting: str = ""
    returned: tuple[str, str] | None = None

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
        lines = ["import alpa_lite, contextlib"]
        if "FREE_LINKS" in self.options:
            lines += ["from alpa_lite.cluster import Cluster, Dispatch, Link", f"FREE_LINKS = {FREE_LINKS!r}"]
        lines.append(f"planned = alpa_lite.parallelize(step, {self.text(program)})")
        if self.features():
            lines.append("after, _ = planned(state, batch)")
            if self.returned is not None:
                lines.append(f"batch = {{**batch, {self.returned[1]!r}: after[{self.returned[0]!r}]}}")
            lines.append(f"with {SETTINGS.get(self.setting, 'contextlib.nullcontext()')}:\n    planned(after, batch)")
        return "\n".join([*lines, "print(alpa_lite.check(planned, state, batch))", ""])

    def context(self) -> Any:
        """The setting, to call under."""
        return eval(SETTINGS[self.setting], {"jax": jax}) if self.setting else contextlib.nullcontext()

    def arguments(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The arguments of the second call."""
        one, other = self.returned or ("", "")
        return state, ({**batch, other: state[one]} if one in state and other in batch else batch)

    def features(self) -> list[str]:
        """The names of features, as coverage counts them."""
        out = [f"setting: {self.setting}"] * bool(self.setting)
        return out + ["returned array in two places"] * (self.returned is not None)


def contest_of(program: Program, seed: int, is_layered: bool) -> Contest:
    """A random way to plan a program, and to call it."""
    rng = random.Random(seed * 7919 + 1)
    kinds = {"manual": 5, "textbook": 2, "sharded": 3, "small": 1}
    if is_layered:
        kinds = {"pipeline": 5, "manual": 3, "textbook": 1, "sharded": 1, "small": 1, "manual pipeline": 1, "auto": 2}
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    parts = rng.choice((1, 2, 4, 4, 8)) if is_layered else 1
    name, more, method, specs = kind, dict[str, str](), "alpa_lite.Auto()", ()
    shape = rng.choice(list(MESHES))
    if kind == "auto":
        more["effort"] = "'quick'"
    elif "pipeline" in kind:
        stages, schedule = rng.choice((2, 2, 2, 3, 4)), rng.choice(schedules.NAMES)
        submeshes, remat = rng.choice(SUBMESHES[stages]), rng.choice(("none", "none", "layer", "selective"))
        if schedule == "interleaved-1f1b":
            parts = stages * rng.choice((1, 2) if stages != 3 else (1,))
        name = "manual pipeline" if "manual" in kind else f"pipeline {schedule}"
        method = f"alpa_lite.Pipeline(schedule={schedule!r}, submesh_shapes={submeshes}, remat={remat!r})"
        if "manual" in kind:
            specs = _specs(program, rng, ("x",), {"x": 2})
            names = ("x", "y") if "(2, 2)" in submeshes else ("x",)
            method = f"alpa_lite.Manual(SPECS, axis_names={names}, rest={method})"
    elif kind == "manual":
        axes = MESHES[shape]
        specs = _specs(program, rng, axes, dict(zip(axes, shape, strict=True)))
        rest = rng.choice(("Sharded()", "Sharded()", "DataParallel()", "Zero(3)", "TensorParallel()", "Zero(1)"))
        method = f"alpa_lite.Manual(SPECS, mesh_shape={shape}, axis_names={axes}, rest=alpa_lite.{rest})"
    elif kind == "textbook":
        name = rng.choice(("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel()"))
        method = f"alpa_lite.{name}"
    else:
        method = f"alpa_lite.Sharded({shape})"
        if kind == "small":
            name, more["memory_per_device"] = "sharded, small memory", str(rng.choice((2000, 4000, 8000, 20_000)))
    if kind in ("sharded", "manual", "textbook") and rng.random() < 0.6:
        more["cluster"] = "FREE_LINKS"
    if rng.random() < 0.5:
        more["verify"] = "'hlo'"
    if rng.random() < 0.1 and "pipeline" not in kind and kind != "auto":
        more["communication"] = "'compiler'"
    if program.feeding != "aliased" and rng.random() < 0.25:
        more["donate_argnums"] = rng.choice(("()", "(0,)", "(0, 1)"))
    options = ", ".join(f"{k}={v}" for k, v in {"method": method, **more, "num_microbatches": parts}.items())
    setting = rng.choice(list(SETTINGS)) if rng.random() < 0.4 else ""
    pairs = [
        (one.name, other.name)
        for one in program.state
        for other in program.batch
        if (one.shape, one.dtype) == (other.shape, other.dtype) and one.dtype != "key"
    ]
    returned = rng.choice(pairs) if pairs and rng.random() < 0.5 else None
    return Contest(name, options, rng.random() < 0.3, specs, setting, returned)


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
    program = (layers.layered if layered else layers.general)(seed)
    return program, contest_of(program, seed, layered)


def reductions(program: Program) -> list[Program]:
    """Smaller programs, the least first."""
    found: list[Program | None] = []
    if program.gradient:
        found.append(dataclasses.replace(program, gradient=False).pruned())
    for name in program.outputs if len(program.outputs) > 1 else ():
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
