"""The notes of a plan: the user's shardings, overlap, and attention that a fused kernel would do faster.

Of the user's shardings there is one note for each kind, read from the planned stages, with the reason if it is not met.

Attention that writes its scores to memory is priced next to a fused kernel in its place. Scores are the result of a
product over pairs of a query and a key that becomes, element by element and by a softmax, an operand of another one.
Everything that reads or writes a value of that shape is taken to be a part of attention, forward and backward. A fused
kernel does the same products, and in the backward pass the first of them again (10 FLOPs for 8), at its own rate
(`Cluster.attention_efficiency`); where scores are masked, half of them, as under a causal mask.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.ir import units
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.costs.flops import flops_of, working_dtype
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.lowering.program import computes
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.space import fits
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.plan.pins import Wish, Wishes

MAX_CONSTRAINT_NOTES = 12
"""The most notes on the user's shardings; the others are counted."""

KERNELS = {
    "cuda": ("cudnn", 'jax.nn.dot_product_attention(implementation="cudnn")'),
    "tpu": ("splash_attention", "jax.experimental.pallas.ops.tpu.splash_attention"),
}
"""By platform, the fused kernel of JAX, and how it is called."""

MIN_KERNEL_GAIN = 0.01
"""The share of a step that a kernel has to save to be mentioned."""


def plan_notes(staged: Staged, cluster: Cluster) -> tuple[str, ...]:
    """Returns the notes of a plan, each once."""
    measured = f"prices measured on the devices: {', '.join(cluster.measured)}"
    notes = (
        *staged.traced.notes,
        *staged.loop.notes,
        staged.division.idle_devices,
        f"{measured}; all other prices are those of the preset" if cluster.measured else "",
        *_overlapped(staged.stages, cluster),
        *_attention_notes(staged, cluster),
    )
    return tuple(dict.fromkeys(filter(None, notes)))


def _overlapped(stages: Sequence[PlannedStage], cluster: Cluster) -> list[str]:
    """Returns notes on overlap with computing: its collectives, scheduler and memory; none where overlap is off."""
    if not cluster.overlap:
        return []
    if not cluster.has_overlap:
        return [f"overlap: nothing overlaps on {cluster.platform}, whose compiler runs each collective to its end"]
    ahead = max((found.prefetched_bytes for stage in stages for found in stage.overlap.values()), default=0)
    kinds = ", ".join(kind.replace("_", "-") for kind in sorted(cluster.hidden_kinds))
    options = ", ".join(f"{name}={value}" for name, value in cluster.compiler_options.items())
    scheduler = f"XLA, which is asked by {options}," if options else "XLA, by itself on this platform,"
    notes = [
        f"overlap: {kinds} of gradients and parameters hide behind computing as far as two streams allow "
        f"(passes/lowering/overlap.py) and {scheduler} schedules them so",
        "overlap: the objective and alternatives of the solver are at full prices, of which nothing hides",
    ]
    if ahead:
        notes.append(f"overlap: a gather ahead of its use holds up to {units.nbytes(ahead)} more per device")
    return notes


def constraint_notes(staged: Staged, wishes: Wishes) -> tuple[str, ...]:
    """Returns notes on the step's own constraints, and on annotations and arrays: applied, or the reason why not.

    Entries of `Manual` are the method of the plan, and need no note.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for stage in staged.stages:
        mesh = stage.program.mesh
        for path, what, wish, shape, layout in (*_of_values(stage), *_of_arguments(stage, wishes)):
            why = fits(wish, shape, mesh) or ("" if _fulfils(layout, wish, mesh) else f"the plan has {layout}")
            found.setdefault((what, why), []).append(format_path(path))
    notes = []
    for (what, why), paths in found.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        times = f" ({len(paths)} times)" if len(paths) > 1 and not paths[0] else ""
        of = f" on {paths[0]}{more}" if paths[0] else ""
        notes.append(f"{what}{of}: {f'not applied: {why}' if why else 'applied'}{times}")
    more = len(notes) - MAX_CONSTRAINT_NOTES
    return (*notes[:MAX_CONSTRAINT_NOTES], f"{more} more of the user's shardings") if more > 0 else tuple(notes)


_Said = tuple[str, str, Wish, tuple[int, ...], Layout]
"""A constraint of the user: the argument's path, if it is on one; how it is called; what it fixes; the shape and the
layout of its value in the plan."""


def _of_values(stage: PlannedStage) -> Iterator[_Said]:
    """Yields the constraints on values."""
    for item in (item for item in computes(stage.program.body.instructions) if item.op.name == primitives.CONSTRAINT):
        op = item.op
        wish, shape = Wish(op.params["dims"], op.params["why"]), stage.graph.traced.graph.values[op.results[0]].shape
        what = f"{wish.why} at {_jax.source_line(op.source)} fixes {list(shape)} to {_spec(wish.dims)}"
        yield "", what, wish, shape, item.form.results[0]


def _of_arguments(stage: PlannedStage, wishes: Wishes) -> Iterator[_Said]:
    """Yields the constraints on annotated arguments."""
    traced = stage.graph.traced
    inputs = zip(traced.arguments, stage.program.inputs, traced.graph.block.inputs, strict=False)
    for argument, layout, value in inputs:
        wish = wishes.leaf(argument.path)
        if wish is not None and not wishes.names_leaf(argument.path):
            yield argument.path, wish.why, wish, traced.graph.values[value].shape, layout


def _fulfils(layout: Layout, wish: Wish, mesh: LogicalMesh) -> bool:
    """Returns whether a layout has the axes that a constraint requires."""
    real = [None if axes is None else tuple(a for a in axes if mesh.axis_size(a) > 1) for axes in wish.dims]
    return all(axes is None or axes == have for axes, have in zip(real, layout.dims, strict=False))


def _spec(dims: tuple[Axes | None, ...]) -> str:
    """Returns the axes of dims, as a PartitionSpec prints them, a free dim as UNCONSTRAINED."""
    entries = ("UNCONSTRAINED" if a is None else "None" if not a else repr(a[0] if len(a) == 1 else a) for a in dims)
    return f"P({', '.join(entries)})"


def _attention_notes(staged: Staged, cluster: Cluster) -> list[str]:
    """Returns a note for a step in which a fused kernel would save something."""
    kernel, call = KERNELS.get(cluster.platform, ("", ""))
    if cluster.attention(kernel, backward=False) is None:
        return []
    taken = [_seconds(stage, cluster, kernel) for stage in staged.stages]
    now, fused = (sum(each) / max(1, len(staged.program.submeshes)) for each in zip(*taken, strict=True))
    if now - fused < MIN_KERNEL_GAIN * staged.seconds:
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
