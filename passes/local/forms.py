"""The *local form* of an operation: the computation of each device for its own block.

The problem. A strategy shards an operation's factors over mesh axes. The step is emitted as one `jax.shard_map`, in
which every device runs every operation on its own blocks, so for each operation and each sharding we need the local
operation whose results are the blocks of the global results.

The contract. Let a form take operands in layouts L_1 .. L_n and give results in layouts R_1 .. R_m. For all
operands, cutting them into blocks by the L, running the form on every device, and joining the blocks by the R, with
the sum over the partial axes of each R, gives the results of the global operation: bit for bit where no sum of
floats is regrouped. `collectives` are exactly those that the form issues.

The rules. For a factor that is

- parallel: the same primitive on local sizes; parameters that hold sizes get the local ones (`FORMS`);
- sum: likewise, and the results are partial sums over its axes;
- max, min, special: a form of its own, in `local.reductions`, `local.indexing`, `local.windows` and `local.random`.

A layout shards the leading part of a dim only: of a dim made of factors (i, j), j may be sharded if i has one
element left on each device. An assignment that no form exists for gives None, and strategies leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alpa_lite.ir.graph import Op, Value
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local import effects, indexing, random, reductions, registered, windows
from alpa_lite.passes.local.types import LocalForm, Setting


def local_form(
    op: Op, rule: Rule, assignment: tuple[Axes, ...], values: Sequence[Value], mesh: LogicalMesh
) -> LocalForm | None:
    """Returns the local form of an operation under an assignment of mesh axes to its factors.

    Args:
      op: any operation but scan, while and cond.
      rule: its factors.
      assignment: for each factor the axes that shard it, major to minor.
      values: of the graph, by value number.
      mesh: the logical mesh.

    Returns:
      The form, or None where this assignment has none.
    """
    sharded = [f for f, axes in enumerate(assignment) if axes]
    given = registered.maker(op)
    maker = (given or FORMS.get(op.name)) if sharded else _ANYWHERE.get(op.name, Setting.bind)
    if maker is None or not (given or _kinds_fit(op.name, maker, rule.factors, sharded)):
        return None
    key = assignment, mesh
    if key not in rule.placements:
        rule.placements[key] = _placed(rule, assignment, sharded, mesh)
    placed = rule.placements[key]
    if placed is None:
        return None
    operands, results, repeats = placed
    if repeats and not (op.name in primitives.PAIRWISE and _disjoint(operands)):
        return None
    setting = Setting(op, rule, assignment, values, mesh, operands, results)
    if any(rule.factors[f].kind == "special" for f in sharded) and not _divides(setting):
        return None
    return maker(setting)


def _placed(
    rule: Rule, assignment: tuple[Axes, ...], sharded: Sequence[int], mesh: LogicalMesh
) -> tuple[tuple[Layout, ...], tuple[Layout, ...], bool] | None:
    """Returns the layouts of operands and of results, and whether an axis shards two factors; None if there are none.

    A device would then hold blocks that do not belong together.
    """
    parts = _parts(rule, assignment, sharded, mesh)
    if parts is None:
        return None
    operands = _layouts(rule.operands, rule, assignment, parts, ())
    partial = tuple(
        a for a in mesh.axis_names if any(a in assignment[f] for f in sharded if rule.factors[f].kind == "sum")
    )
    results = _layouts(rule.results, rule, assignment, parts, partial)
    if operands is None or results is None:
        return None
    axes = [axis for f in sharded for axis in assignment[f]]
    return operands, results, len(set(axes)) != len(axes)


def _parts(
    rule: Rule, assignment: tuple[Axes, ...], sharded: Sequence[int], mesh: LogicalMesh
) -> dict[int, int] | None:
    """Returns into how many parts each sharded factor is cut; None where one must not be, or does not divide."""
    parts = {}
    for f in sharded:
        factor, count = rule.factors[f], mesh.product(assignment[f])
        if factor.kind == "replicate" or factor.size % count or not factor.size:
            return None
        parts[f] = count
    return parts


def _disjoint(layouts: Sequence[Layout]) -> bool:
    return all(len(layout.used_axes) == sum(len(axes) for axes in layout.dims) for layout in layouts)


def _layouts(
    tensors: Sequence[Sequence[Sequence[int]]],
    rule: Rule,
    assignment: tuple[Axes, ...],
    parts: Mapping[int, int],
    partial: Axes,
) -> tuple[Layout, ...] | None:
    """The layout of each tensor, or None where one would have to shard a part of a dim that is not the leading one."""
    out = []
    for tensor in tensors:
        dims = []
        for factors in tensor:
            if len(factors) == 1:
                dims.append(assignment[factors[0]])
                continue
            axes: Axes = ()
            leading = True
            for f in factors:
                if f in parts:
                    if not leading:
                        return None
                    axes += assignment[f]
                leading = leading and parts.get(f, 1) == rule.factors[f].size
            dims.append(axes)
        used = {axis for axes in dims for axis in axes}  # a result that has the summed factor is not a sum over it
        out.append(Layout(tuple(dims), tuple(a for a in partial if a not in used)))
    return tuple(out)


def _divides(s: Setting) -> bool:
    """Whether every dim divides; the product of a dim's factors is its size only without special ones among them."""
    sizes = [(s.operand_shape(i), layout) for i, layout in enumerate(s.operands)]
    sizes += [(s.result_shape(i), layout) for i, layout in enumerate(s.results)]
    return all(
        not axes or n % s.mesh.product(axes) == 0
        for shape, layout in sizes
        for n, axes in zip(shape, layout.dims, strict=True)
    )


def _kinds_fit(name: str, maker: Callable[..., Any], factors: Sequence[Factor], sharded: Sequence[int]) -> bool:
    """Returns whether the operation's form knows the kinds of the sharded factors."""
    for f in sharded:
        kind = factors[f].kind
        if (kind == "sum" and name not in _SUMS) or (kind in ("max", "min") and maker is not reductions.extremum):
            return False
        if kind == "special" and maker is Setting.bind:
            return False
    return True


# --- parameters that hold sizes ---------------------------------------------------------------------------------------


def _broadcast_in_dim(s: Setting) -> LocalForm | None:
    return s.bind(shape=s.local_result())


def _reshape(s: Setting) -> LocalForm | None:
    return s.bind(new_sizes=s.local_result()) if s.op.params.get("dimensions") is None else None


def _tile(s: Setting) -> LocalForm | None:
    """Each repetition of a sharded dim stays whole, and a device makes its share of the repetitions."""
    local, made = s.local_operand(0), s.local_result()
    if any(n % m for n, m in zip(made, local, strict=True) if m):
        return None
    return s.bind(reps=tuple(n // m if m else 1 for n, m in zip(made, local, strict=True)))


def _split(s: Setting) -> LocalForm | None:
    return None if s.operands[0].dims[s.op.params["axis"]] else s.bind()


def _concatenate(s: Setting) -> LocalForm | None:
    return None if s.results[0].dims[s.op.params["dimension"]] else s.bind()


def _identity(s: Setting) -> LocalForm:
    """The form of an operation that only places its operand: inside a region, the plan has placed it already."""
    return s.form(lambda *operands: list(operands))


_SUMS = (
    primitives.PRODUCTS
    | primitives.CUDNN
    | primitives.SCATTER_ADDITIONS
    | {"reduce_sum", "ragged_dot_general", "gather"}
)

# Bound again as they are: no parameter of theirs holds the size of a dim that may be sharded.
_PLAIN = """
    approx_top_k bitcast_convert_type dot_general fft from_edtype optimization_barrier ragged_dot_general random_unwrap
    random_wrap reciprocal reduce_sum sort squeeze stack tie to_edtype transpose unstack
"""

_IDENTITY = dict.fromkeys(primitives.PLACEMENT - {primitives.CONSTRAINT}, _identity)

_EFFECTS = dict.fromkeys(("debug_callback", "debug_print", "io_callback"), effects.callback_form)

# Where nothing is sharded: all others are bound as they are.
_ANYWHERE: Mapping[str, Callable[[Setting], LocalForm | None]] = {**_IDENTITY, **_EFFECTS}

FORMS: Mapping[str, Callable[[Setting], LocalForm | None]] = {
    **dict.fromkeys(primitives.ELEMENTWISE, Setting.bind),
    **dict.fromkeys(primitives.MATRIX_ALGEBRA | primitives.VECTOR_ALGEBRA, Setting.bind),
    **dict.fromkeys(_PLAIN.split(), Setting.bind),
    **dict.fromkeys(primitives.CUDNN, Setting.bind),
    "custom_partitioning": registered.custom_partitioning,
    "pallas_call": registered.pallas,
    **_IDENTITY,
    primitives.CONSTRAINT: Setting.bind,
    "argmax": reductions.arg_extremum,
    "argmin": reductions.arg_extremum,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": windows.convolution,
    **dict.fromkeys(primitives.CUMULATIVE, reductions.cumulative_form),
    "dynamic_slice": indexing.dynamic_slice,
    "dynamic_update_slice": indexing.dynamic_update_slice,
    "gather": indexing.gather,
    "iota": random.iota,
    "pad": windows.pad,
    "random_bits": random.random_bits,
    "random_split": random.random_split,
    "reduce": reductions.generic_reduce,
    "reduce_max": reductions.extremum,
    "reduce_min": reductions.extremum,
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_prod", "reduce_xor"), reductions.reduce_again),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"), windows.reduce_window
    ),
    "reshape": _reshape,
    "rev": windows.rev,
    **dict.fromkeys(primitives.SCATTERS, indexing.scatter),
    "select_and_scatter_add": windows.select_and_scatter_add,
    "slice": windows.slice_,
    "split": _split,
    "tile": _tile,
    "top_k": reductions.top_k,
}
