"""How textbook methods would do on the same devices: the integer program with operations fixed, at the same prices.

    data parallel     every operation over examples divided along them, the state whole on every device
    FSDP (ZeRO-3)     likewise, parameters and optimizer state sharded where a dim divides, and gathered for use
    tensor parallel   the batch whole on every device, products divided along dims of their parameters
    one mesh          everything free, on the best mesh of all devices; beside a pipeline
    one device        the step as it is written, on the first of the devices

What a method leaves open (`sharding.textbook`) the program chooses, so that each figure is that of the best step of its
kind within the budget of memory; where none fits, the least bytes that one needs are found.
Beside a plan of one mesh, methods run as many micro-batches as the plan; beside a pipeline, one.
That costs up to half of what planning costs, and so it is done when somebody asks (`Plan.compared`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.options import DataParallel, Method, Sharded, TensorParallel, Zero
from alpa_lite.passes import sharding
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding import mesh_program, tables
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.stages import planning
from alpa_lite.plan.figures import Comparison

TEXTBOOK: Mapping[str, Method] = {
    "data parallel": DataParallel(),
    "FSDP (ZeRO-3)": Zero(stage=3),
    "tensor parallel": TensorParallel(),
}
"""The methods by their names in reports."""
_ONE_MESH = "one mesh"


@dataclass(frozen=True, eq=False)
class Comparing:
    """A planned step, ready to be compared with textbook methods. A call evaluates every method.

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
        groups = self.grouping or sharding.group(self.traced, self.rules)
        shared = tables.Shared(self.traced, groups)
        methods = [(name, method, self.cluster) for name, method in TEXTBOOK.items()]
        if self.one_mesh:
            methods.append((_ONE_MESH, Sharded(), self.cluster))
        methods.append(("one device", Sharded((1,)), self.cluster.part(1)))
        return tuple(self._compared(*each, groups, shared) for each in methods)

    def _compared(
        self, name: str, method: Method, cluster: Cluster, groups: Grouping, shared: tables.Shared
    ) -> Comparison:
        """The figures of the best step of a method, or why there are none."""
        try:
            programs = mesh_program.mesh_programs(
                self.traced, groups, self.rules, cluster, method, budget=self.budget, shared=shared
            )
            found = mesh_program.solve_meshes(programs, self.budget)
            if found is None and name == _ONE_MESH:
                return Comparison(name, reason="does not fit")
            if found is None:
                least, shape = mesh_program.minimise_memory(programs), programs[0].mesh.shape
                if least is None:
                    return Comparison(name, shape, reason="not evaluated: the method has no choice")
                if least.peak > self.budget:
                    excess = f"{(least.peak - self.budget) / 2**30:,.3g} GiB"
                    return Comparison(name, shape, None, math.ceil(least.peak), f"does not fit by {excess}")
                found = least.program, least.space, least.solution
            program, space, solution = found
            decided = MeshSolution(program.mesh, space, solution, mesh_program.choice_of(space, solution))
            seconds = planning.settled(self.traced, groups, self.rules, cluster, decided)
            return Comparison(name, program.mesh.shape, seconds, math.ceil(solution.peak))
        except (InfeasibleError, MicrobatchError, OptionError) as error:
            return Comparison(name, reason=str(error).split(";")[0])


def of(traced: Traced, rules: Mapping[Any, Rule], staged: Staged, cluster: Cluster, budget: float) -> Comparing:
    """Returns the comparison of a planned step with textbook methods.

    Args:
      traced, rules: the user's step, which is compared as it is when the plan is a pipeline.
      budget: bytes per device.
    """
    if staged.program.schedule != "none":
        known = _ONE_MESH in [other.name for other in staged.verdict.others]
        return Comparing(traced, rules, cluster, budget, one_mesh=not known)
    (stage,) = staged.stages
    return Comparing(stage.graph.traced, stage.rules, cluster, budget, stage.grouping)


def beside(staged: Staged, name: str, other: Staged | Comparison | str) -> Staged:
    """Returns the plan with a rejected configuration added to its verdict: its figures, or why there is none."""
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
