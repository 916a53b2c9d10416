"""Seconds of computing of every strategy of a group of operations.

They are the roofline of the local work, max(FLOPs / peak, bytes / bandwidth). Light operations fuse, so a group pays
the bytes that enter and leave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from alpa_lite.cost import MeshCost
from alpa_lite.graph import Value
from alpa_lite.layout import Layout
from alpa_lite.passes.ir.primitives import PRODUCTS, work, working_dtype
from alpa_lite.passes.sharding.choices import Choices
from alpa_lite.passes.sharding.groups import Group
from alpa_lite.passes.sharding.tables import Shared
from alpa_lite.strategy import Rule


class Computing:
    """The roofline of the local work of groups on one mesh.

    Args:
      rules: `Op.key` -> its rule.
      cost: of the mesh.
      shared: the grouped step.
      produced: (value, strategies of its group) -> the layouts in which it may be made, and which of them each strategy
        leads to.
    """

    def __init__(
        self,
        rules: Mapping[object, Rule],
        cost: MeshCost,
        shared: Shared,
        produced: Callable[[int, Choices], tuple[tuple[Layout, ...], np.ndarray]],
    ):
        self.rules, self.cost, self.mesh, self.shared, self.produced = rules, cost, cost.mesh, shared, produced
        self.values: tuple[Value, ...] = shared.traced.graph.values
        self.inputs = set(shared.traced.graph.block.inputs)
        self.part_counts: dict[Layout, int] = {}

    def seconds(self, group: Group, choices: Choices) -> np.ndarray:
        """[strategies] seconds of the operations of one group: FLOPs, or bytes that enter and leave it."""
        moved = np.zeros(len(choices.strategies))
        for demand in self.shared.arriving.get(group.index, ()):
            if demand.op >= 0:
                moved += self.values[demand.value].nbytes / choices.cut(demand.dims)
        for value in self.shared.homes_of.get(group.index, ()):
            leaves = value in self.shared.grouping.defined and group.ops and self.escapes(value, group.index)
            # Arguments are read once, and the batch is brought in: a smaller block is the better one.
            times = bool(leaves) + (value in self.inputs)
            if times:
                layouts, klass = self.produced(value, choices)
                moved += times * (self.values[value].nbytes / np.array([self.parts(la) for la in layouts]))[klass]
        flops, dtype = 0.0, None
        for number in group.ops:
            op = self.shared.grouping.ops[number]
            dtype = working_dtype(op, self.values) or dtype
            flops += work(op, self.rules[op.key], self.values)
        rate = np.array([self.cost.compute(1.0, 0.0, dtype, e) for e in self.efficiencies(group, choices)])
        return np.maximum(flops / choices.parts.prod(1) * rate, moved * self.cost.compute(0.0, 1.0, dtype))

    def efficiencies(self, group: Group, choices: Choices) -> Sequence[float | None]:
        """The share of the peak that a product reaches at its local sizes, by strategy; None for what is none there."""
        op = self.shared.grouping.ops[group.ops[0]] if group.kind == "heavy" else None
        if op is None or op.name not in PRODUCTS:
            return [None] * len(choices.strategies) if op else [None]
        left, right = ({f for dim in dims for f in dim} for dims in self.rules[op.key].operands[:2])
        out, known = [], {}
        for row in choices.parts.astype(int).tolist():
            sizes = {"m": 1, "n": 1, "k": 1, "batch": 1}
            for f, (factor, parts) in enumerate(zip(group.factors, row, strict=True)):
                both = "batch" if f in left and f in right else "m" if f in left else "n"
                sizes["k" if factor.kind == "sum" else both] *= max(1, factor.size // parts)
            key = tuple(sizes.values())
            if key not in known:
                known[key] = self.cost.matmul_efficiency(**sizes)
            out.append(known[key])
        return out

    def escapes(self, value: int, group: int) -> bool:
        """Whether another group uses the value."""
        return any(d.group != group for d in self.shared.uses.get(value, ()))

    def parts(self, layout: Layout) -> int:
        """Into how many blocks a layout cuts a tensor."""
        found = self.part_counts.get(layout)
        if found is None:
            found = self.part_counts[layout] = math.prod(self.mesh.product(a) for a in layout.dims)
        return found
