"""Runs a step as an `Assignment` says, without devices: what is read before it is made is a KeyError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Lit, Op
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.layers.types import Assignment, Layering


def run(layering: Layering, assignment: Assignment, leaves: Sequence[Any]) -> list[Any]:
    """The step's outputs.

    For each micro-batch: what is shared, forward by rising stage, backward by falling stage, weights by falling stage.
    """
    traced, scan, body = layering.traced, layering.scan_op, layering.body
    top = traced.graph.block
    env: dict[int, Any] = dict(zip(top.inputs, [*leaves, *traced.graph.constants], strict=True))
    at = top.ops.index(scan)
    _run(top.ops[:at], env)
    consts, carries = scan.params["num_consts"], scan.params["num_carry"]
    operands = [_read(a, env) for a in scan.operands]
    split = dict(assignment.split_sums)
    initial = list(operands[consts : consts + carries])
    partial = {f"{number} {s}": jnp.zeros_like(initial[number]) for number, parts in split.items() for _, s in parts}

    def step(state: Any, xs: Any) -> Any:
        carry, partial = state
        inner = dict(zip(body.inputs, [*operands[:consts], *carry, *xs], strict=True))
        for ops in tasks(layering, assignment):
            _run(ops, inner)
        partial = dict(partial)
        for number, parts in split.items():
            for value, stage in parts:
                partial[f"{number} {stage}"] += inner[value]
        carry = [c if n in split else _read(body.outputs[n], inner) for n, c in enumerate(carry)]
        return (carry, partial), [_read(atom, inner) for atom in body.outputs[carries:]]

    (carry, partial), stacked = lax.scan(step, (initial, partial), operands[consts + carries :], scan.params["length"])
    for name, total in partial.items():
        carry[int(name.split()[0])] += total
    env.update(zip(scan.results, [*carry, *stacked], strict=True))
    _run(top.ops[at + 1 :], env)
    return [_read(atom, env) for atom in top.outputs]


def tasks(layering: Layering, assignment: Assignment) -> list[list[Op]]:
    """The body's ops as tasks: shared, then forward, backward and weight of each stage."""
    stages = range(assignment.num_stages)
    found: dict[Any, list[Op]] = {}
    for op in layering.body.ops:
        index = op.index
        if index in assignment.dissolved:
            continue
        stage = assignment.stage[index]
        kind = (
            "shared"
            if index in assignment.shared
            else ("weight", stage)
            if index in assignment.weight
            else ("backward", stage)
            if index in assignment.backward
            else ("forward", stage)
        )
        found.setdefault(kind, []).append(op)
    order = ["shared", *(("forward", s) for s in stages)]
    order += [(kind, s) for kind in ("backward", "weight") for s in reversed(stages)]
    return [found.get(kind, []) for kind in order]


def _run(ops: Sequence[Op], env: dict[int, Any]) -> None:
    for op in ops:
        results = evaluation.bind(op, [_read(atom, env) for atom in op.operands])
        env.update(zip(op.results, results, strict=True))


def _read(atom: int | Lit, env: dict[int, Any]) -> Any:
    return atom.value if isinstance(atom, Lit) else env[atom]
