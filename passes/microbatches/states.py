"""States of values over micro-batches: the lattice of the data-flow analysis (`transfer`, `analysis`), and linearity.

Micro-batching shards the batch over *time*: a mesh with one axis of `parts` positions, of which position t is the
t-th iteration of a loop. Each value is then in one of these states.

    whole     the same in every micro-batch, and computed outside of the loop
    inner     the same in every micro-batch, and computed inside of it (a result of control flow that is inside)
    sliced    micro-batch t has block t of dim `dim`
    partial   the value is the sum over micro-batches of their terms
    local     belongs to one micro-batch alone and stands for the value of the whole batch (inexact)
    after     known only after all micro-batches

A partial value may go through an operation that is linear in it: sum_t L(x_t) = L(sum_t x_t). `linear` says which of
an operation's operands have to be summands for that; the others must be equal in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from alpa_lite.ir.graph import Atom, Lit, Op, Value
from alpa_lite.ir.layout import Layout
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.local.types import LocalForm

AXIS = "microbatch"
"""The name of the axis of time."""

ANY_EXAMPLES = -1
"""`State.examples` of a value that is computed whole: as many as the values that it is used with."""


class State(NamedTuple):
    """How a value depends on the micro-batch.

    A tuple, since tables are looked up by it for each operand of each operation.

    Attributes:
      dim: of a sliced value, the dim that is cut.
      segments: the sizes of the segments of that dim, if it has several (`segments`).
      examples: the number of examples in that dim, each of as many consecutive elements; 0 if it does not consist of
        whole examples, so that a micro-batch must have consecutive ones (`cutting`).
    """

    kind: Literal["whole", "inner", "sliced", "partial", "local", "after"]
    dim: int = -1
    segments: tuple[int, ...] = ()
    examples: int = 0

    def segment_sizes(self, size: int) -> tuple[int, ...]:
        """The segments of a dim of some size that is sliced so."""
        return self.segments or (size,)

    def shift(self, by: int) -> State:
        """The state with its dim moved, as stacking or unstacking a leading dim does."""
        return self._replace(dim=self.dim + by) if self.kind == "sliced" else self


WHOLE, INNER, PARTIAL, LOCAL, AFTER = (State(kind) for kind in ("whole", "inner", "partial", "local", "after"))


def sliced(dim: int, examples: int = 0, segments: Sequence[int] = ()) -> State:
    """The state of a value of which micro-batch t has block t of `dim`."""
    return State("sliced", dim, tuple(segments) if len(segments) > 1 else (), examples)


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype in which a sum over micro-batches is carried.

    It is float32 for 16-bit floats: with b micro-batches a 16-bit running sum loses up to b/2 units in the last place.
    """
    return np.dtype(np.float32) if dtype in (jnp.bfloat16, np.float16) else dtype


def state_of(layout: Layout, examples: int = 0) -> State:
    """The state that a layout on the axis of time means."""
    if layout.partial:
        return PARTIAL
    for dim, axes in enumerate(layout.dims):
        if axes:
            return sliced(dim, examples)
    return WHOLE


def join(first: State, second: State) -> State | None:
    """The least state that covers both: of a value that is sometimes in one and sometimes in the other."""
    if first == second:
        return first
    kinds = {first.kind, second.kind}
    if kinds <= {"whole", "inner"}:
        return INNER
    for one, other in ((first, second), (second, first)):
        if one.kind in ("whole", "inner") and other.kind in ("sliced", "partial", "local"):
            return other
    if kinds == {"sliced"} and first[:3] == second[:3]:
        return first._replace(examples=0)
    return PARTIAL if kinds == {"local", "partial"} else None


@dataclass(frozen=True, eq=False)
class Role:
    """The place of one operation in the rewritten step, and its form.

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
      consecutive: whether a micro-batch must have consecutive examples.
      segmented: whether a form makes segments or takes them apart (`segments`).
    """

    kind: Literal["whole", "form", "copy", "barrier", "scan", "map", "while", "cond"]
    operands: tuple[State, ...]
    results: tuple[State, ...]
    form: LocalForm | None = None
    inner: tuple[State, ...] = ()
    scale: bool = False
    length: int = 0
    consecutive: bool = False
    segmented: bool = False


@dataclass(frozen=True, eq=False)
class Failure:
    """The reason why an operation has no exact form in a micro-batch.

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
    return flow.is_literal_zero(atom)


_UPDATES = {"scatter": (0, 2), "scatter-add": (0, 2), "scatter-sub": (0, 2), "dynamic_update_slice": (0, 1)}


def linear(op: Op, partial: Sequence[bool], values: Sequence[Value]) -> tuple[bool, ...] | None:
    """Which operands must be summands so that the operation's results are; None if it is not linear in `partial`.

    Args:
      op: an operation without bodies.
      partial: for each operand whether it is partial.
      values: of the graph.
    """
    count = len(partial)
    dtypes = [(a.aval if isinstance(a, Lit) else values[a]).dtype for a in (*op.operands, *op.results)]
    if not all(jnp.issubdtype(dtype, jnp.number) for dtype in dtypes[count:]):
        return None
    is_inexact = jnp.issubdtype(dtypes[-1], jnp.inexact)
    keeps_sums = jnp.issubdtype(dtypes[0], jnp.integer) or (is_inexact and jnp.issubdtype(dtypes[0], jnp.number))
    is_scaling = (op.name == "div" and is_inexact) or (op.name == "convert_element_type" and keeps_sums)
    if is_scaling or op.name in primitives.LINEAR_IN_FIRST:
        wanted = {0}
    elif op.name in primitives.LINEAR_IN_ALL:
        wanted = set(range(count))
    elif op.name in _UPDATES:
        wanted = set(_UPDATES[op.name])
    elif op.name == "select_n":
        wanted = set(range(1, count))
    elif op.name in primitives.LINEAR_IN_EACH:
        wanted = {partial.index(True)}
    else:
        return None
    if any(p and i not in wanted for i, p in enumerate(partial)):
        return None
    return tuple(i in wanted for i in range(count))


def is_intensive(op: Op) -> bool:
    """Whether an operation on the whole batch, outside of the loop, would defeat the purpose of micro-batches."""
    return op.name in primitives.COMPUTE_INTENSIVE or any(
        is_intensive(inner) for body in op.bodies for inner in body.ops
    )
