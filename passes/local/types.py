"""The shared vocabulary of the local forms: what a form is, what its makers are given, and the block arithmetic
they use.

A tensor's dim that is sharded over axes (a, b) is cut into p = |a| * |b| equal blocks. A device's *block number*
along that dim is its index over (a, b), major to minor, and its *offset* is that number times the block's size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
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
      operands: the layouts in which the operands are taken (literals: replicated).
      results: the layouts of the results; axes of a sharded sum are partial.
      collectives: those that `run` issues by itself.
      run: local operand blocks, one positional argument each -> list of local results. To be called inside `shard_map`
        with the mesh's axis names bound.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    collectives: tuple[LocalCollective, ...]
    run: Callable[..., list]


def bind(op: Op, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list:
    """Binds the op's primitive inside a form's `run`, with `params` in place of its own; always a list of results."""
    return _jax.bind(op.primitive, op.params if params is None else params, op.source, operands)


def _run_emitted(op: Op, params: Mapping[str, Any], *operands: Any) -> list:
    return _jax.emit(op.primitive, params, op.source, op.ctx, operands)


def rebinding(form: LocalForm) -> Mapping[str, Any] | None:
    """The parameters of a form that only binds its op's primitive again; None for a form of another kind."""
    run = form.run
    if isinstance(run, functools.partial) and run.func is _run_emitted:
        return run.args[1]
    return None


Changes = Mapping[str, Any]
"""The parameters that a form binds in place of the operation's own."""


def changes_of(op: Op, form: LocalForm) -> Changes | None:
    """The parameters that a form which only binds its primitive again changes; None for a form of another kind."""
    params = rebinding(form)
    if params is None:
        return None
    return {name: value for name, value in params.items() if value is not op.params.get(name)}


def rebound(op: Op, form: LocalForm, changes: Changes) -> LocalForm:
    """A form that binds the primitive of an operation again, for another operation of the same key."""
    params = {**op.params, **changes} if changes else op.params
    return LocalForm(form.operands, form.results, (), functools.partial(_run_emitted, op, params))


def _run_under(op: Op, run: Callable[..., list], *operands: Any) -> list:
    with _jax.under(op.source):
        return run(*operands)


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

    def operand_shape(self, i: int) -> tuple[int, ...]:
        """The global shape of operand i."""
        atom = self.op.operands[i]
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self.values[atom].shape

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        """The global shape of result i."""
        return self.values[self.op.results[i]].shape

    def result_dtype(self, i: int = 0) -> Any:
        """The dtype of result i."""
        return self.values[self.op.results[i]].dtype

    def _local(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return tuple(n // self.mesh.product(axes) if axes else n for n, axes in zip(shape, layout.dims, strict=True))

    def local_operand(self, i: int) -> tuple[int, ...]:
        """The shape of one device's block of operand i."""
        return self._local(self.operand_shape(i), self.operands[i])

    def local_result(self, i: int = 0) -> tuple[int, ...]:
        """The shape of one device's block of result i."""
        return self._local(self.result_shape(i), self.results[i])

    def operand_bytes(self, i: int) -> int:
        """Bytes of one device's block of operand i."""
        atom = self.op.operands[i]
        dtype = atom.aval.dtype if isinstance(atom, Lit) else self.values[atom].dtype
        return math.prod(self.local_operand(i)) * dtype.itemsize

    def result_bytes(self, i: int = 0) -> int:
        """Bytes of one device's block of result i."""
        return math.prod(self.local_result(i)) * self.values[self.op.results[i]].itemsize

    def params(self, **changes: Any) -> Mapping[str, Any]:
        """The op's parameters with `changes`, without the shardings: they mean nothing where every axis is manual."""
        params = self.op.params
        for name in ("sharding", "out_sharding"):
            if params.get(name) is not None:
                changes[name] = None
        return {**params, **changes} if changes else params

    def bound(self, **changes: Any) -> LocalForm:
        """The form that binds the same primitive, with some parameters changed to their local values."""
        run = functools.partial(_run_emitted, self.op, self.params(**changes))
        return LocalForm(self.operands, self.results, (), run)

    def form(self, run: Callable[..., list], *collectives: LocalCollective) -> LocalForm:
        """A form with these layouts, run under the op's name stack and source line."""
        return LocalForm(self.operands, self.results, collectives, functools.partial(_run_under, self.op, run))

    def special(self, operand: int, dim: int) -> bool:
        """Whether a special factor shards a dim of an operand."""
        return any(
            self.assignment[f] and self.rule.factors[f].kind == "special" for f in self.rule.operands[operand][dim]
        )


def sharded_dims(layout: Layout) -> list[int]:
    """The dims that some axis shards."""
    return [d for d, axes in enumerate(layout.dims) if axes]


def block_number(axes: Axes) -> jax.Array:
    """int32 scalar: this device's block number along a dim sharded over `axes`."""
    return jnp.asarray(lax.axis_index(axes), jnp.int32)


def offset(axes: Axes, block: int, dtype: Any = jnp.int32) -> jax.Array:
    """Scalar of `dtype`: where this device's block of `block` elements starts along a dim sharded over `axes`."""
    return block_number(axes).astype(dtype) * jnp.asarray(block, dtype)


_CARRIERS = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8", "float4_e2m1fn": "float8_e4m3fn"}
"""The type of a byte that holds items of fewer bits exactly."""


def in_bytes(change: Callable[..., Any], *blocks: Any) -> Any:
    """`change` of blocks of one dtype, in which items of fewer than eight bits take a byte.

    XLA's CPU collectives never return for items of two bits, its compiler ends the process at their concatenation (both
    measured in JAX 0.10.2 and 0.12), and it widens items of four bits itself.
    """
    dtype = blocks[0].dtype
    if dtype.name not in _CARRIERS:
        return change(*blocks)
    wide = _CARRIERS[dtype.name]
    return lax.convert_element_type(change(*(lax.convert_element_type(x, wide) for x in blocks)), dtype)


def permute_blocks(x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]], mesh: LogicalMesh) -> jax.Array:
    """Sends the block of each pair's first block number to its second; a device that nobody sends to gets zeros.

    `lax.ppermute` numbers devices in the mesh's order of the axes whatever order it is given (JAX 0.12 refuses another
    one), block numbers go by the order of `axes`: so they are translated.
    """
    ordered = tuple(a for a in mesh.axis_names if a in axes)
    sizes = [mesh.axis_size(a) for a in axes]

    def in_mesh_order(number: int) -> int:
        place = {}
        for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
            number, place[axis] = divmod(number, size)
        out = 0
        for axis in ordered:
            out = out * mesh.axis_size(axis) + place[axis]
        return out

    hops = [(in_mesh_order(a), in_mesh_order(b)) for a, b in pairs]
    return in_bytes(lambda x: lax.ppermute(x, ordered, hops), x)
