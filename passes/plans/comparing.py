"""How textbook methods would do on the same devices: the integer program with operations fixed, at the same prices.

    data parallel     every operation over examples divided along them, the state whole on every device
    FSDP (ZeRO-3)     likewise, parameters and optimizer state sharded where a dim divides, and gathered for use
    tensor parallel   the batch whole on every device, products divided along dims of their parameters
    one mesh          everything free, on the best mesh of all devices; beside a pipeline

What a method leaves open (`sharding.textbook`) the program chooses, so that each figure is that of the best step of its
kind within the budget of memory; where none fits, the least bytes that one needs are found.
Beside a plan of one mesh, methods run as many micro-batches as the plan; beside a pipeline, one.

That costs up to half of what planning costs (a GPT 12 x 768 on eight A100: 1.5 s beside 4.7 s; a scanned Llama 8B on 64
H100, where methods do not fit at once: 3.3 s beside 7.8 s), and so it is done when somebody asks (`Plan.compared`),
within a limit of seconds; what the limit leaves out is not evaluated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.figures import Comparison
from alpa_lite.graph import Traced
from alpa_lite.layout import LogicalMesh
from alpa_lite.options import DataParallel, Method, Sharded, TensorParallel, Zero
from alpa_lite.passes import sharding
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding import limits, race, search, strategies, tables
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.stages import planning
from alpa_lite.strategy import Rule, Solution

SECONDS = 30.0
"""After how many seconds no further method is evaluated."""

TEXTBOOK: Mapping[str, Method] = {
    "data parallel": DataParallel(),
    "FSDP (ZeRO-3)": Zero(stage=3),
    "tensor parallel": TensorParallel(),
}
"""The methods by their names in reports."""


@dataclass(frozen=True, eq=False)
class Comparing:
    """What comparing needs of a step. Called, it evaluates every method.

    Attributes:
      traced, rules: the step as one mesh runs it.
      cluster: all devices.
      budget: bytes per device.
      grouping: its groups, if they are known.
      one_mesh: whether one mesh is among the methods.
    """

    traced: Traced
    rules: Mapping[Any, Rule]
    cluster: Cluster
    budget: float
    grouping: Grouping | None = None
    one_mesh: bool = False

    def __call__(self) -> tuple[Comparison, ...]:
        """The methods in the order of the module's list."""
        if self.cluster.num_devices == 1:
            return ()
        started, out = time.perf_counter(), []
        groups = self.grouping or sharding.group(self.traced, self.rules)
        shared = tables.Shared(self.traced, groups)
        slowest = 0.0
        for name, method in TEXTBOOK.items():
            before = time.perf_counter()
            left = SECONDS - (before - started)
            out.append(_evaluated(name, lambda m=method: self._textbook(m, groups, shared), left > slowest))
            slowest = max(slowest, time.perf_counter() - before)
        if self.one_mesh:
            left = SECONDS - (time.perf_counter() - started)
            shapes = len(limits.meshes(self.cluster, Sharded()))
            out.append(_evaluated("one mesh", lambda: self._free(groups, left), left > _FREE * shapes * slowest))
        return tuple(out)

    def _textbook(self, method: Method, groups: Grouping, shared: tables.Shared) -> Comparison:
        (mesh,) = limits.meshes(self.cluster, method)
        allowed = limits.limits(self.traced, groups, method, mesh)
        cost = MeshCost(self.cluster, mesh)
        spaces: list[Space] = []
        for regather in (False, True) if self.cluster.platform != "cpu" else (False,):  # as the search of one mesh
            space = strategies.build(
                self.traced, groups, self.rules, cost, budget=self.budget, allowed=allowed, regather=regather,
                shared=shared,
            )  # fmt: skip
            spaces.append(space)
            if not regather:
                free = solve.solve(replace(space.program, budget=None), gap=1e-3)
                if not free.choice or free.peak <= self.budget:
                    return self._found(mesh, groups, space, free)
        within = [solve.solve(s.program, gap=1e-2, free=free.bound) for s in spaces]
        fitting = [self._found(mesh, groups, s, found) for s, found in zip(spaces, within, strict=True) if found.choice]
        if fitting:
            return min(fitting, key=lambda found: found.step_seconds or math.inf)
        least = min(solve.minimal_budget(s.program, gap=1e-2)[0] for s in spaces)
        if least <= self.budget or math.isinf(least):
            return Comparison("", mesh.shape, reason="not evaluated: no step within the memory was found in time")
        return Comparison("", mesh.shape, None, math.ceil(least), f"does not fit by {_gib(least - self.budget)}")

    def _free(self, groups: Grouping, seconds: float) -> Comparison:
        try:
            found = search.search(
                self.traced, groups, self.rules, self.cluster, Sharded(), budget=self.budget, time_limit=seconds,
                settled=partial(planning.settled, self.traced, groups, self.rules, self.cluster),
            )  # fmt: skip
        except InfeasibleError as error:
            return Comparison("", reason=does_not_fit(error))
        return self._found(found.mesh, groups, found.space, found.solution)

    def _found(self, mesh: LogicalMesh, groups: Grouping, space: Space, solution: Solution) -> Comparison:
        """The figures of a solution, if it is one."""
        if not solution.choice:
            return Comparison("", mesh.shape, reason=f"no such step was found: {solution.status}")
        found = race.Found(mesh, space, solution, race.choice_of(space, solution), ())
        seconds = planning.settled(self.traced, groups, self.rules, self.cluster, found)
        return Comparison("", mesh.shape, seconds, math.ceil(solution.peak))


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3g} GiB"


_FREE = 3.0
"""What a free program of a mesh of several axes takes at most, as a multiple of one of a textbook method."""


def of(traced: Traced, rules: Mapping[Any, Rule], staged: Staged, cluster: Cluster, budget: float) -> Comparing:
    """What evaluates textbook methods beside a planned step.

    Args:
      traced, rules: the user's step, which beside a pipeline is compared as it is.
      budget: bytes per device.
    """
    if staged.program.schedule != "none":
        known = "one mesh" in [other.name for other in staged.verdict.others]
        return Comparing(traced, rules, cluster, budget, one_mesh=not known)
    (stage,) = staged.stages
    return Comparing(stage.graph.traced, stage.rules, cluster, budget, stage.grouping)


def beside(staged: Staged, name: str, other: Staged | Comparison | str) -> Staged:
    """The same with what was weighed against it for its plan: another way to run the step, or why there is none."""
    if isinstance(other, str):
        compared = Comparison(name, reason=other)
    elif isinstance(other, Comparison):
        compared = replace(other, name=name)
    else:
        shape = other.stages[0].found.mesh.shape if len(other.stages) == 1 else (len(other.stages),)
        compared = Comparison(name, shape, other.seconds, other.needed)
    return replace(staged, verdict=replace(staged.verdict, others=(*staged.verdict.others, compared)))


def does_not_fit(error: InfeasibleError) -> str:
    """Why one mesh is none of the plans, in a line."""
    least = error.smallest_budget
    return str(error).split(":")[0] if least is None else f"does not fit: needs {least / 2**30:,.1f} GiB per device"


def _evaluated(name: str, evaluate: Callable[[], Comparison], in_time: bool) -> Comparison:
    """The figures of a method, or why there are none."""
    if not in_time:
        return Comparison(name, reason=f"not evaluated: comparing stops after {SECONDS:g} s")
    try:
        return replace(evaluate(), name=name)
    except (InfeasibleError, MicrobatchError, OptionError) as error:
        return Comparison(name, reason=str(error).split(";")[0])
