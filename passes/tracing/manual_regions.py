"""A user's `shard_map` as operations on whole arrays, which every later pass knows.

Each manual axis of its mesh becomes a leading dim of the operands that the specs divide along it, and the body is
vectorised over these dims under the axes' names: `psum` becomes a sum over a dim, `all_gather` a value that has no such
dim. So the region runs on any number of devices, in micro-batches and in pipelines, and what its collectives cost is
part of the plan.

A region stays one operation, which is run as it is written, if its body holds a kernel, an effect, a generator whose
numbers depend on vectorisation, another region, a constraint, or a collective that is an order to move blocks
(`ppermute`): as operations on whole arrays these would be other programs, or slower ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, walk
from alpa_lite.ir.layout import Axes
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.evaluation import evaluate_block

_VECTORISED = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all"})


def check_regions(graph: Graph, num_devices: int) -> None:
    """Raises OptionError for a region that is run as it is written, if it is written for other devices than all."""
    for op in graph.ops():
        mesh = op.params.get("mesh") if op.name == "shard_map" else None
        if mesh is not None and mesh.size != num_devices:
            raise OptionError(
                f"the shard_map at {_jax.source_line(op.source)} runs on a mesh of {mesh.size} devices, and the plan "
                f"is for {num_devices}: give it a mesh of {num_devices}, or leave out {_kept(op.params['jaxpr'])}, "
                "with which it cannot run on others"
            )


def _kept(jaxpr: Any) -> str:
    """Returns the operation of a body for which the region is kept as it is."""
    return next((eqn.primitive.name for eqn in _equations(jaxpr) if not _is_vectorised(eqn)), "its effects")


def has_global_form(eqn: Any) -> bool:
    """Returns whether an equation is a region that `global_form` can write as operations on whole arrays."""
    if eqn.primitive.name != "shard_map" or _jax.observable_effects(eqn):
        return False
    return all(map(_is_vectorised, _equations(eqn.params["jaxpr"])))


def global_form(eqn: Any, graph: Graph) -> Callable[..., list[Any]]:
    """Returns the function of whole arrays that a region computes; `graph`: of its body."""
    params, block = eqn.params, _without_mesh(graph.block)
    mesh, manual = params["mesh"], _jax.manual_axes(params)
    sizes = {axis: size for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if axis in manual}
    axes = [axis for axis, size in sizes.items() if size > 1]
    inputs, outputs = ([_divided_dims(spec, axes) for spec in params[side]] for side in ("in_specs", "out_specs"))
    ranks = [len(var.aval.shape) for var in params["jaxpr"].outvars]

    def run(*operands: Any, whole: bool = True) -> list[Any]:
        """`whole`: whether every result is the same on all devices along the axes that its spec does not name."""

        body: Callable[..., list[Any]] = functools.partial(_body, block, graph.constants)
        for axis in reversed(sizes):
            body = jax.vmap(
                body,
                in_axes=tuple(0 if axis in _named(dims) else None for dims in inputs),
                out_axes=[0 if axis in _named(dims) or not (whole or sizes[axis] == 1) else None for dims in outputs],
                axis_name=axis,
                axis_size=sizes[axis],
            )
        results = body(*(_divided(x, dims, axes, sizes) for x, dims in zip(operands, inputs, strict=True)))
        return [
            _joined(x if whole else _first(x, dims, axes), dims, axes, rank)
            for x, dims, rank in zip(results, outputs, ranks, strict=True)
        ]

    def either(*operands: Any) -> list[Any]:
        try:
            return run(*operands)
        except ValueError:  # a result of which every device has another is that of the first
            return run(*operands, whole=False)

    return either


def _is_vectorised(eqn: Any) -> bool:
    """Returns whether an equation of a body can be vectorised over the devices of the region."""
    name = eqn.primitive.name
    if name in primitives.COLLECTIVES and (name not in _VECTORISED or eqn.params.get("axis_index_groups") is not None):
        return False
    kept = name in primitives.KERNELS or name in primitives.MANUAL or name in ("sharding_constraint", "reshard")
    return not kept and name not in ("rng_bit_generator", "rng_uniform", "custom_partitioning", "ffi_call")


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in _jax.inner_jaxprs(eqn.params):
            yield from _equations(inner)


def _body(block: Block, constants: Sequence[Any], *blocks: Any) -> list[Any]:
    """Returns the results of the body of a region on blocks of arrays."""
    own: dict[int, Callable[..., Sequence[Any]]] = {}
    for op in walk(block):
        if op.name == "pvary":
            own[op.index] = lambda *xs: xs
        elif op.name == "psum_invariant":
            own[op.index] = lambda *xs, op=op: [lax.psum(x, op.params["axes"]) for x in xs]
    return evaluate_block(block, [*blocks, *constants], own=own)


def _without_mesh(block: Block) -> Block:
    """Returns the body of a region whose literals, and whose parameters, do not name the region's mesh."""

    def plain(atom: Atom) -> Atom:
        return Lit(np.asarray(atom.value), atom.aval) if isinstance(atom, Lit) else atom

    ops = [
        replace(
            op,
            params={name: None if isinstance(value, NamedSharding) else value for name, value in op.params.items()},
            operands=tuple(map(plain, op.operands)),
            bodies=tuple(map(_without_mesh, op.bodies)),
        )
        for op in block.ops
    ]
    return Block(block.inputs, tuple(ops), tuple(map(plain, block.outputs)))


Dims = tuple[Axes, ...]
"""For each dim that a spec has an entry for, the axes that divide it."""


def reduction_function(eqn: Any) -> Callable[..., list[Any]] | None:
    """Returns the function of an equation that reduces dims under the name of a collective, as `jax.vmap` writes it."""
    reduce = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}.get(eqn.primitive.name)
    if reduce is None or not all(isinstance(axis, int) for axis in eqn.params["axes"]):
        return None
    return lambda *xs: [reduce(x, eqn.params["axes"]) for x in xs]


def _divided_dims(spec: Any, axes: Sequence[str]) -> Dims:
    return tuple(tuple([a for a in some or () if a in axes]) for some in _jax.spec_dims(spec, len(spec)))


def _named(dims: Dims) -> list[str]:
    return [axis for axes in dims for axis in axes]


def _divided(x: Any, dims: Dims, axes: Sequence[str], sizes: Mapping[str, int]) -> Any:
    """Returns an array with a leading dim for each axis that divides it, in the order of `axes`."""
    shape: list[int] = []
    places: dict[str, int] = {}
    for size, names in zip(x.shape, (*dims, *((),) * (x.ndim - len(dims))), strict=True):
        for name in names:
            places[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    if not places:
        return x
    leading = [places[axis] for axis in axes if axis in places]
    return lax.transpose(jnp.reshape(x, shape), [*leading, *(i for i in range(len(shape)) if i not in leading)])


def _joined(x: Any, dims: Dims, axes: Sequence[str], rank: int) -> Any:
    """Returns the array of blocks of this many dims that have leading dims as of `_divided`."""
    named = [axis for axis in axes if axis in _named(dims)]
    if not named:
        return x
    order: list[int] = []
    shape: list[int] = []
    for dim, names in enumerate((*dims, *((),) * (rank - len(dims)))):
        some = [*(named.index(name) for name in names), len(named) + dim]
        order += some
        shape.append(math.prod(x.shape[place] for place in some))
    return jnp.reshape(lax.transpose(x, order), shape)


def _first(x: Any, dims: Dims, axes: Sequence[str]) -> Any:
    """Returns the part of the first device, along the axes that do not divide a result."""
    named = _named(dims)
    for place in reversed(range(len(axes))):
        if axes[place] not in named:
            x = lax.index_in_dim(x, 0, place, keepdims=False)
    return x
