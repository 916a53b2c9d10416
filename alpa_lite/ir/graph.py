"""The program that passes work on: a jaxpr with calls inlined, unique value numbers, and structured control flow.

A `Graph` holds one `Block`. A block is a straight line of `Op`s. An op whose primitive is `scan`, `while` or `cond`
carries its bodies as nested blocks; calls (`jit`, `custom_jvp_call`, `custom_vjp_call`, remat) have been inlined, and
any other higher-order primitive (`shard_map`, `pallas_call`, callbacks, linear solves) is one opaque op.

Value numbers are unique over the whole graph, nested blocks included, so a table indexed by value needs no scopes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from alpa_lite.ir.calling import CallingForm


@dataclass(frozen=True, eq=False)
class Value:
    """The type of one value.

    Attributes:
      shape: its dims; for typed random keys the logical dims, without the key's own words.
      dtype: a NumPy dtype or a JAX extended dtype.
      aval: JAX's abstract value (weak type included).
    """

    shape: tuple[int, ...]
    dtype: Any
    aval: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(getattr(self.dtype, "itemsize", 4))

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, eq=False)
class Lit:
    """A literal operand: always a scalar or a small array, the same on every device."""

    value: Any
    aval: Any


Atom = int | Lit


@dataclass(frozen=True, eq=False)
class Op:
    """One equation.

    Attributes:
      index: its number, unique over the graph, increasing in program order within a block; a nested block's ops are
        numbered before the op that carries them.
      primitive: the JAX primitive; `primitive.name` is its name.
      params: the equation's parameters. For scan, while and cond the inner jaxprs are kept here too, for reference
        only: `bodies` is what counts.
      operands, results: value numbers, or literals among the operands.
      bodies: scan: (body,); while: (cond, body); cond: one a branch. A scan body's inputs are consts, carry, xs in
        that order and its outputs carry, ys (`num_consts` and `num_carry` in params).
      source: JAX's source info, for name stacks, line numbers and re-emission.
      key: equal for two ops that compute the same function of equally shaped operands (primitive, parameters, shapes,
        dtypes, literal values); hashable; independent of value numbers.
      ctx: JAX's equation context (`compute_on`, `set_xla_metadata`), for re-emission.
      has_effects: the op must run even if nobody reads its results (callbacks, mutable references).
    """

    index: int
    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    bodies: tuple[Block, ...]
    source: Any
    key: Any
    ctx: Any = None
    has_effects: bool = False

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    @functools.cached_property
    def reads(self) -> tuple[int, ...]:
        """The values among its operands."""
        return tuple([atom for atom in self.operands if isinstance(atom, int)])


@dataclass(frozen=True, eq=False)
class Block:
    """A straight line of ops."""

    inputs: tuple[int, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """A whole program.

    Attributes:
      values: indexed by value number.
      block: the top block; its inputs are the step's flat arguments, then the closed-over constants.
      constants: the closed-over arrays, one for each of the last inputs of the block.
      keys: the writer of the keys of the ops (`passes.ir.keys.Keys`), which knows functions (callbacks) by number:
        whoever adds ops to the graph writes their keys with it.
    """

    values: tuple[Value, ...]
    block: Block
    constants: tuple[Any, ...] = ()
    keys: Any = None

    def ops(self) -> Iterator[Op]:
        """Yields every op, nested ones before the op that carries them."""
        yield from walk(self.block)

    @property
    def num_ops(self) -> int:
        """The number of ops, nested ones included."""
        return sum(1 for _ in self.ops())


def walk(block: Block) -> Iterator[Op]:
    """Yields every op of a block, nested ones before the op that carries them."""
    for op in block.ops:
        for body in op.bodies:
            yield from walk(body)
        yield op


@dataclass(frozen=True)
class Argument:
    """One flat leaf of the step's arguments, or of its result.

    Attributes:
      path: the stored path (`alpa_lite.ir.paths`), such as `state['params']['w']`.
      role: "state" (comes back with the same shape and dtype), "batch", "frozen" (weights that the step reads and does
        not return), or "other" (a random key, a scalar).
      weak: whether its dtype is weak. A plan does not depend on it.
    """

    path: str
    role: str
    weak: bool = field(default=False, compare=False)

    @property
    def is_resident(self) -> bool:
        """Whether it stays on its devices from call to call: state, and frozen weights."""
        return self.role in ("state", "frozen")


Bounds = tuple[int, ...]
"""Where pieces along dim 0 begin, and the end of the last."""


@dataclass(frozen=True)
class Pieces:
    """A flat argument or result of the user's step in terms of the cut step.

    Attributes:
      numbers: the arguments, or results, of the cut step that it consists of, in order along dim 0.
      bounds: where each begins, and the end of the last; empty for a leaf that is whole.
    """

    numbers: tuple[int, ...]
    bounds: Bounds = ()


@dataclass(frozen=True)
class StackedArguments:
    """How a cut step has the user's arguments and results: `Traced.stacked`.

    Attributes:
      arguments, results: one for each flat argument, and each flat result, of the user's step.
    """

    arguments: tuple[Pieces, ...]
    results: tuple[Pieces, ...]


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced step: the graph, and what its flat inputs and outputs are.

    Attributes:
      graph: the program.
      arguments: one for each flat argument (graph inputs without the constants).
      outputs: one for each flat output of the graph; role "state" where it is the new value of an argument, else
        "other".
      state: pairs (output number, argument number): this output is the new value of that argument.
      in_tree, out_tree: pytree definitions of (args, kwargs) and of the result.
      notes: remarks for the plan (which argument is the batch, and why).
      calling: how a call's arguments become flat leaves; None for steps that are not called.
      name: of the user's function.
      has_named_batch: whether the user said which arguments are the batch.
      returned_arguments: (position, argument) of each flat result of the user's step that is an argument as it came,
        and one that is not state. The graph does not return it: the caller gets the array that came, which need not be
        where the plan reads it.
      placements: (argument, sharding) of each argument whose new value, or itself as a result, is given one.
      stacked: where leaves of the user's step are several arguments here, which; None where each is one.
      folded_step: the step to plan instead, with a few copies of its repeated layers; None where none repeat.
      copies: of such a step the copies that it leaves out (`passes.ir.folding.Copies`).
    """

    graph: Graph
    arguments: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    state: tuple[tuple[int, int], ...]
    in_tree: Any
    out_tree: Any
    notes: tuple[str, ...] = ()
    calling: CallingForm | None = None
    name: str = "step"
    has_named_batch: bool = False
    returned_arguments: tuple[tuple[int, int], ...] = ()
    placements: tuple[tuple[int, Any], ...] = ()
    stacked: StackedArguments | None = None
    folded_step: Traced | None = None
    copies: Any = None


def check(graph: Graph) -> None:
    """Raises AssertionError unless every value is defined once, before its use, in its own block or an outer one."""
    defined: set[int] = set()

    def visit(block: Block, seen: set[int]) -> None:
        seen = set(seen)
        for value in block.inputs:
            assert value not in defined, f"value {value} is defined twice"
            defined.add(value)
            seen.add(value)
        for op in block.ops:
            for atom in op.operands:
                assert isinstance(atom, Lit) or atom in seen, f"{op.name} uses value {atom} before its definition"
            for body in op.bodies:
                visit(body, set())  # bodies are closed: what they use comes in through their inputs
            for value in op.results:
                assert value not in defined, f"value {value} is defined twice"
                defined.add(value)
                seen.add(value)
        for atom in block.outputs:
            assert isinstance(atom, Lit) or atom in seen, f"block output {atom} is not defined"

    visit(graph.block, set())
