"""FLOPs of fused attention, whichever kernel computes it.

With b examples, n query heads, t queries, s keys and heads of d features, a pass computes products over the pairs of a
query and a key that the mask leaves, P of t s:

    forward    q kᵀ and p v                                       4 b n d P
    backward   q kᵀ again, and the gradients of p, v, q and k    10 b n d P

    P = t s                        without a mask
    P = t s (1 + 1 / blocks) / 2   causal: a kernel skips whole blocks, and computes those on the diagonal whole
    P = w t - w² / 2               with a window of the w last keys, which are fewer than that

Source: Dao et al., "FlashAttention" (arXiv 2205.14135) and "FlashAttention-2" (arXiv 2307.08691), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.passes.ir import primitives

BLOCK = 128
"""The queries of a block of a kernel: those of cuDNN, of FlashAttention, and of Pallas kernels by default."""

PALLAS = {"splash_m": "splash_attention", "flash_attention": "flash_attention"}
"""Parts of the names of JAX's Pallas kernels, and the kernels' own."""


@dataclass(frozen=True)
class Attention:
    """A pass of fused attention.

    Attributes:
      kernel: as `Cluster.attention_efficiency` names it.
      backward: whether it computes gradients.
      flops: as of the module.
    """

    kernel: str
    backward: bool
    flops: float


def pairs(queries: int, keys: int, *, causal: bool, window: int | None = None) -> float:
    """Pairs of a query and a key that a kernel computes."""
    found = float(queries * keys)
    if causal:
        found *= (1 + 1 / math.ceil(queries / BLOCK)) / 2
    if window is not None and window < keys:
        found = min(found, window * queries - window**2 / 2)
    return found


def attention_of(op: Op, values: Sequence[Value]) -> Attention | None:
    """Returns the pass of fused attention that an operation is; None for any other operation."""
    if op.name == "pallas_call":
        return _pallas(op, values)
    if op.name not in primitives.CUDNN:
        return None
    query, key, value = (_shape(op, values, i) for i in range(3))
    length = 2 if op.params["layout"] else 1
    mask, window = getattr(op.params["mask_type"], "name", ""), op.params.get("sliding_window_length")
    seen = pairs(query[length], key[length], causal="CAUSAL" in mask, window=window or None)
    backward = len(op.results) >= 3
    heads = query[0] * query[3 - length]
    return Attention("cudnn", backward, (10 if backward else 4) * heads * seen * (query[3] + value[3]) / 2)


def _pallas(op: Op, values: Sequence[Value]) -> Attention | None:
    """Returns a pass of JAX's attention kernels for TPUs, which are known by their names.

    Of the backward pass one kernel makes the gradients of keys and values, and one that of queries. A kernel whose
    index maps compute which block is next skips blocks: it is counted as causal.
    """
    name = _jax.pallas_name(op.params)
    kernel = next((known for part, known in PALLAS.items() if part in name), None)
    grid = _jax.pallas_grid(op.params) if kernel else None
    if kernel is None or grid is None:
        return None
    query, key = (_shape(op, values, grid.first + i) for i in range(2))
    part = "dkv" if "dkv" in name else "dq" if "dq" in name else "fwd"
    skips = any(step is None and size > 1 for blocks in grid.blocks[:3] for step, size in blocks[-2:-1])
    seen = pairs(query[-2], key[-2], causal=skips)
    products = {"fwd": 4, "dkv": 6, "dq": 4}[part]
    return Attention(kernel, part != "fwd", products * math.prod(query[:-2]) * query[-1] * seen)


def _shape(op: Op, values: Sequence[Value], number: int) -> tuple[Any, ...]:
    operand = op.operands[number]
    return operand.aval.shape if isinstance(operand, Lit) else values[operand].shape
