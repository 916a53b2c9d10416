"""Cost of attention that writes its scores to memory, next to that of a fused kernel in its place.

Scores are the result of a product over pairs of a query and a key that becomes, element by element and by a softmax, an
operand of another product. Everything that reads or writes a value of that shape is taken to be a part of attention,
forward and backward. A fused kernel does the same products, and in the backward pass the first of them again (10 FLOPs
for 8), at its own rate (`Cluster.attention_efficiency`); where scores are masked, half of them, as under a causal mask.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.ir import units
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.passes.costs.flops import flops_of, working_dtype
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.stages.planning import PlannedStage

KERNELS = {
    "cuda": ("cudnn", 'jax.nn.dot_product_attention(implementation="cudnn")'),
    "tpu": ("splash_attention", "jax.experimental.pallas.ops.tpu.splash_attention"),
}
"""By platform, the fused kernel of JAX, and how it is called."""

LEAST = 0.01
"""The share of a step that a kernel has to save to be mentioned."""


def notes(stages: Sequence[PlannedStage], cluster: Cluster, step_seconds: float, submeshes: int) -> list[str]:
    """Returns a note for a step in which a fused kernel would save something."""
    kernel, call = KERNELS.get(cluster.platform, ("", ""))
    if cluster.attention(kernel, backward=False) is None:
        return []
    taken = [_seconds(stage, cluster, kernel) for stage in stages]
    now, fused = (sum(each) / max(1, submeshes) for each in zip(*taken, strict=True))
    if now - fused < LEAST * step_seconds:
        return []
    return [
        f"attention writes its scores to memory: {units.seconds(now)} a step; a fused kernel would take about "
        f"{units.seconds(fused)}: {call}"
    ]


def _seconds(stage: PlannedStage, cluster: Cluster, kernel: str) -> tuple[float, float]:
    """Returns seconds of a stage's attention, as it is and by a fused kernel; none where no scores are written."""
    values, ops = stage.graph.traced.graph.values, stage.grouping.ops
    shapes = score_shapes(ops.values(), values)
    now = fused = 0.0
    for number, op in ops.items():
        touched = [_key(values[v]) for v in (*op.operands, *op.results) if not isinstance(v, Lit)]
        masked = next((shapes[shape] for shape in touched if shape in shapes), None)
        price = stage.prices.operations.get(number)
        if masked is None or price is None:
            continue
        now += price.seconds
        if op.name in primitives.PRODUCTS:
            backward = _jax.derivative(op.source) == "transpose"
            share = cluster.attention(kernel, backward=backward) or 1.0
            flops = flops_of(op, stage.rules[op.key], values) * price.runs * (10 / 8 if backward else 1)
            peak = cluster.peak(working_dtype(op, values))
            fused += flops * (0.5 if masked else 1.0) / stage.mesh_solution.mesh.size / (peak * share)
    return now, fused


def score_shapes(ops: Iterable[Op], values: Sequence[Value]) -> dict[tuple[int, ...], bool]:
    """Returns the shapes of scores, in any order of dims -> whether they are masked."""
    ops = list(ops)
    users: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        for operand in op.operands:
            if not isinstance(operand, Lit):
                users[operand].append(op)
    found: dict[tuple[int, ...], bool] = {}
    for op in ops:
        if op.name != "dot_general" or not op.params["dimension_numbers"][1][0]:
            continue
        scores, operands = op.results[0], op.operands[:2]
        size = math.prod(values[scores].shape)
        least = max(math.prod(a.aval.shape if isinstance(a, Lit) else values[a].shape) for a in operands)
        if size > least and (masked := _becomes_weights(scores, size, users, values)) is not None:
            found[_key(values[scores])] = masked
    return found


def _becomes_weights(
    scores: int, size: int, users: dict[int, list[Op]], values: Sequence[Value]
) -> bool | None:  # fmt: skip
    """Whether scores are masked before a softmax whose result is an operand of a product; None if there is none."""
    waiting, seen, masked, softmax = [(scores, False)], {(scores, False)}, False, None
    while waiting:
        value, normalised = waiting.pop()
        for user in users.get(value, ()):
            if user.name in primitives.PRODUCTS and normalised:
                softmax = True
            if user.name not in primitives.ELEMENTWISE | primitives.RESHAPES:
                continue
            masked = masked or user.name == "select_n"
            for result in user.results:
                state = result, normalised or user.name in ("exp", "exp2")
                if math.prod(values[result].shape) == size and state not in seen:
                    seen.add(state)
                    waiting.append(state)
    return masked if softmax else None


def _key(value: Value) -> tuple[int, ...]:
    return tuple(sorted(value.shape))
