"""Constraints on outputs of the step and of its scopes: each becomes a `_jax.CONSTRAINT` in the graph.

A scope, which `constrain=` names, is a path of names as Flax modules and `jax.named_scope` give them: `Net/h_0/mlp`.
Its output is the last value that one of its forward operations makes, that another scope's forward operation or a
result of the step reads, and that has as many dims as the spec has entries. If a scope is entered several times, that
is the output of the last time. All that reads the value afterwards reads it as constrained.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Atom, Block, Graph, Op
from alpa_lite.passes.ir import flow
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.pruning import renumber
from alpa_lite.passes.ir.rewriting import Rewriter, rename_atom, rename_op
from alpa_lite.passes.tracing.placements import GivenPlacement, spec_dims, spec_text

Scope = tuple[str, ...]


def constrain_scopes(graph: Graph, specs: Mapping[str, PartitionSpec]) -> Graph:
    """Returns the graph with a constraint on the output of each scope that a glob names.

    Args:
      specs: glob on scopes, written with slashes -> spec.

    Raises:
      OptionError: a glob names no scope, or none of its values fits the spec.
    """
    if not specs:
        return graph
    work = _Constrainer(graph, specs)
    block = work.block(graph.block, (), True)
    for glob, spec in specs.items():
        if glob not in work.used:
            raise OptionError(_unused_message(glob, spec, work.seen))
    return renumber(replace(graph, values=tuple(work.rewriter.values), block=block))


def constrain_results(graph: Graph, given: Mapping[int, GivenPlacement], paths: Sequence[str]) -> Graph:
    """Returns the graph with a constraint on each output for which a sharding is given, by its number."""
    if all(one is None for one in given.values()):
        return graph
    rewriter, makers = Rewriter(graph), flow.producers(graph.block.ops)
    ops, outputs = list(graph.block.ops), list(graph.block.outputs)
    for number, one in given.items():
        value = outputs[number]
        if one is None or not isinstance(value, int) or value not in makers:
            continue
        dims = spec_dims("out_shardings", one, len(graph.values[value].shape), paths[number])
        mesh = (tuple(one.mesh.axis_sizes), tuple(one.mesh.axis_names)) if isinstance(one, NamedSharding) else None
        params = {"dims": dims, "mesh": mesh, "why": f"out_shardings={spec_text(one)}"}
        ops.append(_constraint(rewriter, params, value, makers[value]))
        (outputs[number],) = ops[-1].results
    block = replace(graph.block, ops=tuple(ops), outputs=tuple(outputs))
    return renumber(replace(graph, values=tuple(rewriter.values), block=block))


def _constraint(rewriter: Rewriter, params: Mapping[str, Any], value: int, maker: Op) -> Op:
    """Returns the constraint on a value that an operation makes."""
    return rewriter.op(_jax.CONSTRAINT, params, [value], [rewriter.new_value(value)], maker.source, ctx=maker.ctx)


class _Constrainer:
    """One rewriting. `seen` are the scopes, `used` the globs that have been applied."""

    def __init__(self, graph: Graph, specs: Mapping[str, PartitionSpec]) -> None:
        self.rewriter = Rewriter(graph)
        self.specs = specs
        self.seen: set[Scope] = set()
        self.used: set[str] = set()

    def block(self, block: Block, outer: Scope, is_forward: bool, first: int | None = None) -> Block:
        """Returns a block within a scope, with each constraint behind the value that it constrains.

        Args:
          is_forward: whether the operation that carries the block belongs to the forward pass.
          first: the number of its first outputs that come before the others: the carry of a scan, whose stacked
            outputs may be residuals that the backward pass reads; None of any other block.
        """
        scopes = [_scope_of(op, outer) for op in block.ops]
        known = {scope[:n] for scope in scopes for n in range(1, len(scope) + 1)}
        self.seen |= known
        found: dict[int, str] = {}  # value -> glob
        for glob, scope in itertools.product(self.specs, sorted(known)) if is_forward else ():
            if fnmatch.fnmatchcase("/".join(scope), glob):
                output = self.output(block, scopes, scope, len(self.specs[glob]), first)
                found.update((value, glob) for value in output)
        names: dict[int, Atom] = {}
        ops: list[Op] = []
        for op, scope in zip(block.ops, scopes, strict=True):
            forward = is_forward and _is_forward(op)
            carried = ScanView(op).num_carry if op.name == "scan" else None
            bodies = tuple(self.block(body, scope, forward, carried) for body in op.bodies)
            ops.append(replace(rename_op(op, names), bodies=bodies))
            for value in op.results:
                if (glob := found.get(value)) is not None:
                    self.used.add(glob)
                    dims = _jax.spec_dims(self.specs[glob], len(self.rewriter.values[value].shape))
                    params = {"dims": dims, "mesh": None, "why": f"constrain[{glob!r}]={self.specs[glob]}"}
                    ops.append(_constraint(self.rewriter, params, value, op))
                    (names[value],) = ops[-1].results
        return Block(block.inputs, tuple(ops), tuple(rename_atom(a, names) for a in block.outputs))

    def output(self, block: Block, scopes: Sequence[Scope], scope: Scope, rank: int, first: int | None) -> list[int]:
        """Returns a scope's output; none if it has none of that rank in this block."""
        inside = [s[: len(scope)] == scope for s in scopes]
        forward = [(op, within) for op, within in zip(block.ops, inside, strict=True) if _is_forward(op)]
        read = {value for op, within in forward if not within for value in op.reads}
        made = [value for op, within in forward if within for value in reversed(op.results)]
        made = [value for value in made if len(self.rewriter.values[value].shape) >= max(rank, 1)]
        for values in (read, *map(flow.values_in, (block.outputs[:first], block.outputs))):
            if output := [value for value in made if value in values]:
                return output[-1:]
        return []


def _scope_of(op: Op, outer: Scope) -> Scope:
    """Returns the scopes of an operation, those of the loop around it first."""
    own = tuple(name for name in _jax.scopes(op.source) if "(" not in name)
    return own if own[: len(outer)] == outer else (*outer, *own)


def _is_forward(op: Op) -> bool:
    return _jax.derivative(op.source) != "transpose" and not _jax.is_computed_again(op.source)


def _unused_message(glob: str, spec: PartitionSpec, seen: Iterable[Scope]) -> str:
    """Returns the message for a glob that constrains nothing."""
    known = sorted(map("/".join, seen))
    if any(fnmatch.fnmatchcase(name, glob) for name in known):
        return f"constrain[{glob!r}]={spec}: no output of the scope has {len(spec)} dims or more; give fewer entries"
    if not known:
        return f"constrain[{glob!r}]: the step has no scopes; name them with jax.named_scope"
    close = difflib.get_close_matches(glob, known, n=5, cutoff=0.3) or known[:5]
    return f"constrain[{glob!r}] names no scope of the step; there are {', '.join(close)}"
