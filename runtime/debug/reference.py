"""Runs a step as written, and looks for the first operation of the planned step that differs (`first_divergence`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.ir.graph import Lit, Traced, walk
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.ir.flow import find_needed, producers
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.stage_graph import Port
from alpa_lite.passes.tracing import calls
from alpa_lite.runtime.debug import first_divergence
from alpa_lite.runtime.debug.first_divergence import Difference, error
from alpa_lite.runtime.meshes import mesh_of, submesh_of
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.stacked import pieces

ROUNDING: Mapping[str, float] = {"float64": 1e-9, "complex128": 1e-9, "float16": 1e-2, "bfloat16": 5e-2}
"""The relative error of leaves that counts as rounding, by dtype; 1e-3 for other dtypes, 5e-2 below 16 bits."""


class NotComparable(Exception):
    """Operations cannot be compared one by one; the message says why."""


class ReferenceRun:
    """The step as written, on the first device.

    Attributes:
      leaves: its flat arguments.
      run: from flat arguments to flat results.
    """

    def __init__(self, traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Args: the step, and its arguments."""
        assert traced.calling is not None
        leaves, _ = calls.flatten_call(traced.calling, args, kwargs)
        self._traced, self.leaves = traced, [_alone(global_array.gather_whole(leaf)) for leaf in leaves]
        self.run: Callable[[Sequence[Any]], list[Any]] = jax.jit(functools.partial(evaluation.evaluate, traced.graph))

    @functools.cached_property
    def results(self) -> list[Any]:
        """The flat results."""
        return self.run(self.leaves)

    def conditioning(self) -> list[float]:
        """The change of each flat result if every float of the arguments changes in the last place.

        The last place is that of the least exact dtype of which the result is made.
        """
        units = [
            max((float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.floating)), default=0.0)
            for dtypes in result_dtypes(self._traced)
        ]
        others = {unit: self.run(self._disturbed_leaves(unit)) for unit in set(units)}
        return [error(others[unit][n], self.results[n]) for n, unit in enumerate(units)]

    def _disturbed_leaves(self, unit: float) -> list[jax.Array]:
        """Returns the arguments with their floats changed by a relative error."""
        rng = np.random.default_rng(0)
        changed = []
        for leaf in self.leaves:
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                signs = jnp.asarray(1 + unit * rng.choice((-1.0, 1.0), leaf.shape), jnp.float32)
                wide = leaf.dtype if leaf.dtype.itemsize > 4 else jnp.float32
                leaf = (leaf.astype(wide) * signs).astype(leaf.dtype)
            changed.append(leaf)
        return changed


def _alone(leaf: Any) -> Any:
    """Returns a leaf whole on the first device of this process, in a buffer of its own if it is a JAX array."""
    if not isinstance(leaf, jax.Array):
        leaf = jnp.asarray(leaf)
    if len(leaf.sharding.device_set) > 1 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = np.asarray(leaf)  # from any set of devices
    return jax.device_put(leaf, jax.local_devices()[0])


def least_exact_tolerance(traced: Traced) -> float:
    """Returns the error that counts as rounding in the least exact dtype that a step computes in."""
    dtypes = {str(v.dtype) for v in traced.graph.values if jnp.issubdtype(v.dtype, jnp.inexact)}
    return max(map(_rounding, dtypes), default=1e-3)


def tolerances(traced: Traced, rtol: float | None = None) -> list[float]:
    """Returns the error that counts as rounding in each flat result: none, if it holds no floats.

    Args:
      rtol: of floats; None for that of the least exact dtype of which the result is made.
    """
    atoms = traced.graph.block.outputs
    dtypes = [atom.aval.dtype if isinstance(atom, Lit) else traced.graph.values[atom].dtype for atom in atoms]
    limits = [max((_rounding(str(d)) for d in made_of), default=1e-3) for made_of in result_dtypes(traced)]
    return [
        (limit if rtol is None else rtol) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
        for dtype, limit in zip(dtypes, limits, strict=True)
    ]


def result_dtypes(traced: Traced) -> list[frozenset[Any]]:
    """Returns the inexact dtypes of the values of which each flat result is made. Loops and branches count whole."""
    values, block = traced.graph.values, traced.graph.block

    def inexact(numbers: Iterable[int]) -> frozenset[Any]:
        return frozenset(d for v in numbers if jnp.issubdtype(d := values[v].dtype, jnp.inexact))

    found = {value: inexact([value]) for value in block.inputs}
    for op in block.ops:
        inside = [value for body in op.bodies for one in walk(body) for value in one.results]
        made_of = inexact([*op.results, *inside]).union(*(found[value] for value in op.reads))
        found.update(dict.fromkeys(op.results, made_of))
    return [found[atom] if isinstance(atom, int) else frozenset() for atom in block.outputs]


def _rounding(dtype: str) -> float:
    return ROUNDING.get(dtype, 5e-2 if "float8" in dtype or "float4" in dtype else 1e-3)


def first_difference(staged: Staged, leaves: Sequence[Any], limit: float) -> Difference | None:
    """Returns the first operation that differs on the inputs that it gets, stage by stage.

    Args:
      leaves: the flat arguments of the user's step, as of a `ReferenceRun`.
      limit: the relative error that counts as rounding.

    Raises:
      NotComparable: the collectives are left to the compiler, or a stage's inputs cannot be found.
    """
    if jax.process_count() > 1:
        raise NotComparable("the values between operations are in several processes; check with the same plan in one")
    if staged.stages[0].communication != "explicit":
        raise NotComparable("communication='compiler' leaves the operations to it")
    is_pipelined = staged.program.schedule != "none"
    known = _values(staged, pieces(staged.traced, leaves)) if is_pipelined else {}
    for number, stage in enumerate(staged.stages):
        mesh, inputs = mesh_of(stage.program.mesh), list(leaves)
        if is_pipelined:
            mesh = submesh_of(staged.program.submeshes[staged.written.mesh_of[number]], jax.devices())
            ports = [(_kind(port), port.number) for port in stage.graph.inputs]
            if missing := next((kind for kind, n in ports if (kind, n) not in known), None):
                raise NotComparable(f"stage {number} reads a value that the step as written does not have ({missing})")
            inputs = [known[port] for port in ports]
        if mesh.size > 1:  # else it runs as it is written
            traced = stage.graph.traced
            found = first_divergence.first_difference(
                stage.program, traced, mesh, [*inputs, *traced.graph.constants], limit
            )
            if found is not None:
                return replace(found, stage=number if is_pipelined else -1)
    return None


def _kind(port: Port) -> str:
    """Returns the kind of value at a port; a copy of an argument is one."""
    return "argument" if port.kind == "copy" else port.kind


def _values(staged: Staged, leaves: Sequence[Any]) -> dict[tuple[str, int], Any]:
    """(port kind, number) -> value, on one device: arguments, values of the loop stacked over micro-batches, and values
    of the update."""
    graph, ports = staged.traced.graph, [port for stage in staged.stages for port in stage.graph.inputs]
    wanted = {(port.kind, port.number) for port in ports}
    (op,) = (op for op in graph.block.ops if op.index == staged.loop.scan)

    def run(leaves: Sequence[Any]) -> dict[tuple[str, int], Any]:
        found: dict[tuple[str, int], Any] = {}

        def loop(*operands: Any) -> list[Any]:
            inside = [number for kind, number in sorted(wanted) if kind == "crossing"]
            results, stacked = _micro_batches(ScanView(op), operands, inside)
            found.update({("crossing", number): value for number, value in stacked.items()})
            return results

        def keep(value: int, array: Any) -> Any:
            if ("late", value) in wanted:
                found["late", value] = array
            return array

        evaluation.evaluate(graph, leaves, place=keep, own={staged.loop.scan: loop})
        return found

    found = {("argument", i): leaf for i, leaf in enumerate(leaves)} | jax.jit(run)(leaves)
    while any(_exchanged(stage, found) for stage in staged.stages):
        pass
    return found


def _exchanged(stage: PlannedStage, known: dict[tuple[str, int], Any]) -> bool:
    """Adds the late results of a stage that follow from known values, such as its summand of a sum over stages.

    Returns:
      Whether there were any.
    """
    traced = stage.graph.traced
    block, values = traced.graph.block, traced.graph.values
    ports = [(_kind(port), port.number) for port in stage.graph.inputs]
    missing = {v for v, port in zip(block.inputs, ports, strict=False) if port not in known}
    makers = producers(block.ops)
    wanted = {
        ("late", port.number): number
        for number, (port, atom) in enumerate(zip(stage.graph.outputs, block.outputs, strict=True))
        if port.kind == "late" and ("late", port.number) not in known and isinstance(atom, int)
        and missing.isdisjoint(find_needed([atom], makers))
    }  # fmt: skip
    if not wanted:
        return False
    inputs = [
        jnp.zeros(values[v].shape, values[v].dtype) if v in missing else known[port]
        for v, port in zip(block.inputs, ports, strict=False)
    ]

    def run(inputs: Sequence[Any]) -> list[Any]:
        outputs = evaluation.evaluate(traced.graph, inputs)
        return [outputs[number] for number in wanted.values()]

    known.update(zip(wanted, jax.jit(run)(inputs), strict=True))
    return True


def _micro_batches(view: ScanView, operands: Sequence[Any], wanted: Sequence[int]) -> tuple[list[Any], dict[int, Any]]:
    """Returns the results of the loop over micro-batches, and some values of its body, stacked."""
    consts, start, xs = view.split_operands(operands)
    made = set(wanted) & {v for op in view.body.ops for v in op.results}

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        env: dict[int, Any] = {}

        def place(value: int, array: Any) -> Any:
            if value in made:
                env[value] = array
            return array

        out = view.split_results(evaluation.evaluate_block(view.body, [*consts, *carry, *xs], place))
        return out.carry, (out.ys, env)

    carry, (ys, stacked) = jax.lax.scan(step, start, xs, length=view.length, reverse=view.op.params["reverse"])
    return [*carry, *ys], stacked
