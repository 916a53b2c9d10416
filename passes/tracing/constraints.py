"""Constraints on the outputs of scopes, which `constrain=` names: each becomes a `_jax.CONSTRAINT` in the graph.

A scope is a path of names as Flax modules and `jax.named_scope` give them: `Net/h_0/mlp`. Its output is the last value
that one of its forward operations makes, that another scope's forward operation or a result of the step reads, and that
has as many dims as the spec has entries. If a scope is entered several times, that is the output of the last time. All
that reads the value afterwards reads it as constrained.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.graph import Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.pruning import renumbered

Scope = tuple[str, ...]


def constrained(graph: Graph, specs: Mapping[str, PartitionSpec]) -> Graph:
    """The graph with a constraint on the output of each scope that a glob names.

    Args:
      specs: glob on scopes, written with slashes -> spec.

    Raises:
      OptionError: a glob names no scope, or none of its values fits the spec.
    """
    if not specs:
        return graph
    work = _Work(graph, specs)
    block = work.block(graph.block, (), True, len(graph.block.outputs))
    for glob, spec in specs.items():
        if glob not in work.used:
            raise OptionError(_nothing(glob, spec, work))
    return renumbered(replace(graph, values=tuple(work.values), block=block))


class _Work:
    """One rewriting. `seen` are the scopes, `used` the globs that have been applied."""

    def __init__(self, graph: Graph, specs: Mapping[str, PartitionSpec]) -> None:
        self.values: list[Value] = list(graph.values)
        self.specs = specs
        self.keys = graph.keys or Keys()
        self.index = max((op.index for op in graph.ops()), default=0)
        self.seen: set[Scope] = set()
        self.used: set[str] = set()

    def block(self, block: Block, outer: Scope, is_forward: bool, first: int) -> Block:
        """A block within a scope, with constraints after what they constrain.

        Args:
          is_forward: whether the operation that carries the block belongs to the forward pass.
          first: the number of its first outputs that come before the others: the carry of a scan, whose stacked
            outputs may be what the backward pass reads.
        """
        scopes = [_scope_of(op, outer) for op in block.ops]
        for scope in scopes:
            self.seen.update(scope[:n] for n in range(1, len(scope) + 1))
        found: dict[int, tuple[int, str]] = {}  # number of the op -> value, glob
        for scope, glob in self.named(scopes) if is_forward else ():
            output = self.output(block, scopes, scope, len(self.specs[glob]), first)
            if output is not None:
                found[output[0]] = output[1], glob
        names: dict[int, int] = {}
        ops: list[Op] = []
        for number, (op, scope) in enumerate(zip(block.ops, scopes, strict=True)):
            operands = tuple(names.get(a, a) if isinstance(a, int) else a for a in op.operands)
            forward = is_forward and _is_forward(op)
            bodies = tuple(self.block(body, scope, forward, _carried(op, body)) for body in op.bodies)
            ops.append(replace(op, operands=operands, bodies=bodies))
            if number in found:
                value, glob = found[number]
                made = self.constraint(op, value, glob)
                names[value] = made.results[0]
                ops.append(made)
        outputs = tuple(names.get(a, a) if isinstance(a, int) else a for a in block.outputs)
        return Block(block.inputs, tuple(ops), outputs)

    def named(self, scopes: Sequence[Scope]) -> Iterator[tuple[Scope, str]]:
        """The scopes of a block that globs name."""
        known = {scope[:n] for scope in scopes for n in range(1, len(scope) + 1)}
        for glob in self.specs:
            for scope in sorted(known):
                if fnmatch.fnmatchcase("/".join(scope), glob):
                    yield scope, glob

    def output(
        self, block: Block, scopes: Sequence[Scope], scope: Scope, rank: int, first: int
    ) -> tuple[int, int] | None:
        """(Number of the operation, value) of a scope's output; None if it has none of that rank in this block."""
        inside = [s[: len(scope)] == scope for s in scopes]
        forward = [_is_forward(op) for op in block.ops]
        read = {
            a for op, within, ahead in zip(block.ops, inside, forward, strict=True) if ahead and not within
            for a in op.reads
        }  # fmt: skip
        outputs = [{a for a in some if not isinstance(a, Lit)} for some in (block.outputs[:first], block.outputs)]
        for atoms in (read, *outputs):
            for number in reversed(range(len(block.ops))):
                if inside[number] and forward[number]:
                    fitting = [
                        v for v in block.ops[number].results if v in atoms and len(self.values[v].shape) >= max(rank, 1)
                    ]
                    if fitting:
                        return number, fitting[0]
        return None

    def constraint(self, op: Op, value: int, glob: str) -> Op:
        """The constraint on a value that an operation makes."""
        self.used.add(glob)
        spec = self.specs[glob]
        dims = _jax.spec_dims(spec, len(self.values[value].shape))
        params: dict[str, Any] = {"dims": dims, "mesh": None, "why": f"constrain[{glob!r}]={spec}"}
        self.values.append(self.values[value])
        self.index += 1
        key = self.keys.key(self.keys.head(_jax.CONSTRAINT, params), [self.values[value]])
        result = len(self.values) - 1
        return Op(self.index, _jax.CONSTRAINT, params, (value,), (result,), (), op.source, key, op.ctx)


def _scope_of(op: Op, outer: Scope) -> Scope:
    """The scopes of an operation, those of the loop around it first."""
    own = tuple(name for name in _jax.scopes(op.source) if "(" not in name)
    return own if own[: len(outer)] == outer else (*outer, *own)


def _carried(op: Op, body: Block) -> int:
    """How many of a body's outputs are the carry of a scan; of another body, all."""
    return int(op.params["num_carry"]) if op.name == "scan" else len(body.outputs)


def _is_forward(op: Op) -> bool:
    return _jax.derivative(op.source) != "transpose" and not _jax.is_computed_again(op.source)


def _nothing(glob: str, spec: PartitionSpec, work: _Work) -> str:
    """The message for a glob that constrains nothing."""
    known = sorted("/".join(scope) for scope in work.seen)
    if any(fnmatch.fnmatchcase(name, glob) for name in known):
        return f"constrain[{glob!r}]={spec}: no output of the scope has {len(spec)} dims or more; give fewer entries"
    if not known:
        return f"constrain[{glob!r}]: the step has no scopes; name them with jax.named_scope"
    close = difflib.get_close_matches(glob, known, n=5, cutoff=0.3) or known[:5]
    return f"constrain[{glob!r}] names no scope of the step; there are {', '.join(close)}"
