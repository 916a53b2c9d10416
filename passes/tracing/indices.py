"""Indices that an operation takes but does not depend on: where what is taken is as long as what it is taken from.

A slice of all of a dim begins at 0 whatever its index says, since `dynamic_slice` and `dynamic_update_slice` clamp,
and so does `gather` in the modes that clamp or promise: taking elements of a dim of one is the usual case. Compilers
know, and drop the indices with all that computes them; so a plan must not bring them anywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

_CLAMPING = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def unread(eqn: Any) -> tuple[int, ...]:
    """The positions of the operands of an equation that are indices which can only mean 0."""
    name, params = eqn.primitive.name, eqn.params
    if name == "gather":
        whole = eqn.invars[0].aval.shape
        taken = params["dimension_numbers"].start_index_map
        free = params["mode"] in _CLAMPING and all(params["slice_sizes"][d] == whole[d] for d in taken)
        return (1,) if free else ()
    if name == "dynamic_slice":
        return _whole(1, eqn.invars[0].aval.shape, params["slice_sizes"])
    if name == "dynamic_update_slice":
        return _whole(2, eqn.invars[0].aval.shape, eqn.invars[1].aval.shape)
    return ()


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.make_jaxpr(lambda: lax.full(shape, 0, dtype))().jaxpr


def zeros(aval: Any) -> Any:
    """The jaxpr that makes what stands in for such indices: zeros, which any device has."""
    return _zeros(tuple(aval.shape), aval.dtype)


def _whole(first: int, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(first + i for i, (size, part) in enumerate(zip(shape, sizes, strict=True)) if size == part)
