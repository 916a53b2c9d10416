"""An evaluator of a `Graph`: the executable definition of the program that passes work on.

    evaluate(graph, leaves) computes exactly what the traced function computes, bit for bit.

A plain op is its primitive bound to its operands. Control flow goes through `jax.lax` over evaluated bodies. Under
`jax.jit` the evaluator re-emits the program, with the name stack and the source line of every op: the lowering uses
the same `bind`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Block, Graph, Lit, Op
from alpa_lite.passes.ir.loops import ScanView, WhileView

Place = Callable[[int, Any], Any]
"""A function of a value's number and its array, called once it is computed; its result takes the array's place."""


Replacements = Mapping[int, Callable[..., Sequence[Any]]]
"""Functions to call with the operands of some ops, by op index, in place of binding their primitives."""
NOTHING: Replacements = MappingProxyType({})

UNKNOWN_TRIPS = "unknown_trips"
"""The scope of every `while`: plans count its iterations once, and so does who reads the lowered program."""


def evaluate(
    graph: Graph,
    leaves: Sequence[Any],
    constants: Sequence[Any] | None = None,
    place: Place | None = None,
    own: Replacements = NOTHING,
) -> list[Any]:
    """Returns the flat outputs of a graph.

    Args:
      graph: the program.
      leaves: one array for each argument, as in `Traced.arguments`.
      constants: in place of the graph's own.
      place: applied to every result, such as to constrain its sharding.
      own: for ops that are computed in a way of their own.

    Returns:
      One array for each output of the block.
    """
    constants = graph.constants if constants is None else constants
    return evaluate_block(graph.block, [*leaves, *constants], place, own)


def evaluate_block(
    block: Block, inputs: Sequence[Any], place: Place | None = None, own: Replacements = NOTHING
) -> list[Any]:
    """Returns the outputs of one block; `inputs` are arrays or tracers, one for each input of the block."""
    env: dict[int, Any] = dict(zip(block.inputs, inputs, strict=True))

    def read(atom: int | Lit) -> Any:
        return atom.value if isinstance(atom, Lit) else env[atom]

    last = find_last_uses(block)
    for op in block.ops:
        results = bind(op, [read(atom) for atom in op.operands], place, own)
        for value, result in zip(op.results, results, strict=True):
            env[value] = result if place is None else place(value, result)
        for value in last.get(op.index, ()):
            del env[value]  # so that an evaluation outside jit frees what is dead
    return [read(atom) for atom in block.outputs]


def bind(op: Op, operands: Sequence[Any], place: Place | None = None, own: Replacements = NOTHING) -> list[Any]:
    """Emits one op: its results, under its own name stack and source line.

    Args:
      op: any op, control flow included.
      operands: one array or tracer for each operand, literals included.
      place: as for `evaluate`, for the ops inside control flow.
      own: as for `evaluate`.
    """
    if op.index in own:
        return list(own[op.index](*operands))
    if not op.bodies:
        return _jax.emit(op.primitive, op.params, op.source, op.ctx, operands)
    bodies = [functools.partial(evaluate_block, body, place=place, own=own) for body in op.bodies]
    with _jax.equation_scope(op.source):
        return control_flow(op, operands, bodies)


def control_flow(op: Op, operands: Sequence[Any], bodies: Sequence[Callable[[Sequence[Any]], list[Any]]]) -> list[Any]:
    """Emits a scan, while or cond whose bodies are given as functions from a list of inputs to a list of outputs."""
    match op.name:
        case "scan":
            view = ScanView(op)
            consts, start, xs = view.split_operands(operands)

            def step(carry: Any, xs: Any) -> tuple[Any, Any]:
                out = view.split_results(bodies[0]([*consts, *carry, *xs]))
                return out.carry, out.ys

            options = {name: op.params[name] for name in ("reverse", "unroll")}
            carry, ys = lax.scan(step, start, xs, length=view.length, **options)
            return [*carry, *ys]
        case "while":
            cond_consts, body_consts, start = WhileView(op).split_operands(operands)
            with jax.named_scope(UNKNOWN_TRIPS):
                return lax.while_loop(
                    lambda carry: bodies[0]([*cond_consts, *carry])[0],
                    lambda carry: bodies[1]([*body_consts, *carry]),
                    list(start),
                )
        case "cond":
            branches = [lambda *inputs, body=body: body(inputs) for body in bodies]
            platforms = op.params.get("branches_platforms")
            if platforms is not None:  # JAX lowers the branch of the platform alone, and knows it by its name
                named = {p: b for some, b in zip(platforms, branches, strict=True) for p in some or ("default",)}
                return list(lax.platform_dependent(*operands[1:], **{"default": None, **named}))
            return list(lax.switch(operands[0], branches, *operands[1:]))
    raise AssertionError(f"op {op.name} has bodies")


def find_last_uses(block: Block) -> dict[int, list[int]]:
    """Returns the values that nothing reads after each op, by its index; outputs are never among them."""
    seen = {atom for atom in block.outputs if isinstance(atom, int)}
    last: dict[int, list[int]] = {}
    for op in reversed(block.ops):
        dead = [
            atom for atom in dict.fromkeys((*op.operands, *op.results)) if isinstance(atom, int) and atom not in seen
        ]
        seen.update(dead)
        last[op.index] = dead
    return last
