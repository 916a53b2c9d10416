"""Descriptions of a traced step and of a written program, equal in every process that has the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import plan_cache
from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import ProcessError
from alpa_lite.paths import shown
from alpa_lite.program import Program

MAX_NAMED = 3
"""The most differences that a message names."""

_DIGESTS = {
    "program": "the step has the same operations, in another order or with other parameters",
    "constants": "arrays that the step closes over have other values",
    "options": "the options of parallelize are others",
    "cluster": "the clusters are others",
    "like": "the steps of like= have other plans",
    "pins": "the arguments are placed otherwise",
}


def describe_step(step: Step, request: PlanRequest) -> dict[str, dict[str, Any]]:
    """Returns a description of the traced step, as JSON values in levels: if one differs, the next ones are not named.

    `values` has the versions, the number of devices, and the type of each flat argument by its path; `operations` the
    number of operations of each name, those of loop bodies included; `digests` all else that the plan depends on.
    """
    graph = step.traced.graph
    digests = {**plan_cache.key_of(step, request), "constants": _digest_constants(graph.constants)}
    types = [f"{graph.values[n].dtype}{list(graph.values[n].shape)}" for n in graph.block.inputs]
    return {
        "values": {
            "JAX": digests.pop("jax"),
            "alpa_lite": digests.pop("alpa_lite"),
            "number of devices": jax.local_device_count(),
            **{shown(a.path): t for a, t in zip(step.traced.arguments, types, strict=False)},
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
    return [
        f"{_DIGESTS.get(label, f'its {label} are others')}, in process {process} than in process 0"
        for label, *_ in changed("digests", None)
    ]


def program_digest(program: Program) -> str:
    """Returns a digest of everything of a program that must be equal in all processes."""
    hashed = hashlib.blake2b(digest_size=16)
    buffers = [(b.mesh, str(b.layout), b.shape, str(b.dtype)) for b in program.buffers]
    runs = [(e.name, e.mesh, e.donated) for e in program.executables]
    moves = [(t.source, t.destination, t.sent, t.received) for t in program.transfers]
    for part in (program.submeshes, buffers, runs, moves, program.inputs, program.outputs, program.numbers):
        hashed.update(repr(part).encode())
    for items in program.lists:
        hashed.update("\n".join(map(repr, items)).encode())
    return hashed.hexdigest()


def _digest_constants(constants: Sequence[Any]) -> str:
    """Returns a digest of the values of arrays that are here whole; of others, of their types alone."""
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
