"""Process 0 plans, and all processes take its plan, once they know that they run the same step.

A planning has a number, the same in every process, and goes in three rounds:

1. *The same?* Every process tells what it traced (`Description`); process 0 compares, and tells the verdict.
2. *The plan.* Process 0 plans, or finds the plan in its cache, and tells it; the others replay it, without solving.
3. *Ready?* Every process tells the digest of the program that it has written from the plan; process 0 compares again.

An error of any process, in any round, is told in place of what the others wait for, so that all raise. Waiting for a
process is bounded (`store.timeout`); waiting for the plan itself is not: planning takes what it takes, and a process 0
that has died takes the store with it, which is an error.

A process that does not plan what the others plan (its batch has another shape, its code another branch) does not come
to the first round: the others say so when their time is up.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import errors, plan_cache
from alpa_lite.asked import PlanRequest, Step
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, ProcessError
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.paths import shown
from alpa_lite.plan import Plan
from alpa_lite.processes.alarm import alarm
from alpa_lite.processes.missing import check_joined
from alpa_lite.processes.store import VARIABLE, Store, timeout
from alpa_lite.program import Program

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMED = 3
"""The most differences of one kind that a message names."""

MARGIN = 15.0
"""Seconds that the others wait for process 0 longer than it waits for them, so that it can say who is missing."""


@dataclass(frozen=True)
class Description:
    """What a process traced, as text that is equal in every process that traced the same.

    Attributes:
      key: what the plan depends on (`plan_cache.key_of`), and the values of closed-over constants.
      arguments: path and type of each flat argument.
      operations: how many there are of each name, those within loops included.
      devices: of this process.
    """

    key: Mapping[str, str]
    arguments: tuple[tuple[str, str], ...]
    operations: Mapping[str, int]
    devices: int

    @classmethod
    def of(cls, step: Step, asked: PlanRequest) -> Description:
        """That of a traced step."""
        graph = step.traced.graph
        types = [f"{graph.values[n].dtype}{list(graph.values[n].shape)}" for n in graph.block.inputs]
        return cls(
            {**plan_cache.key_of(step, asked), "constants": _digest_of(graph.constants)},
            tuple((shown(a.path), t) for a, t in zip(step.traced.arguments, types, strict=False)),
            dict(Counter(op.name for op in graph.ops())),
            jax.local_device_count(),
        )


def differences(here: Description, there: Description, process: int) -> list[str]:
    """What process `process` (`there`) has otherwise than process 0 (`here`), in words; [] if it is the same."""
    found = [
        f"{what} {there.key[part]} in process {process}, {here.key[part]} in process 0"
        for part, what in (("jax", "JAX is"), ("alpa_lite", "alpa_lite is"))
        if here.key[part] != there.key[part]
    ]
    if here.devices != there.devices:
        found.append(f"process {process} has {there.devices} devices, process 0 has {here.devices}")
    types = dict(here.arguments), dict(there.arguments)
    other = [path for path in types[0] if path in types[1] and types[0][path] != types[1][path]]
    found += [
        f"{path} is {types[1][path]} in process {process}, {types[0][path]} in process 0" for path in other[:NAMED]
    ]
    if len(other) > NAMED:
        found.append(f"{len(other) - NAMED} more arguments have other types")
    for one, another, where in ((0, 1, "0"), (1, 0, str(process))):
        alone = [path for path in types[one] if path not in types[another]]
        if alone:
            more = f" and {len(alone) - NAMED} more" if len(alone) > NAMED else ""
            found.append(f"only process {where} has {', '.join(alone[:NAMED])}{more}")
    if found:
        return found
    if here.operations != there.operations:
        counts = sum(there.operations.values()), sum(here.operations.values())
        names = sorted(set(here.operations) | set(there.operations))
        changed = [
            f"{there.operations.get(name, 0)} {name} instead of {here.operations.get(name, 0)}"
            for name in names if here.operations.get(name, 0) != there.operations.get(name, 0)
        ]  # fmt: skip
        return [
            f"the step has {counts[0]} operations in process {process}, {counts[1]} in process 0: "
            f"{', '.join(changed[:NAMED])}{', ...' if len(changed) > NAMED else ''}"
        ]
    parts = [part for part in here.key if here.key[part] != there.key.get(part)]
    said = {
        "program": "the step has the same operations, in another order or with other parameters",
        "constants": "arrays that the step closes over have other values",
        "options": "the options of parallelize are others",
        "cluster": "the clusters are others",
        "like": "the steps of like= have other plans",
        "pins": "the arguments lie elsewhere",
    }
    return [f"{said.get(part, f'its {part} are others')}, in process {process} than in process 0" for part in parts]


class Alone:
    """A planning of one process, which asks nobody."""

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Within it, an error is told to the other processes."""
        yield

    def plan(
        self, step: Step, asked: PlanRequest, make: Callable[[], tuple[Plan, Staged]], take: Callable[[Plan], Staged]
    ) -> tuple[Plan, Staged]:
        """The plan, and the step in its stages; see `Agreement.plan`."""
        return make()


class Agreement(Alone):
    """A planning of all processes. Each makes one for each planning, in the same order."""

    def __init__(self, name: str) -> None:
        """Args:
        name: of the step.
        """
        self._name = name
        self._number = next(_plannings)
        self._store = Store(f"plan/{self._number}")
        self._process, self._count = jax.process_index(), jax.process_count()
        self._turn = alarm.plans()
        self._round = 0

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Within it, an error is told to the other processes: in place of what they wait for from this one."""
        try:
            yield
        except ProcessError:
            raise  # all know
        except Exception as error:
            key = f"from 0/{self._round}" if self._process == 0 else f"from {self._process}/{self._round}"
            self._store.put(key, json.dumps({"error": _named(error)}))
            raise

    def plan(
        self, step: Step, asked: PlanRequest, make: Callable[[], tuple[Plan, Staged]], take: Callable[[Plan], Staged]
    ) -> tuple[Plan, Staged]:
        """The plan, and the step in its stages.

        Args:
          step, asked: what this process traced, and its request.
          make: plans; process 0 alone calls it.
          take: divides the step as a plan says; the others call it.

        Raises:
          ProcessError: the processes do not trace the same step, or one did not come in time.
          AlpaLiteError: what process 0 raised.
        """
        mine = Description.of(step, asked)
        self._agree(asdict(mine), lambda all_: _unequal(all_, self._name))
        if self._process == 0:
            plan, staged = make()
            self._tell({"plan": plan.to_json()})
            self._round += 1
        else:
            plan = Plan.from_json(self._hear(math.inf)["plan"], "the plan of process 0")
            self._round += 1
            staged = take(plan)
        program = program_digest(staged.program)
        self._agree(program, lambda all_: _unlike(all_, self._name))
        logger.info("%s: %s processes run the plan of process 0", self._name, self._count)
        return plan, staged

    def _agree(self, mine: Any, compare: Callable[[Sequence[Any]], str]) -> None:
        """Tells what this process has; process 0 compares what all have, and all raise what it finds."""
        if self._process:
            self._tell({"value": mine})
            self._hear(timeout() + MARGIN)
        else:
            try:
                wrong = compare([json.loads(json.dumps(mine)), *map(self._answer, range(1, self._count))])
            except ProcessError as error:
                wrong = str(error)
            self._tell({"wrong": wrong} if wrong else {})
            if wrong:
                raise ProcessError(wrong)
        self._round += 1

    def _answer(self, process: int) -> Any:
        """What another process told in this round. Process 0 asks."""
        text = self._get(process, timeout())
        if text is None:
            raise ProcessError(
                f"process {process} did not come to plan {self._name} (planning {self._number} of the program) within "
                f"{timeout():g} s: it may run other code, call the step with other shapes, or only be slow; raise "
                f"{VARIABLE} if it needs longer"
            )
        found = json.loads(text)
        if "error" in found:
            raise ProcessError(f"planning {self._name} failed in process {process}: {': '.join(found['error'])}")
        return found["value"]

    def _tell(self, found: dict[str, Any]) -> None:
        self._store.put(f"from {self._process}/{self._round}", json.dumps(found))

    def _get(self, process: int, seconds: float) -> str | None:
        """What another process told in this round; None if it does not in time."""
        check = functools.partial(alarm.check_others_plan, self._turn, self._name)
        return self._store.get(f"from {process}/{self._round}", seconds, check)

    def _hear(self, seconds: float) -> dict[str, Any]:
        """What process 0 told in this round."""
        text = self._get(0, seconds)
        if text is None:
            raise ProcessError(
                f"process 0 did not come to plan {self._name} (planning {self._number} of the program) within "
                f"{seconds:g} s, but process {self._process} does: process 0 may run other code, or be called with "
                f"other shapes than this process; raise {VARIABLE} if it needs longer"
            )
        found = json.loads(text)
        if "error" in found:
            kind, message = found["error"]
            raise _raised(kind)(f"process 0: {message}")
        if "wrong" in found:
            raise ProcessError(found["wrong"])
        return found


_plannings = itertools.count()
_clusters = itertools.count()


def together(name: str) -> Alone:
    """How a step is planned that all processes call: with the others, if there are any.

    Raises:
      ProcessError: this is one process of several, but it has not joined the others.
    """
    if jax.process_count() > 1:
        alarm.start()
        return Agreement(name)
    check_joined(name)
    return Alone()


def agreed_cluster(here: Cluster) -> Cluster:
    """The cluster that all processes plan for: what each sees, with the least memory that one of them has.

    Raises:
      ProcessError: the processes see different machines, or one did not come in time.
    """
    if jax.process_count() == 1:
        return here
    store = Store(f"cluster/{next(_clusters)}")
    mine, process = json.dumps(here.to_json()), jax.process_index()
    if process:
        store.put(f"from {process}", mine)
        text = store.get("agreed", timeout() + MARGIN)
        if text is None:
            raise ProcessError(f"process 0 did not describe its devices within {timeout() + MARGIN:g} s")
    else:
        text = _merged(store, here)
        store.put("agreed", text)
    found = json.loads(text)
    if "wrong" in found:
        raise ProcessError(found["wrong"])
    return Cluster.from_json(found)


def _merged(store: Store, here: Cluster) -> str:
    """The cluster of all processes as JSON, or what is wrong. Process 0 asks."""
    least = here
    for other in range(1, jax.process_count()):
        text = store.get(f"from {other}", timeout())
        if text is None:
            wrong = (
                f"process {other} did not describe its devices within {timeout():g} s; raise {VARIABLE} if it is slow"
            )
            return json.dumps({"wrong": wrong})
        there = Cluster.from_json(json.loads(text))
        fields = here.to_json(), there.to_json()
        unlike = [name for name in fields[0] if fields[0][name] != fields[1][name] and name in _OF_THE_MACHINE]
        if unlike:
            said = ", ".join(f"{name} is {fields[1][name]!r} and not {fields[0][name]!r}" for name in unlike)
            return json.dumps({"wrong": f"process {other} sees another machine than process 0: {said}; give cluster="})
        least = replace(least, memory=min(least.memory, there.memory))
    return json.dumps(least.to_json())


_OF_THE_MACHINE = ("device", "platform", "devices_per_node", "nodes", "topology", "devices_per_card")
"""Fields of a cluster that processes must agree in. Rates may differ, and those of process 0 count."""


def program_digest(program: Program) -> str:
    """A digest of everything of a program that processes must agree in, equal in every process."""
    hashed = hashlib.blake2b(digest_size=16)
    buffers = [(b.mesh, str(b.layout), b.shape, str(b.dtype)) for b in program.buffers]
    runs = [(e.name, e.mesh, e.donated) for e in program.executables]
    moves = [(t.source, t.destination, t.sent, t.received) for t in program.transfers]
    for part in (program.submeshes, buffers, runs, moves, program.inputs, program.outputs, program.numbers):
        hashed.update(repr(part).encode())
    for items in program.lists:
        hashed.update("\n".join(map(repr, items)).encode())
    return hashed.hexdigest()


def _unequal(descriptions: Sequence[Mapping[str, Any]], name: str) -> str:
    """What the processes have otherwise than process 0, in words; "" if all trace the same."""
    first, *others = [
        Description(d["key"], tuple((p, t) for p, t in d["arguments"]), d["operations"], d["devices"])
        for d in descriptions
    ]
    found = [differences(first, other, number) for number, other in enumerate(others, 1)]
    wrong = [line for lines in found for line in lines]
    if not wrong:
        return ""
    count = sum(map(bool, found))
    more = f" ({len(wrong) - NAMED} more differences, in {count} processes)" if len(wrong) > NAMED else ""
    return (
        f"the processes do not call {name} with the same step and arguments, so nothing has run: "
        f"{'; '.join(wrong[:NAMED])}{more}. Every process must run the same code, and give arrays of the same global "
        "shapes"
    )


def _unlike(digests: Sequence[str], name: str) -> str:
    wrong = [str(number) for number, one in enumerate(digests) if one != digests[0]]
    return (
        f"{name}: processes {', '.join(wrong)} write another program from the plan of process 0 than it does, so "
        "nothing has run; all must have the same versions of Python, NumPy and JAX"
        if wrong else ""
    )  # fmt: skip


def _digest_of(constants: Sequence[Any]) -> str:
    """A digest of the values of arrays that are here whole; of others their types alone."""
    hashed = hashlib.blake2b(digest_size=16)
    for constant in constants:
        hashed.update(f"{getattr(constant, 'dtype', type(constant))}{getattr(constant, 'shape', ())}".encode())
        if isinstance(constant, jax.Array):
            if not constant.is_fully_addressable:
                continue
            if jnp.issubdtype(constant.dtype, jax.dtypes.extended):
                constant = jax.random.key_data(constant)
        hashed.update(np.ascontiguousarray(np.asarray(constant)).tobytes())
    return hashed.hexdigest()


def _named(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _raised(kind: str) -> Callable[[str], Exception]:
    """The class of an error that process 0 raised: one of ours by its name, else `ProcessError`."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, AlpaLiteError):
        return found
    return lambda message: ProcessError(message.replace("process 0:", f"process 0: {kind}:", 1))
