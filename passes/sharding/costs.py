"""Costs of computing and of resharding, in seconds.

Every strategy of a group of operations costs the roofline of its local work, max(FLOPs / peak, bytes / bandwidth), and
the starts of its kernels. Bytes are those that the compiled program moves (`costs.fusion`): of a chain of elementwise
operations what it starts with and what it ends with, wherever these are in groups.

Every pair of layouts of a tensor has one pair of coefficients, latency and seconds per byte of the whole tensor: the
same for all tensors, or one for each size where the cluster has measured collectives, whose rate depends on the
payload.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir import kernels
from alpa_lite.ir.graph import Block, Lit, Op, Traced, Value
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh, find_moved_axes, reshard_steps
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.costs.attention import attention_of
from alpa_lite.passes.costs.flops import flops_of, working_dtype
from alpa_lite.passes.ir.primitives import PRODUCTS
from alpa_lite.passes.sharding.groups import Dims, Group, Grouping, factors_in
from alpa_lite.passes.sharding.space import Choices, LayoutClasses, Node, Space, block_count
from alpa_lite.passes.sharding.tables import GroupedStep


@dataclass(eq=False)
class _Work:
    """The work of a group.

    Attributes:
      flops: of all its operations. dtype: whose peak bounds them.
      efficiency: the fraction of the peak that they reach, where it does not depend on sizes; else None.
      starts: kernels.
      tensor_bytes: dims in the group's factors -> bytes of the tensors with these dims.
      made_tensors: values and bytes of the tensors in the layouts of `produced`.
    """

    flops: float = 0.0
    dtype: Any = None
    efficiency: float | None = None
    starts: int = 0
    tensor_bytes: dict[Dims, float] = field(default_factory=dict)
    made_tensors: list[tuple[int, float]] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        """All of them, undivided."""
        return sum(self.tensor_bytes.values()) + sum(nbytes for _, nbytes in self.made_tensors)

    def add(self, dims: Dims, factors: tuple[int, ...], nbytes: float) -> None:
        """Adds bytes of a tensor with such dims of an operation whose factors are these of the group."""
        own = tuple([tuple([factors[f] for f in dim]) for dim in dims])
        self.tensor_bytes[own] = self.tensor_bytes.get(own, 0.0) + nbytes


def group_terms(
    step: GroupedStep, cost: MeshCost, group: Group, choices: Choices, typical: int,
    produced: Callable[[int, Choices], LayoutClasses],
) -> np.ndarray:  # fmt: skip
    """[3, strategies] seconds that the FLOPs of one group take, its bytes, and its kernels to start, for each run.

    The larger of the first two and the third are its seconds.

    Args:
      cost: of the mesh.
      typical: the group that shows what groups of this colour move, since the first and the last of a model's
        layers are fused with other neighbours than all those between.
      produced: the layouts in which a value may be made, by the strategies of its group.
    """
    key = "work", group.index, typical
    found = step.cache.get_or_make(key, lambda: _work_of(step, step.grouping.groups[typical], cost.cluster))
    moved = np.zeros(len(choices.strategies))
    for dims, nbytes in found.tensor_bytes.items():
        moved += nbytes / choices.cut(dims)
    for value, nbytes in found.made_tensors:
        made = produced(value, choices)
        moved += (nbytes / made.blocks)[made.klass]
    shares = _efficiencies(step, cost, group, choices, found.efficiency)
    rate = np.array([cost.compute(1.0, 0.0, found.dtype, share) for share in shares])
    byte = cost.compute(0.0, 1.0, found.dtype)
    starts = np.full(len(moved), found.starts * cost.cluster.kernel_start)
    return np.array([found.flops / choices.parts.prod(1) * rate, moved * byte, starts])


def typical_group(grouping: Grouping, members: Sequence[int]) -> int:
    """Returns the group in the middle of tied ones."""
    every = grouping.unfold(members)
    return every[len(every) // 2]


def _work_of(step: GroupedStep, group: Group, cluster: Cluster) -> _Work:
    """Returns the work of a group, which is the same for all strategies."""
    out, values = _Work(), step.traced.graph.values
    for number, factors in zip(group.ops, group.op_factors, strict=True):
        op, moved = step.grouping.ops[number], step.traffic[number]
        rule = step.rules[op.key]
        out.dtype = working_dtype(op, values) or out.dtype
        out.flops += flops_of(op, rule, values)
        out.starts += moved.starts
        out.efficiency = attention_efficiency(op, values, cluster) or out.efficiency
        if op.primitive is KERNEL:
            avals = [a.aval if isinstance(a, Lit) else values[a] for a in op.operands]
            inner = kernels.inner_bytes(op.params["kernel"], kernels.types_of(avals))
            parallel = tuple([(f,) for f, factor in enumerate(rule.factors) if factor.kind in ("parallel", "sum")])
            if inner:
                out.add(parallel, factors, inner)
        for dims, nbytes in zip(rule.operands, moved.reads, strict=True):
            if nbytes:
                out.add(dims, factors, nbytes)
        for value, dims, nbytes in zip(op.results, rule.results, moved.writes, strict=True):
            if nbytes and group.kind == "heavy":
                out.made_tensors.append((value, nbytes))
            elif nbytes:
                out.add(dims, factors, nbytes)
    for value in step.homes_of.get(group.index, ()):
        if value in step.roles:
            # The batch is brought in. Of state a smaller block is the better one, if nothing else decides.
            share = 1.0 if step.roles[value] == "batch" else _BLOCK
            out.made_tensors.append((value, share * values[value].nbytes))
    return out


def _efficiencies(
    step: GroupedStep, cost: MeshCost, group: Group, choices: Choices, efficiency: float | None
) -> Sequence[float | None]:  # fmt: skip
    """Returns the share of the peak that operations reach, by strategy: at a product's local sizes, else as given."""
    op = step.grouping.ops[group.ops[0]] if group.kind == "heavy" else None
    if op is None or op.name not in PRODUCTS:
        return [efficiency] * (len(choices.strategies) if op else 1)
    left, right = map(factors_in, step.rules[op.key].operands[:2])
    out, known = [], {}
    for row in choices.parts.astype(int).tolist():
        sizes = {"m": 1, "n": 1, "k": 1, "batch": 1}
        for f, (factor, parts) in enumerate(zip(group.factors, row, strict=True)):
            both = "batch" if f in left and f in right else "m" if f in left else "n"
            sizes["k" if factor.kind == "sum" else both] *= max(1, factor.size // parts)
        key = tuple(sizes.values())
        if key not in known:
            known[key] = cost.matmul_efficiency(**sizes)
        out.append(known[key])
    return out


def attention_efficiency(op: Op, values: Sequence[Value], cluster: Cluster) -> float | None:
    """Returns the fraction of the peak that an operation reaches if it is a pass of attention whose kernel is known."""
    found = attention_of(op, values)
    return None if found is None else cluster.attention(found.kernel, backward=found.backward)


#: What an argument that is kept costs, as a share of reading it.
_BLOCK = 0.01


def seconds_at_peak(step: GroupedStep, cost: MeshCost, space: Space) -> float:
    """Seconds of a step in equal parts on all devices, at the rate of large products: no plan of any mesh takes less.

    However a group is cut, each of D devices computes no less than 1 / D of its FLOPs, and moves no less than 1 / D of
    its bytes: the roofline of a group on one device, divided by D, is a bound on each mesh. Every device starts each
    kernel.

    Args:
      space: of a mesh, whose groups have been priced.
    """
    total = 0.0
    for node, work in _priced(step, space):
        computed = cost.compute(work.flops, work.bytes, work.dtype, work.efficiency) / cost.cluster.num_devices
        runs = step.grouping.groups[node.group].trips * node.count
        total += runs * (computed + work.starts * cost.cluster.kernel_start)
    return total


def divided_bound(step: GroupedStep, cost: MeshCost, space: Space) -> float:
    """Returns seconds of a step whose groups are divided among all devices in any way: no plan takes less.

    The rooflines of groups on one device add up to what D devices compute together. One of them at least starts each
    kernel, and what a checkpoint computes again may be computed once.

    Args:
      space: of any mesh of the devices, whose groups have been priced.
    """
    total = 0.0
    for member in (step.grouping.groups[member] for node, _ in _priced(step, space) for member in node.members):
        if not any(_jax.is_computed_again(step.grouping.ops[number].source) for number in member.ops):
            work = _work_of(step, member, cost.cluster)
            computed = cost.compute(work.flops, work.bytes, work.dtype, work.efficiency)
            total += member.copies * member.trips * (computed + work.starts * cost.cluster.kernel_start)
    return total / cost.cluster.num_devices


def _priced(step: GroupedStep, space: Space) -> Iterator[tuple[Node, _Work]]:
    """Yields the nodes that do work, with that of a typical group."""
    for node in space.nodes:
        if work := step.cache.get(("work", node.group, typical_group(step.grouping, node.members))):
            yield node, work


def products_bound(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster) -> float:
    """Returns seconds that the products of a step take on all devices at the rate of large ones: no plan takes less.

    A loop of unknown trip count is counted once, and of branches none.
    """

    def of_block(block: Block) -> float:
        total = 0.0
        for op in block.ops:
            if op.name in PRODUCTS and not _jax.is_computed_again(op.source):
                rate = cluster.peak(working_dtype(op, values)) * cluster.matmul_efficiency
                total += flops_of(op, rules[op.key], values) / rate
            elif op.name != "cond":
                trips = op.params["length"] if op.name == "scan" else 1
                total += trips * sum(map(of_block, op.bodies))
        return total

    values = traced.graph.values
    return of_block(traced.graph.block) / cluster.num_devices


def combinable_kinds(cost: MeshCost) -> frozenset[str]:
    """Returns the kinds of collectives that the compiler joins: on CPU its combiner joins all-reduces alone."""
    if cost.cluster.platform == "cpu":
        return frozenset({"all_reduce"})
    return frozenset({"all_reduce", "reduce_scatter", "all_gather"})


@functools.lru_cache(maxsize=200_000)
def _steps(mesh: LogicalMesh, changes: tuple[tuple[Axes, Axes], ...]) -> tuple[tuple[str, Axes, int], ...] | None:
    """The collectives of resharding: (kind, axes, blocks that the payload is one of); None where it cannot be done.

    A dim that does not change takes no part in any step: the blocks are those of a tensor that it does not cut. Nor do
    the names of the axes matter.

    Args:
      changes: the sums before and after, then the axes of each dim that changes.
    """
    names: dict[str, str] = {}

    def renamed(axes: Axes) -> Axes:
        return tuple([names.setdefault(a, f"{len(names)}") for a in axes])

    sums, *differ = [(renamed(before), renamed(after)) for before, after in changes]
    ends = [Layout(tuple([dims[end] for dims in differ]), sums[end]) for end in (0, 1)]
    moves = reshard_steps(*ends)
    if moves is None:
        return None
    real = {short: name for name, short in names.items()}
    size = {short: mesh.axis_size(name) for short, name in real.items()}
    steps: list[tuple[str, Axes, int]] = []
    for move in moves:
        axes = move.axes
        if move.kind == "collective_permute":
            order = move.source.dims[move.dim]
            axes = tuple([order[i] for i in find_moved_axes(order, axes, tuple([size[x] for x in order]))])
        if move.kind != "slice":
            layout = move.source if move.kind == "reduce_scatter" else move.target
            cut = math.prod([size[x] for some in layout.dims for x in some])
            steps.append((move.kind, tuple([real[x] for x in axes]), cut))
    return tuple(steps)


@functools.lru_cache(maxsize=1024)
def _changes(
    mesh: LogicalMesh, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]
) -> tuple[tuple[tuple[tuple[str, Axes, int], ...] | None, ...], np.ndarray, np.ndarray]:
    """Returns how P layouts differ from Q others.

    Returns:
      All steps that any change takes, each as of `_steps`; [P, Q] the number of a change's steps among them; [P, Q]
      into how many blocks the dims that do not change cut the tensor.
    """
    every = (axes for layout in (*produced, *wanted) for axes in (*layout.dims, layout.partial))
    orders = {axes: n for n, axes in enumerate(dict.fromkeys(every))}
    parts = np.array([mesh.product(axes) for axes in orders])

    def coded(layouts: tuple[Layout, ...]) -> tuple[np.ndarray, np.ndarray]:
        """[layouts, dims] the number of each dim's axes, and [layouts] that of the sums."""
        dims = np.array([[orders[axes] for axes in layout.dims] for layout in layouts], dtype=np.int64)
        return dims.reshape(len(layouts), -1), np.array([orders[layout.partial] for layout in layouts])

    (sources, before), (goals, after) = coded(produced), coded(wanted)
    changes = sources[:, None, :] != goals[None, :, :]
    unchanged = np.ones(changes.shape[:2])
    number, base = before[:, None] * len(orders) + after[None, :] + 1, len(orders) ** 2 + 1
    if (int(changes.sum(2).max(initial=0)) + 1) * math.log2(base) > 62:
        number = number.astype(object)  # integers of any size
    for dim in range(sources.shape[1]):  # the sums, then the changes in order, each a digit from 1 to base - 1
        changed, mine, theirs = changes[..., dim], sources[:, None, dim], goals[None, :, dim]
        unchanged = np.where(changed, unchanged, unchanged * parts[mine])
        number = np.where(changed, number * base + mine * len(orders) + theirs + 1, number)
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    steps: dict[tuple[tuple[str, Axes, int], ...] | None, int] = {}
    kinds = []
    for row, column in zip(*np.unravel_index(first, unchanged.shape), strict=True):
        src, dst = produced[row], wanted[column]
        differ = [pair for pair in zip(src.dims, dst.dims, strict=True) if pair[0] != pair[1]]
        found = _steps(mesh, ((src.partial, dst.partial), *differ))
        kinds.append(steps.setdefault(found, len(steps)))
    return tuple(steps), np.array(kinds)[number.reshape(unchanged.shape)], unchanged


@dataclass(frozen=True, eq=False)
class Moves:
    """The costs of resharding tensors of one shape from some layouts to others.

    Attributes:
      joint, alpha, beta: [P, Q] as of `_pairs`; alpha is inf where the shape does not divide, too.
      copies: (q, into how many blocks layout q cuts, [P] one where resharding to it costs anything, else zero), of
        those q that cost anything.
    """

    joint: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    copies: tuple[tuple[int, int, np.ndarray], ...]


def moves(
    cost: MeshCost, shape: tuple[int, ...], nbytes: int, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]
) -> Moves:  # fmt: skip
    """Returns the costs of resharding tensors of a shape and of `nbytes` bytes from some layouts to others."""
    joint, alpha, beta = _pairs(cost, produced, wanted, float(nbytes) if cost.cluster.collectives else 0.0)
    costly = (joint + alpha + beta) > 0
    which = np.flatnonzero(costly.any(0)).tolist()
    copies = tuple([(q, block_count(wanted[q], cost.mesh), costly[:, q] * 1.0) for q in which])
    refused = [not divides(shape, layout, cost.mesh) for layout in wanted]
    return Moves(joint, np.where(refused, math.inf, alpha), beta, copies)


@functools.lru_cache(maxsize=1024)
def _pairs(cost: MeshCost, produced: tuple[Layout, ...], wanted: tuple[Layout, ...], nbytes: float) -> np.ndarray:
    """[3, P, Q] coefficients of every pair of layouts of one rank, of resharding from one to the other.

    These are seconds of latency of steps that may be combined, other latency, and seconds per byte of the tensor. The
    latency is inf where it cannot be done. Layers, stages and later plans on equal clusters and meshes share them.

    Args:
      nbytes: of the tensor, where collectives have been measured by size, else 0.
    """
    (every, kind, unchanged), joins = _changes(cost.mesh, produced, wanted), combinable_kinds(cost)
    size = len(every)
    if nbytes:  # what is sent depends on the dims that do not change, too
        cuts, cut = np.unique(unchanged, return_inverse=True)
        kind = kind + size * cut.reshape(kind.shape)
    kinds, kind = np.unique(kind, return_inverse=True)
    found = np.zeros((3, len(kinds)))
    for n, number in enumerate(kinds.tolist()):
        steps = every[number % size]
        if steps is None:
            found[1, n] = math.inf
            continue
        own = nbytes / float(cuts[number // size]) if nbytes else 0.0
        for name, axes, blocks in steps:
            alpha, beta = cost.coefficients(name, axes, own / blocks)
            found[int(name not in joins), n] += alpha
            found[2, n] += beta / blocks
    table = found[:, kind.reshape(unchanged.shape)]
    table[2] /= unchanged
    table.flags.writeable = False
    return table


def divides(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Returns whether every dim divides over the devices that shard it."""
    return all(size % mesh.product(axes) == 0 for size, axes in zip(shape, layout.dims, strict=True))
