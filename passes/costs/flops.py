"""The work of an operation: its floating-point operations, and the dtype whose peak bounds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from alpa_lite.ir import flops, kernels
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.costs import attention
from alpa_lite.passes.ir.primitives import PRODUCTS


def working_dtype(op: Op, values: Sequence[Value]) -> Any:
    """Returns the dtype whose peak bounds an operation: of a product the one that its operands are brought to.

    Products of bfloat16 that are summed in float32 run at the rate of bfloat16. None for an operation without results.
    """
    if op.name in PRODUCTS:
        left, right = (a.aval.dtype if isinstance(a, Lit) else values[a].dtype for a in op.operands[:2])
        return left if left == right else jnp.promote_types(left, right)
    return values[op.results[0]].dtype if op.results else None


def flops_of(op: Op, rule: Rule, values: Sequence[Value]) -> float:
    """Returns FLOPs of an operation: two per multiply-add of a product or convolution, else one per element.

    Those of fused attention are counted by `costs.attention`, a kernel's in what it does; any other operation that its
    user described is taken to be an einsum.
    """
    if op.name in PRODUCTS:
        return 2.0 * math.prod(f.size for f in rule.factors)
    if op.primitive is KERNEL:
        operands = [a.aval if isinstance(a, Lit) else values[a] for a in op.operands]
        return kernels.flops_of(op.params["kernel"], kernels.types_of(operands))
    found = attention.attention_of(op, values)
    if found is not None:
        return found.flops
    if op.name == "pallas_call":
        return flops.pallas_flops(op.params)
    if rule.source == "registered":
        return 2.0 * math.prod(f.size for f in rule.factors)
    tensors = [v for v in (*op.operands, *op.results) if not isinstance(v, Lit)]
    return float(max((math.prod(values[v].shape) for v in tensors), default=1))
