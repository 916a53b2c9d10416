"""Descriptions of a traced step and of a written program, equal in every process that has the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
"""The most differences of one kind that a message names."""

_KEY_MESSAGES = {
    "program": "the step has the same operations, in another order or with other parameters",
    "constants": "arrays that the step closes over have other values",
    "options": "the options of parallelize are others",
    "cluster": "the clusters are others",
    "like": "the steps of like= have other plans",
    "pins": "the arguments are placed otherwise",
}


def describe_step(step: Step, request: PlanRequest) -> dict[str, Any]:
    """Returns what a process traced, as JSON values.

    `key` has what the plan depends on (`plan_cache.key_of`) and the values of closed-over constants; `arguments` the
    type of each flat argument by its path; `operations` the number of operations of each name, those of loop bodies
    included; `devices` the number of devices of this process.
    """
    graph = step.traced.graph
    types = [f"{graph.values[n].dtype}{list(graph.values[n].shape)}" for n in graph.block.inputs]
    return {
        "key": {**plan_cache.key_of(step, request), "constants": _digest_constants(graph.constants)},
        "arguments": {shown(a.path): t for a, t in zip(step.traced.arguments, types, strict=False)},
        "operations": Counter(op.name for op in graph.ops()),
        "devices": jax.local_device_count(),
    }


def check_same_step(descriptions: Sequence[Mapping[str, Any]], name: str) -> None:
    """Raises ProcessError unless all processes trace the same step.

    Args:
      descriptions: of `describe_step`, by process.
      name: of the step.
    """
    found = [list(_differences(descriptions[0], other, p)) for p, other in enumerate(descriptions)]
    lines = [line for lines in found for line in lines]
    if lines:
        count = sum(map(bool, found))
        more = f" ({len(lines) - MAX_NAMED} more differences, in {count} processes)" if len(lines) > MAX_NAMED else ""
        raise ProcessError(
            f"the processes do not call {name} with the same step and arguments, so nothing has run: "
            f"{'; '.join(lines[:MAX_NAMED])}{more}. Every process must run the same code, and give arrays of the same "
            "global shapes"
        )


def _differences(here: Mapping[str, Any], there: Mapping[str, Any], process: int) -> Iterable[str]:
    """Returns how the description of a process (`there`) differs from that of process 0 (`here`).

    The first of these levels that differs: versions, devices and arguments; operations; parts of the key.
    """
    keys = here["key"], there["key"]
    found = [
        f"{package} is {keys[1][part]} in process {process}, {keys[0][part]} in process 0"
        for part, package in (("jax", "JAX"), ("alpa_lite", "alpa_lite")) if keys[0][part] != keys[1][part]
    ]  # fmt: skip
    if here["devices"] != there["devices"]:
        found.append(f"process {process} has {there['devices']} devices, process 0 has {here['devices']}")
    found += _argument_differences(here["arguments"], there["arguments"], process)
    if found:
        return found
    if here["operations"] != there["operations"]:
        return [_operation_difference(here["operations"], there["operations"], process)]
    return [
        f"{_KEY_MESSAGES.get(part, f'its {part} are others')}, in process {process} than in process 0"
        for part in keys[0] if keys[0][part] != keys[1].get(part)
    ]  # fmt: skip


def _argument_differences(here: Mapping[str, str], there: Mapping[str, str], process: int) -> list[str]:
    changed = [path for path in here if path in there and here[path] != there[path]]
    found = [f"{path} is {there[path]} in process {process}, {here[path]} in process 0" for path in changed[:MAX_NAMED]]
    if len(changed) > MAX_NAMED:
        found.append(f"{len(changed) - MAX_NAMED} more arguments have other types")
    for one, other, owner in ((here, there, 0), (there, here, process)):
        alone = [path for path in one if path not in other]
        if alone:
            found.append(f"only process {owner} has {_listed(alone, ' and {} more')}")
    return found


def _operation_difference(here: Mapping[str, int], there: Mapping[str, int], process: int) -> str:
    changed = [
        f"{there.get(name, 0)} {name} instead of {here.get(name, 0)}"
        for name in sorted({*here, *there}) if here.get(name, 0) != there.get(name, 0)
    ]  # fmt: skip
    return (
        f"the step has {sum(there.values())} operations in process {process}, {sum(here.values())} in process 0: "
        f"{_listed(changed, ', ...')}"
    )


def _listed(items: Sequence[str], more: str) -> str:
    rest = len(items) - MAX_NAMED
    return ", ".join(items[:MAX_NAMED]) + (more.format(rest) if rest > 0 else "")


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
