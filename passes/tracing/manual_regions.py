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
from collections.abc import Callable, Mapping, Sequence
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
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.evaluation import evaluate_block

_VECTORISED = frozenset({"psum", "psum_invariant", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all"})
_KEPT = primitives.KERNELS | primitives.MANUAL | {
    "sharding_constraint", "reshard", "rng_bit_generator", "rng_uniform", "custom_partitioning", "ffi_call"
}  # fmt: skip


def check_regions(graph: Graph, num_devices: int) -> None:
    """Raises OptionError for a region that is run as it is written, if it is written for other devices than all."""
    for op in graph.ops():
        mesh = op.params.get("mesh") if op.name == "shard_map" else None
        if mesh is not None and mesh.size != num_devices:
            body = _jax.walk_equations(op.params["jaxpr"])
            kept = next((eqn.primitive.name for eqn in body if not _is_vectorised(eqn)), "its effects")
            raise OptionError(
                f"the shard_map at {_jax.source_line(op.source)} runs on a mesh of {mesh.size} devices, and the plan "
                f"is for {num_devices}: give it a mesh of {num_devices}, or leave out {kept}, with which it cannot "
                "run on others"
            )


def has_global_form(eqn: Any) -> bool:
    """Returns whether an equation is a region that `global_form` can write as operations on whole arrays."""
    if eqn.primitive.name != "shard_map" or _jax.observable_effects(eqn):
        return False
    return all(map(_is_vectorised, _jax.walk_equations(eqn.params["jaxpr"])))


def _is_vectorised(eqn: Any) -> bool:
    """Returns whether an equation of a body can be vectorised over the devices of the region."""
    name = eqn.primitive.name
    if name in primitives.COLLECTIVES:
        return name in _VECTORISED and eqn.params.get("axis_index_groups") is None
    return name not in _KEPT


Dims = Sequence[Sequence[str]]
"""The axes that divide each dim of an array."""


def global_form(eqn: Any, graph: Graph) -> Callable[..., list[Any]]:
    """Returns the function of whole arrays that a region computes; `graph`: of its body."""
    params, block = eqn.params, _without_mesh(graph.block)
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    sizes = {axis: size for axis, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if axis in manual}

    def dims_of(specs: Sequence[Any], variables: Sequence[Any]) -> list[Dims]:
        ranked = [_jax.spec_dims(spec, len(var.aval.shape)) for spec, var in zip(specs, variables, strict=True)]
        return [[[a for a in some or () if sizes.get(a, 1) > 1] for some in dims] for dims in ranked]

    inputs, outputs = dims_of(params["in_specs"], eqn.invars), dims_of(params["out_specs"], eqn.outvars)

    def run(*operands: Any, whole: bool = True) -> list[Any]:
        """`whole`: whether every result is the same on all devices along the axes that its spec does not name."""

        body: Callable[..., list[Any]] = functools.partial(_body, block, graph.constants)
        for axis, size in reversed(sizes.items()):
            body = jax.vmap(
                body,
                in_axes=tuple(0 if axis in _named(dims) else None for dims in inputs),
                out_axes=[0 if axis in _named(dims) or not (whole or size == 1) else None for dims in outputs],
                axis_name=axis,
                axis_size=size,
            )
        results = body(*(_divided(x, dims, sizes) for x, dims in zip(operands, inputs, strict=True)))
        return [_joined(x, dims, sizes, whole=whole) for x, dims in zip(results, outputs, strict=True)]

    def either(*operands: Any) -> list[Any]:
        try:
            return run(*operands)
        except ValueError:  # a result of which every device has another is that of the first
            return run(*operands, whole=False)

    return either


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


def _named(dims: Dims) -> list[str]:
    return [axis for axes in dims for axis in axes]


def _divided(x: Any, dims: Dims, sizes: Mapping[str, int]) -> Any:
    """Returns an array with a leading dim for each axis that divides it, in the order of `sizes`."""
    shape: list[int] = []
    places: dict[str, int] = {}
    for size, names in zip(x.shape, dims, strict=True):
        places.update((name, len(shape) + n) for n, name in enumerate(names))
        shape += [sizes[name] for name in names]
        shape.append(size // math.prod(sizes[name] for name in names))
    leading = [places[axis] for axis in sizes if axis in places]
    return jnp.moveaxis(jnp.reshape(x, shape), leading, range(len(leading))) if leading else x


def _joined(x: Any, dims: Dims, sizes: Mapping[str, int], *, whole: bool) -> Any:
    """Returns the array of blocks that have leading dims as of `_divided`.

    Args:
      whole: False if there is a leading dim for each axis; the first block along those that do not divide it counts.
    """
    named = [axis for axis, size in sizes.items() if axis in _named(dims)]
    for place, axis in () if whole else reversed([*enumerate(axis for axis, size in sizes.items() if size > 1)]):
        if axis not in named:
            x = lax.index_in_dim(x, 0, place, keepdims=False)
    if not named:
        return x
    groups = [[*(named.index(name) for name in names), len(named) + dim] for dim, names in enumerate(dims)]
    shape = [math.prod(x.shape[place] for place in group) for group in groups]
    return jnp.reshape(lax.transpose(x, [place for group in groups for place in group]), shape)
