"""Pallas kernels as users write them, in interpret mode: attention with its own derivative, and layer normalisation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


def _attend(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    q, k, v = q[0, :, 0], k[0, :, 0], v[0, :, 0]
    scores = q @ k.T / np.sqrt(q.shape[-1])
    largest = scores.max(-1, keepdims=True)
    p = jnp.exp(scores - largest)
    total = p.sum(-1, keepdims=True)
    out[0, :, 0] = (p / total) @ v
    lse[0, 0] = (largest + jnp.log(total))[:, 0]


def _attend_back(q: Any, k: Any, v: Any, out: Any, lse: Any, g: Any, dq: Any, dk: Any, dv: Any) -> None:
    q, k, v, out, g = q[0, :, 0], k[0, :, 0], v[0, :, 0], out[0, :, 0], g[0, :, 0]
    scale = 1 / np.sqrt(q.shape[-1])
    p = jnp.exp(q @ k.T * scale - lse[0, 0][:, None])
    ds = p * (g @ v.T - (g * out).sum(-1, keepdims=True)) * scale
    dq[0, :, 0], dk[0, :, 0], dv[0, :, 0] = ds @ k, ds.T @ q, p.T @ g


def _heads(length: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, length, 1, width), lambda b, h: (b, 0, h, 0))


def _rows(length: int) -> pl.BlockSpec:
    return pl.BlockSpec((1, 1, length), lambda b, h: (b, h, 0))


def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """The attention of q [b, s, h, d] to k and v [b, s, h, d], and the logarithm of its denominators [b, h, s]."""
    b, s, h, d = q.shape
    return pl.pallas_call(
        _attend, grid=(b, h), in_specs=[_heads(s, d)] * 3, out_specs=[_heads(s, d), _rows(s)], interpret=True,
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((b, h, s), q.dtype)],
    )(q, k, v)  # fmt: skip


def backward(kept: Any, g: jax.Array) -> Any:
    """The gradients of q, k and v."""
    b, s, h, d = g.shape
    return tuple(
        pl.pallas_call(
            _attend_back, grid=(b, h), in_specs=[*[_heads(s, d)] * 4, _rows(s), _heads(s, d)], interpret=True,
            out_specs=[_heads(s, d)] * 3, out_shape=[jax.ShapeDtypeStruct(g.shape, g.dtype)] * 3,
        )(*kept, g)
    )  # fmt: skip


def _kept(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    out, lse = forward(q, k, v)
    return out, (q, k, v, out, lse)


@jax.custom_vjp
def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of q, k and v, each [b, s, h, d]."""
    return forward(q, k, v)[0]


flash.defvjp(_kept, backward)


def _normalise(x: Any, scale: Any, out: Any) -> None:
    mean = x[...].mean(-1, keepdims=True)
    out[...] = (x[...] - mean) / jnp.sqrt(((x[...] - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale[...]


def plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalisation of x [b, d] in ordinary operations."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale


@jax.custom_vjp
def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalisation of x [b, d] as a kernel, with the derivative of the ordinary operations."""
    return pl.pallas_call(_normalise, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, scale)


norm.defvjp(lambda x, scale: (norm(x, scale), (x, scale)), lambda kept, g: jax.vjp(plain_norm, *kept)[1](g))
