"""How each value of a step depends on the micro-batch: the vocabulary of `accumulation`, and linearity.

Micro-batching shards the batch over *time*: a mesh with one axis of `parts` positions, of which position t is the
t-th turn of a loop. Each value is then in one of these states.

    whole     the same in every micro-batch, and computed outside of the loop
    inner     the same in every micro-batch, and computed inside of it (it comes out of control flow that is inside)
    sliced    micro-batch t has block t of dim `dim`
    partial   the value is the sum over micro-batches of what each has
    local     belongs to one micro-batch alone and stands for the value of the whole batch (inexact)
    after     known only after all micro-batches

A partial value may go through an operation that is linear in it: sum_t L(x_t) = L(sum_t x_t). `linear` says which of
an operation's operands have to be summands for that; the others must be equal in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.graph import Atom, Lit, Op, Value
from alpa_lite.layout import Layout
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local.types import LocalForm

AXIS = "microbatch"
"""The name of the axis of time."""


class State(NamedTuple):
    """How a value depends on the micro-batch; `dim` is that of a sliced value, `segments` its sizes if it has several.

    A tuple, since tables are looked up by it for each operand of each operation.
    """

    kind: Literal["whole", "inner", "sliced", "partial", "local", "after"]
    dim: int = -1
    segments: tuple[int, ...] = ()


WHOLE, INNER, PARTIAL, LOCAL, AFTER = (State(kind) for kind in ("whole", "inner", "partial", "local", "after"))


def sliced(dim: int) -> State:
    """The state of a value of which micro-batch t has block t of `dim`."""
    return State("sliced", dim)


def spec_of(value: Value) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of a value, to trace with."""
    return _jax.spec_of(value.aval)


def state_of(layout: Layout) -> State:
    """The state that a layout on the axis of time means."""
    if layout.partial:
        return PARTIAL
    for dim, axes in enumerate(layout.dims):
        if axes:
            return sliced(dim)
    return WHOLE


def shifted(state: State, by: int) -> State:
    """The state with its dim moved, as stacking or unstacking a leading dim does."""
    return state._replace(dim=state.dim + by) if state.kind == "sliced" else state


def join(first: State, second: State) -> State | None:
    """The state in which a value can be had that is sometimes in the one and sometimes in the other."""
    if first == second:
        return first
    kinds = {first.kind, second.kind}
    if kinds <= {"whole", "inner"}:
        return INNER
    for one, other in ((first, second), (second, first)):
        if one.kind in ("whole", "inner") and other.kind in ("sliced", "partial", "local"):
            return other
    return PARTIAL if kinds == {"local", "partial"} else None


@dataclass(frozen=True, eq=False)
class Role:
    """What becomes of one operation.

    Attributes:
      kind: "whole": it stays outside of the loop; "form": its local form; "copy": the operation itself, on values that
        are not sliced or on summands that it is linear in; "barrier"; "scan", "while", "cond": itself, on other bodies;
        "map": a scan over the examples, itself over fewer.
      operands: the state in which each operand is wanted.
      results: the state of each result.
      form: for "form".
      inner: for control flow, the states that the outputs of its last body are wanted in.
      scale: whether partial results are multiplied by the number of micro-batches, and thereby become local.
      length: for "scan" and "map", the length in a micro-batch.
      segmented: whether a form makes segments or takes them apart (`segments`).
    """

    kind: Literal["whole", "form", "copy", "barrier", "scan", "map", "while", "cond"]
    operands: tuple[State, ...]
    results: tuple[State, ...]
    form: LocalForm | None = None
    inner: tuple[State, ...] = ()
    scale: bool = False
    length: int = 0
    segmented: bool = False


@dataclass(frozen=True, eq=False)
class Failure:
    """Why an operation has no exact form in a micro-batch.

    Attributes:
      op: the operation, nested ones included.
      text: the reason.
      roots: the reductions (op indices) whose sums it would need; computed within the micro-batch, it could go on.
    """

    op: Op
    text: str
    roots: frozenset[int] = frozenset()


def is_zero(atom: Atom, producers: dict[int, tuple[Op, int]]) -> bool:
    """Whether a value is made of literal zeros alone."""
    while not isinstance(atom, Lit):
        if atom not in producers:
            return False
        op = producers[atom][0]
        if op.name not in primitives.RESHAPES or len(op.operands) != 1:
            return False
        atom = op.operands[0]
    return not np.any(np.asarray(atom.value))


_UPDATES = {"scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2), "dynamic_update_slice": (0, 1)}


def linear(op: Op, partial: Sequence[bool], values: Sequence[Value]) -> tuple[bool, ...] | None:
    """Which operands must be summands so that the operation's results are; None if it is not linear in `partial`.

    Args:
      op: an operation without bodies.
      partial: for each operand whether it is partial.
      values: of the graph.
    """
    count = len(partial)
    if not all(_is_number(values[v].dtype) for v in op.results):
        return None
    if op.name in primitives.LINEAR_IN_FIRST:
        wanted = {0}
    elif op.name in primitives.LINEAR_IN_ALL:
        wanted = set(range(count))
    elif op.name in _UPDATES:
        wanted = set(_UPDATES[op.name])
    elif op.name == "select_n":
        wanted = set(range(1, count))
    elif op.name in primitives.LINEAR_IN_EACH:
        wanted = {partial.index(True)}
    elif _divides(op, values) or _converts(op, values):
        wanted = {0}
    else:
        return None
    if any(p and i not in wanted for i, p in enumerate(partial)):
        return None
    return tuple(i in wanted for i in range(count))


def _divides(op: Op, values: Sequence[Value]) -> bool:
    return op.name == "div" and jnp.issubdtype(values[op.results[0]].dtype, jnp.inexact)


def _converts(op: Op, values: Sequence[Value]) -> bool:
    if op.name != "convert_element_type":
        return False
    source = op.operands[0]
    before = source.aval.dtype if isinstance(source, Lit) else values[source].dtype
    after = values[op.results[0]].dtype
    if not _is_number(before):
        return False
    return jnp.issubdtype(after, jnp.inexact) or jnp.issubdtype(before, jnp.integer)


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.number)


def is_intensive(op: Op) -> bool:
    """Whether an operation on the whole batch, outside of the loop, would defeat the purpose of micro-batches."""
    return op.name in primitives.COMPUTE_INTENSIVE or any(
        is_intensive(inner) for body in op.bodies for inner in body.ops
    )
