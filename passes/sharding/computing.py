"""Seconds of computing of every strategy of a group of operations.

They are the roofline of the local work, max(FLOPs / peak, bytes / bandwidth), and the starts of kernels. Bytes are
those that the compiled program moves (`ir.fusion`): of a chain of elementwise operations what it starts with and what
it ends with, wherever these are in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir import kernels
from alpa_lite.ir.graph import Block, Lit, Op, Traced, Value
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir.attention import attention_of
from alpa_lite.passes.ir.primitives import PRODUCTS, work, working_dtype
from alpa_lite.passes.sharding.groups import Dims, Group, factors_in
from alpa_lite.passes.sharding.mesh_tables import Choices, Reached
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.sharding.tables import GroupedStep


@dataclass(eq=False)
class _Work:
    """The work of a group.

    Attributes:
      flops: of all its operations. dtype: whose peak bounds them.
      efficiency: the fraction of the peak that they reach, where it does not depend on sizes; else None.
      starts: kernels.
      moved: dims in the group's factors -> bytes of the tensors with these dims.
      made: values and bytes of the tensors in the layouts of `produced`.
    """

    flops: float = 0.0
    dtype: Any = None
    efficiency: float | None = None
    starts: int = 0
    moved: dict[Dims, float] = field(default_factory=dict)
    made: list[tuple[int, float]] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        """All of them, undivided."""
        return sum(self.moved.values()) + sum(nbytes for _, nbytes in self.made)

    def add(self, dims: Dims, factors: tuple[int, ...], nbytes: float) -> None:
        """Adds bytes of a tensor with such dims of an operation whose factors are these of the group."""
        own = tuple([tuple([factors[f] for f in dim]) for dim in dims])
        self.moved[own] = self.moved.get(own, 0.0) + nbytes


class Computing:
    """The roofline of the local work of groups on one mesh.

    Args:
      cost: of the mesh.
    """

    def __init__(self, step: GroupedStep, cost: MeshCost) -> None:
        self.step, self.rules, self.cost = step, step.rules, cost
        self.values: tuple[Value, ...] = step.traced.graph.values
        self.inputs = set(step.traced.graph.block.inputs)
        arguments = zip(step.traced.graph.block.inputs, step.traced.arguments, strict=False)
        self.batch = {value for value, argument in arguments if argument.role == "batch"}

    def terms(
        self, group: Group, choices: Choices, typical: int, produced: Callable[[int, Choices], Reached]
    ) -> np.ndarray:
        """[3, strategies] seconds that the FLOPs of one group take, its bytes, and its kernels to start, for each run.

        The larger of the first two and the third are its seconds.

        Args:
          typical: the group that shows what groups of this colour move, since the first and the last of a model's
            layers are fused with other neighbours than all those between.
          produced: the layouts in which a value may be made, by the strategies of its group.
        """
        key = group.index, typical
        if key not in self.step.works:
            self.step.works[key] = self.work(self.step.grouping.groups[typical])
        found = self.step.works[key]
        moved = np.zeros(len(choices.strategies))
        for dims, nbytes in found.moved.items():
            moved += nbytes / choices.cut(dims)
        for value, nbytes in found.made:
            made = produced(value, choices)
            moved += (nbytes / made.blocks)[made.klass]
        rate = np.array([self.cost.compute(1.0, 0.0, found.dtype, e) for e in self.efficiencies(group, choices, found)])
        byte = self.cost.compute(0.0, 1.0, found.dtype)
        starts = np.full(len(moved), found.starts * self.cost.cluster.kernel_start)
        return np.array([found.flops / choices.cuts * rate, moved * byte, starts])

    def work(self, group: Group) -> _Work:
        """Returns the work of a group, which is the same for all strategies."""
        out = _Work()
        for number, factors in zip(group.ops, group.op_factors, strict=True):
            op, moved = self.step.grouping.ops[number], self.step.moved[number]
            rule = self.rules[op.key]
            out.dtype = working_dtype(op, self.values) or out.dtype
            out.flops += work(op, rule, self.values)
            out.starts += moved.starts
            out.efficiency = attention_efficiency(op, self.values, self.cost.cluster) or out.efficiency
            if op.primitive is KERNEL:
                avals = [a.aval if isinstance(a, Lit) else self.values[a] for a in op.operands]
                inner = kernels.inner_bytes(op.params["kernel"], kernels.types_of(avals))
                parallel = tuple([(f,) for f, factor in enumerate(rule.factors) if factor.kind in ("parallel", "sum")])
                if inner:
                    out.add(parallel, factors, inner)
            for dims, nbytes in zip(rule.operands, moved.reads, strict=True):
                if nbytes:
                    out.add(dims, factors, nbytes)
            for value, dims, nbytes in zip(op.results, rule.results, moved.writes, strict=True):
                if nbytes and group.kind == "heavy":
                    out.made.append((value, nbytes))
                elif nbytes:
                    out.add(dims, factors, nbytes)
        for value in self.step.homes_of.get(group.index, ()):
            if value in self.inputs:
                # The batch is brought in. Of state a smaller block is the better one, if nothing else decides.
                share = 1.0 if value in self.batch else _BLOCK
                out.made.append((value, share * self.values[value].nbytes))
        return out

    def efficiencies(self, group: Group, choices: Choices, found: _Work) -> Sequence[float | None]:
        """Returns the share of the peak that operations reach, by strategy (at a product's local sizes); or None."""
        op = self.step.grouping.ops[group.ops[0]] if group.kind == "heavy" else None
        if op is None or op.name not in PRODUCTS:
            return [found.efficiency] * (len(choices.strategies) if op else 1)
        left, right = map(factors_in, self.rules[op.key].operands[:2])
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


def attention_efficiency(op: Op, values: Sequence[Value], cluster: Cluster) -> float | None:
    """The fraction of the peak that an operation reaches if it is a pass of attention whose kernel is known."""
    found = attention_of(op, values)
    return None if found is None else cluster.attention(found.kernel, backward=found.backward)


#: What an argument that is kept costs, as a share of reading it.
_BLOCK = 0.01


def at_peak(step: GroupedStep, cost: MeshCost, space: Space) -> float:
    """Seconds of a step in equal parts on all devices, at the rate of large products: no plan of any mesh takes less.

    However a group is cut, each of D devices computes no less than 1 / D of its FLOPs, and moves no less than 1 / D of
    its bytes: the roofline of a group on one device, divided by D, is a bound on each mesh. Every device starts each
    kernel.

    Args:
      space: of a mesh, whose groups have been priced.
    """
    total = 0.0
    for node in space.nodes:
        work = step.works.get((node.group, node.members[len(node.members) // 2]))
        if work is not None:
            runs = step.grouping.groups[node.group].trips * len(node.members)
            computed = cost.compute(work.flops, work.bytes, work.dtype, work.efficiency)
            total += runs * (computed / cost.cluster.num_devices + work.starts * cost.cluster.kernel_start)
    return total


def products_bound(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster) -> float:
    """Seconds that the products of a step take on all devices at the rate of large ones: no plan takes less.

    A loop of unknown trip count is counted once, and of branches none.
    """

    def of_block(block: Block) -> float:
        total = 0.0
        for op in block.ops:
            if op.name in PRODUCTS and not _jax.is_computed_again(op.source):
                rate = cluster.peak(working_dtype(op, values)) * cluster.matmul_efficiency
                total += work(op, rules[op.key], values) / rate
            elif op.name != "cond":
                trips = op.params["length"] if op.name == "scan" else 1
                total += trips * sum(map(of_block, op.bodies))
        return total

    values = traced.graph.values
    return of_block(traced.graph.block) / cluster.num_devices
