"""Process 0 plans, and all processes take its plan, once they know that they run the same step.

Three rounds of one `channel.Collective`:

1. `step`: process 0 compares what every process traced (`step_description`).
2. `plan`: process 0 plans, or finds the plan in its cache, and broadcasts it; the others replay it, without solving.
3. `program`: process 0 compares the digests of the programs that the processes have written from the plan.

An error of any process, in any round, is raised by all. Waiting for a process is bounded; waiting for the plan is not:
planning takes what it takes, and a process 0 that has died takes the store with it, which is an error. A process that
goes on without planning, since its arguments have not changed, is noticed by the call log (`divergence`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.cluster import Cluster
from alpa_lite.errors import ProcessError
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan import Plan
from alpa_lite.processes.channel import Collective
from alpa_lite.processes.failure_propagation import monitor
from alpa_lite.processes.initialization import check_joined
from alpa_lite.processes.step_description import check_same_step, describe_step, program_digest

logger = logging.getLogger(__name__)

_MACHINE_FIELDS = ("device", "platform", "devices_per_node", "nodes", "topology", "devices_per_card")
"""Fields of a cluster that must be equal in all processes. Rates may differ, and those of process 0 count."""


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
        if self.count > 1:
            monitor.start()
            self._point = monitor.announce_planning()
        elif shared:
            check_joined(name)

    def check_peers(self) -> None:
        """Raises ProcessError if another process passed this point of the program without planning."""
        monitor.check_not_passed(self._point, self._name)

    def plan(
        self, step: Step, request: PlanRequest, make: Callable[[], tuple[Plan, Staged]],
        replay: Callable[[Plan], Staged],
    ) -> tuple[Plan, Staged]:  # fmt: skip
        """Returns the plan of process 0, and the step divided by it.

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
        planned: list[tuple[Plan, Staged]] = []

        def make_plan() -> Any:
            """Plans, and returns the plan as JSON values."""
            planned.append(make())
            return planned[0][0].to_json()

        def replay_plan() -> str:
            """Replays the broadcast plan, and returns the digest of the program."""
            if not planned:
                plan = Plan.from_json(data, "the plan of process 0")
                planned.append((plan, replay(plan)))
            return program_digest(planned[0][1].program)

        self.gather("step", lambda: describe_step(step, request), lambda found: check_same_step(found, self._name))
        data = self.broadcast("plan", make_plan, math.inf)
        self.gather("program", replay_plan, self._check_digests)
        logger.info("%s: %s processes run the plan of process 0", self._name, self.count)
        return planned[0]

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
    """Returns the first of some clusters as JSON values, with the least memory."""
    first = clusters[0]
    for process, other in enumerate(clusters):
        unlike = [name for name in _MACHINE_FIELDS if first[name] != other[name]]
        if unlike:
            fields = ", ".join(f"{name} is {other[name]!r} and not {first[name]!r}" for name in unlike)
            raise ProcessError(f"process {process} sees another machine than process 0: {fields}; give cluster=")
    return first | {"memory": min(other["memory"] for other in clusters)}
