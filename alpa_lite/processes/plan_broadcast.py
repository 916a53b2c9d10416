"""Process 0 plans, and all processes take its plan, once they know that they run the same step (`docs/processes.md`).

Three rounds of one `channel.Collective`:

1. `step`: process 0 compares what every process traced (`describe_step`).
2. `plan`: process 0 plans, or finds the plan in its cache, and broadcasts it; the others replay it, without solving.
3. `program`: process 0 compares the digests of the programs that the processes have written from the plan.

An error of any process, in any round, is raised by all. Waiting for a process is bounded; waiting for the plan is not.
A process that goes on without planning, as its arguments have not changed, is noticed by the call log (`divergence`).
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from alpa_lite.cluster import Cluster
from alpa_lite.compilation import plan_cache
from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.errors import ProcessError
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.program import Program
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan.plan import Plan
from alpa_lite.processes.channel import Collective
from alpa_lite.processes.failure_propagation import monitor
from alpa_lite.processes.initialization import check_joined

logger = logging.getLogger(__name__)

_MACHINE_FIELDS = ("device", "platform", "devices_per_node", "nodes", "topology", "devices_per_card")
"""Fields of a cluster that must be equal in all processes. Rates may differ, and those of process 0 count."""

MAX_NAMED = 3
"""The most differences that a message names."""

_DIGESTS = {
    "program": "the step has the same operations, in another order or with other parameters",
    "constants": "arrays that the step closes over have other values",
    "options": "the options of parallelize are others",
    "cluster": "the clusters are others",
    "state_from": "the steps of state_from= have other plans",
    "pins": "the arguments are placed otherwise",
}


class PlanBroadcast(Collective):
    """Planning of a step: in all processes, or in this one alone. All create the shared ones in the same order."""

    def __init__(self, name: str, shared: bool) -> None:
        """Args:
          name: of the step.
          shared: whether all processes plan together.

        Raises:
          ProcessError: this is one process of several, but it has not joined the others.
        """
        super().__init__("plan", f"planning {name}", local=not shared)
        self._name, self._point = name, None
        self._passed: set[int] = set()  # at the last check
        if self.count > 1:
            monitor.start()
            self._point = monitor.announce_planning()
        elif shared:
            check_joined(name)

    def check_peers(self) -> None:
        """Raises ProcessError if another process passed this point of the program without planning, twice in a row."""
        before, self._passed = self._passed, set() if self._point is None else monitor.find_passed(self._point)
        for process in sorted(before & self._passed)[:1]:
            raise ProcessError(
                f"process {process} goes through {self._point} as it was planned before, and process {self.process} "
                f"has to plan {self._name} for other arguments there: every process must give arrays of the same "
                "global shapes and dtypes, in equally many calls and batches"
            )

    def plan(
        self, step: Step, request: PlanRequest, make: Callable[[], tuple[Plan, Staged]],
        replay: Callable[[Plan], Staged],
    ) -> tuple[Plan, Staged]:  # fmt: skip
        """Returns the plan of process 0, and the step divided by it. Called within `error_scope`.

        Args:
          step, request: what this process traced, and its request.
          make: plans; process 0 alone calls it.
          replay: divides the step by a plan; the others call it.

        Raises:
          ProcessError: the processes do not trace the same step, or one did not respond in time.
          AlpaLiteError: raised by any process.
        """
        if self.count == 1:
            return make()
        self.gather("step", lambda: describe_step(step, request), lambda found: check_same_step(found, self._name))
        planned = make() if self.process == 0 else None
        data = self.broadcast("plan", lambda: planned and planned[0].to_json(), math.inf)
        if planned is None:
            plan = Plan.from_json(data, "the plan of process 0")
            planned = plan, replay(plan)
        digest = program_digest(planned[1].program)
        self.gather("program", lambda: digest, self._check_digests)
        logger.info("%s: %s processes run the plan of process 0", self._name, self.count)
        return planned

    def _check_digests(self, digests: Sequence[str]) -> None:
        """Raises ProcessError unless all processes have written the same program."""
        wrong = [str(number) for number, one in enumerate(digests) if one != digests[0]]
        if wrong:
            raise ProcessError(
                f"{self._name}: processes {', '.join(wrong)} write another program from the plan of process 0 than it "
                "does, so nothing has run; all must have the same versions of Python, NumPy and JAX"
            )


def common_cluster(here: Cluster) -> Cluster:
    """Returns the cluster that all processes plan for: that of process 0, with the least memory of all.

    Raises:
      ProcessError: the processes see different machines, or one did not respond in time.
    """
    if jax.process_count() == 1:
        return here
    return Cluster.from_json(Collective("cluster", "describing the devices").gather("cluster", here.to_json, _merge))


def _merge(clusters: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first cluster, as JSON values, with the least memory of all."""
    first = clusters[0]
    for process, other in enumerate(clusters):
        unlike = [name for name in _MACHINE_FIELDS if first[name] != other[name]]
        if unlike:
            fields = ", ".join(f"{name} is {other[name]!r} and not {first[name]!r}" for name in unlike)
            raise ProcessError(f"process {process} sees another machine than process 0: {fields}; give cluster=")
    return first | {"memory": min(other["memory"] for other in clusters)}


def describe_step(step: Step, request: PlanRequest) -> dict[str, dict[str, Any]]:
    """Returns a description of the traced step, as JSON values in levels: if one differs, the next ones are not named.

    `values` has the versions, the number of devices, and the type of each flat argument by its path; `operations` the
    number of operations of each name, those of loop bodies included; `digests` all else that the plan depends on, and
    the closed-over constants that are here whole.
    """
    graph = step.traced.graph
    here = [one for one in graph.constants if not isinstance(one, jax.Array) or one.is_fully_addressable]
    constants = hashlib.blake2b(Keys().text(here).encode(), digest_size=16).hexdigest()
    digests = {**plan_cache.key_of(step, request), "constants": constants}
    types = [f"{graph.values[n].dtype}{list(graph.values[n].shape)}" for n in graph.block.inputs]
    return {
        "values": {
            "JAX": digests.pop("jax"),
            "alpa_lite": digests.pop("alpa_lite"),
            "number of devices": jax.local_device_count(),
            **{format_path(a.path): t for a, t in zip(step.traced.arguments, types, strict=False)},
        },
        "operations": Counter(op.name for op in graph.ops()),
        "digests": digests,
    }


def check_same_step(descriptions: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises ProcessError unless all processes trace the same step.

    Args:
      descriptions: of `describe_step`, by process.
      name: of the step.
    """
    found = [_differences(descriptions[0], other, process) for process, other in enumerate(descriptions)]
    lines = [line for lines in found for line in lines]
    if lines:
        count = sum(map(bool, found))
        more = f" ({len(lines) - MAX_NAMED} more differences, in {count} processes)" if len(lines) > MAX_NAMED else ""
        raise ProcessError(
            f"the processes do not call {name} with the same step and arguments, so nothing has run: "
            f"{'; '.join(lines[:MAX_NAMED])}{more}. Every process must run the same code, and give arrays of the same "
            "global shapes"
        )


def _differences(here: Mapping[str, Any], there: Mapping[str, Any], process: int) -> list[str]:
    """Returns how the description of a process (`there`) differs from that of process 0 (`here`)."""

    def changed(level: str, default: Any) -> list[tuple[str, Any, Any]]:
        one, other = here[level], there[level]
        both = [(label, other.get(label, default), one.get(label, default)) for label in {**one, **other}]
        return [(label, b, a) for label, b, a in both if a != b]

    if values := changed("values", "absent"):
        return [f"{label} is {b} in process {process}, {a} in process 0" for label, b, a in values]
    if operations := changed("operations", 0):
        counts = [f"{b} {label} instead of {a}" for label, b, a in sorted(operations)]
        return [
            f"the step has {sum(there['operations'].values())} operations in process {process}, "
            f"{sum(here['operations'].values())} in process 0: {', '.join(counts[:MAX_NAMED])}"
            f"{', ...' * (len(counts) > MAX_NAMED)}"
        ]
    reasons = [_DIGESTS.get(label, f"its {label} are others") for label, *_ in changed("digests", None)]
    return [f"{reason}, in process {process} than in process 0" for reason in reasons]


def program_digest(program: Program) -> str:
    """Returns a digest of everything of a program that must be equal in all processes."""
    buffers = [(b.mesh, str(b.layout), b.shape, str(b.dtype)) for b in program.buffers]
    runs = [(e.name, e.mesh, e.donated_inputs) for e in program.executables]
    moves = [(t.source, t.destination, t.sent_buffers, t.received_buffers) for t in program.transfers]
    parts = (program.submeshes, buffers, runs, moves, program.inputs, program.outputs, program.numbers, *program.lists)
    return hashlib.blake2b("\n".join(map(repr, parts)).encode(), digest_size=16).hexdigest()
