"""The shared vocabulary of the local forms: what a form is, what its makers are given, and the block arithmetic
they use.

A tensor's dim that is sharded over axes (a, b) is cut into p = |a| * |b| equal blocks. A device's *block number*
along that dim is its index over (a, b), major to minor, and its *offset* is that number times the block's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh, local_shape
from alpa_lite.ir.strategy import Rule


@dataclass(frozen=True)
class LocalCollective:
    """One collective that a local form issues.

    Attributes:
      kind: all_reduce, all_gather or collective_permute, as in `plan.Collective`.
      axes: the mesh axes it runs over.
      bytes: per device, of the result.
    """

    kind: str
    axes: Axes
    bytes: int


@dataclass(frozen=True, eq=False)
class LocalForm:
    """How every device computes its block of an operation's results.

    Attributes:
      op: the operation; a form without `own` is that of any other of the same key, too.
      operands: the layouts in which the operands are taken (literals: replicated).
      results: the layouts of the results; axes of a sharded sum are partial.
      collectives: those that `run` issues by itself.
      changes: parameters that are bound in place of the operation's own.
      own: what is computed where that is more than the operation on blocks, as of `run`.
    """

    op: Op
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    collectives: tuple[LocalCollective, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    own: Callable[..., list] | None = None

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the operation on blocks."""
        return {**self.op.params, **self.changes} if self.changes else self.op.params

    def run(self, *blocks: Any) -> list:
        """Local operand blocks -> local results, inside `shard_map` with the mesh's axis names bound."""
        op = self.op
        if self.own is None:
            return _jax.emit(op.primitive, self.params, op.source, op.ctx, blocks)
        with _jax.equation_scope(op.source):
            return self.own(*blocks)


def bind(op: Op, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list:
    """Binds the op's primitive inside a form's `own`, with `params` in place of its own; always a list of results."""
    return _jax.bind(op.primitive, op.params if params is None else params, op.source, operands)


@dataclass(frozen=True, eq=False, slots=True)
class Setting:
    """One op with the layouts that an assignment gives it: what the maker of a form looks at."""

    op: Op
    rule: Rule
    assignment: tuple[Axes, ...]
    values: Sequence[Value]
    mesh: LogicalMesh
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def _operand(self, i: int) -> Any:
        atom = self.op.operands[i]
        return atom.aval if isinstance(atom, Lit) else self.values[atom]

    def operand_shape(self, i: int) -> tuple[int, ...]:
        """Returns the global shape of operand i."""
        return tuple(self._operand(i).shape)

    def operand_dtype(self, i: int) -> Any:
        """Returns the dtype of operand i."""
        return self._operand(i).dtype

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """Returns the global shape of result i."""
        return self.values[self.op.results[i]].shape

    def result_dtype(self, i: int = 0) -> Any:
        """Returns the dtype of result i."""
        return self.values[self.op.results[i]].dtype

    def local_operand(self, i: int) -> tuple[int, ...]:
        """Returns the shape of one device's block of operand i."""
        return local_shape(self.operand_shape(i), self.operands[i], self.mesh)

    def local_result(self, i: int = 0) -> tuple[int, ...]:
        """Returns the shape of one device's block of result i."""
        return local_shape(self.result_shape(i), self.results[i], self.mesh)

    def result_bytes(self, i: int = 0) -> int:
        """Returns bytes of one device's block of result i."""
        return math.prod(self.local_result(i)) * self.values[self.op.results[i]].itemsize

    def bind(self, **changes: Any) -> LocalForm:
        """Returns the form that binds the same primitive, with some parameters changed to their local values.

        Shardings mean nothing where every axis is manual.
        """
        params = self.op.params
        changes |= {name: None for name in ("sharding", "out_sharding") if params.get(name) is not None}
        return LocalForm(self.op, self.operands, self.results, changes=changes)

    def params(self, **changes: Any) -> Mapping[str, Any]:
        """Returns the parameters of `bind`."""
        return self.bind(**changes).params

    def form(self, own: Callable[..., list], *collectives: LocalCollective) -> LocalForm:
        """Returns a form with these layouts, run under the op's name stack and source line."""
        return LocalForm(self.op, self.operands, self.results, collectives, own=own)

    def is_special(self, operand: int, dim: int) -> bool:
        """Returns whether a special factor shards a dim of an operand."""
        return any(
            self.assignment[f] and self.rule.factors[f].kind == "special" for f in self.rule.operands[operand][dim]
        )


def sharded_dims(layout: Layout) -> list[int]:
    """Returns the dims that some axis shards."""
    return [d for d, axes in enumerate(layout.dims) if axes]


def block_number(axes: Axes) -> jax.Array:
    """int32 scalar: this device's block number along a dim sharded over `axes`; `lax` traces faster than operators."""
    number = lax.axis_index(axes[0])
    for axis in axes[1:]:
        number = lax.add(lax.mul(number, np.int32(lax.axis_size(axis))), lax.axis_index(axis))
    return number


def offset(axes: Axes, block: int, dtype: Any = jnp.int32) -> jax.Array:
    """Scalar of `dtype`: where this device's block of `block` elements starts along a dim sharded over `axes`."""
    return block_number(axes).astype(dtype) * jnp.asarray(block, dtype)


def extreme_value(dtype: Any, *, highest: bool) -> Any:
    """Returns the largest number of a dtype, or the smallest: the identity of a minimum, or of a maximum."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(np.inf if highest else -np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).max if highest else jnp.iinfo(dtype).min, dtype)


_CARRIERS = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8", "float4_e2m1fn": "float8_e4m3fn"}
"""The type of a byte that holds items of fewer bits exactly."""


def apply_in_bytes(change: Callable[..., Any], *blocks: Any) -> Any:
    """`change` of blocks of one dtype, in which items of fewer than eight bits take a byte.

    XLA's CPU collectives never return for items of two bits, its compiler ends the process at their concatenation (both
    measured in JAX 0.10.2 and 0.12), and it widens items of four bits itself.
    """
    dtype = blocks[0].dtype
    if dtype.name not in _CARRIERS:
        return change(*blocks)
    wide = _CARRIERS[dtype.name]
    return lax.convert_element_type(change(*(lax.convert_element_type(x, wide) for x in blocks)), dtype)


def sort_axes(axes: Axes, mesh: LogicalMesh) -> Axes:
    """Returns axes in the order of the mesh."""
    return tuple(a for a in mesh.axis_names if a in axes)


def device_number(block: int, axes: Axes, mesh: LogicalMesh) -> int:
    """Returns the number, along the axes in mesh order, of the device that has a block of a dim sharded over `axes`."""
    place = {}
    for axis in reversed(axes):
        block, place[axis] = divmod(block, mesh.axis_size(axis))
    number = 0
    for axis in sort_axes(axes, mesh):
        number = number * mesh.axis_size(axis) + place[axis]
    return number


def permute_blocks(
    x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]], mesh: LogicalMesh, after: Axes = ()
) -> jax.Array:
    """Sends the block of each pair's first block number to its second; a device that nobody sends to gets zeros.

    `lax.ppermute` numbers devices in the mesh's order of the axes whatever order it is given (JAX 0.12 refuses another
    one), block numbers go by the order of `axes`, the second ones by that of `after` if it is given: so they are
    translated.
    """
    hops = [(device_number(a, axes, mesh), device_number(b, after or axes, mesh)) for a, b in pairs]
    return apply_in_bytes(lambda x: lax.ppermute(x, sort_axes(axes, mesh), hops), x)
