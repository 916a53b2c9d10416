"""Constraints that a method and its user set: the meshes of a cluster, layouts of arguments, strategies of operations.

Everything that is not named here is free. Where several sources constrain one argument, the first of these holds:

    1. pins: where the state already is (`pins.Pin`);
    2. entries of `Manual`;
    3. textbook methods, on the arguments that they constrain;
    4. annotations of arguments, and arrays that arrive sharded (`pins.Wish`).

Textbook methods fix operations, too (`sharding.textbook`), on those axes that `Manual` does not name. Where the state
is already placed, or `Manual` names every axis, they fix arguments alone.

Strategies that the user forbids by name are left out of the integer program:

data parallel     a dim that is connected with the first dim of a batch argument is cut, in any operation
fsdp              a parameter, or a copy of it in another form, is gathered for the operations that read it
zero              a new parameter is gathered after its update, which was cut
tensor parallel   a product or a gather works on blocks of a parameter

Factors are connected if a value passes between them: those of the batch are all dims that its examples become,
micro-batches included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import MicrobatchError, OptionError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
from alpa_lite.ir.paths import format_path
from alpa_lite.methods import NAMES, STRATEGIES, DataParallel, Manual, Sharded, TensorParallel
from alpa_lite.passes.sharding import connected, kinds, textbook
from alpa_lite.passes.sharding.groups import Grouping, factors_in
from alpa_lite.passes.sharding.space import Constraints, completions, describe_mesh, fits
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.sharding.textbook import Textbook
from alpa_lite.plan.pins import NO_PINS, NO_WISHES, Pins, Wish, Wishes

Layouts = dict[int, tuple[Layout, ...]]
"""Group -> the layouts that it may have."""


def base(method: Any) -> Any:
    """Returns the method of everything that `Manual` does not name: the method itself, if it is another."""
    return method.rest if isinstance(method, Manual) else method


def meshes(cluster: Cluster, method: Any, max_axes: int = 3, wishes: Wishes = NO_WISHES) -> tuple[LogicalMesh, ...]:
    """Returns the logical meshes that a method admits on a cluster.

    Raises:
      OptionError: if the method's mesh shape does not have as many devices as the cluster, or is not the mesh that the
        user's constraints name.
    """
    count, rest = cluster.num_devices, base(method)
    given = method.mesh_shape if isinstance(method, Manual | Sharded) else None
    if given is not None and math.prod(given) != count:
        raise OptionError(
            f"mesh_shape={given} has {math.prod(given)} devices, but the cluster has {count}; "
            f"give a shape whose product is {count}, or another cluster."
        )
    names = wishes.names
    if wishes.mesh is not None and wishes.mesh.size == count:
        mesh = wishes.mesh
        if given not in (None, mesh.shape):
            raise OptionError(
                f"mesh_shape={given}: {wishes.why} has the mesh {describe_mesh(mesh)}; leave mesh_shape out, or give "
                f"{mesh.shape}."
            )
        if any(name not in mesh.axis_names for name in names):
            raise OptionError(
                f"Manual names the axes {', '.join(names)}: {wishes.why} has the mesh {describe_mesh(mesh)}; use its "
                "names."
            )
        return (mesh,)
    if given is not None:
        shapes: Sequence[tuple[int, ...]] = (tuple(given),)
    elif isinstance(rest, Textbook) and len(names) < 2:
        shapes = ((count,),)
    else:
        shapes = cluster.mesh_shapes(max(max_axes, len(names)))
    # Of searched meshes, those that have the axes.
    if not names or (set(names) <= set(NAMES) and not wishes.has_more_axes):
        found = [LogicalMesh(tuple(s), NAMES[: len(s)]) for s in shapes if len(s) >= len(names)]
        if found:
            return tuple(found)
    wider = next(name for name in (*NAMES, "searched") if name not in names)
    found = [
        LogicalMesh(order, some)
        for some in (names, (wider, *names)) if some is names or wishes.has_more_axes
        for shape in shapes for order in _orders(tuple(shape), len(some))
        if given is None or len(given) < len(some) or order == given
    ]  # fmt: skip
    exact = [mesh for mesh in found if 1 not in mesh.shape]
    if not found:
        raise OptionError(f"mesh_shape={given} has more axes than {', '.join(names)}; name each axis in axis_names")
    return tuple(exact or found)


def _orders(shape: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    """A shape with this many axes in every distinct order, axes of one device added: names tell equal axes apart."""
    for places in itertools.combinations(range(count), len(shape)):
        for order in dict.fromkeys(itertools.permutations(shape)):
            sizes = dict(zip(places, order, strict=True))
            yield tuple([sizes.get(i, 1) for i in range(count)])


AdmittedMeshes = tuple[tuple[LogicalMesh, Constraints], ...]
"""Meshes, each with its constraints."""


def admissible_meshes(
    step: GroupedStep,
    cluster: Cluster,
    method: Any,
    wishes: Wishes = NO_WISHES,
    pins: Pins = NO_PINS,
    max_axes: int = 3,
) -> AdmittedMeshes:
    """Returns the meshes of a cluster on which a method can meet its constraints, with the constraints on each.

    Raises:
      OptionError: there is none; gives the reason of the first.
    """
    found: list[tuple[LogicalMesh, Constraints]] = []
    errors: list[OptionError] = []
    for mesh in tuple(mesh for mesh, _ in pins.meshes) or meshes(cluster, method, max_axes, wishes):
        try:
            found.append((mesh, limits(step, method, mesh, wishes, pins)))
        except OptionError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return tuple(found)


def limits(
    step: GroupedStep, method: Any, mesh: LogicalMesh, wishes: Wishes = NO_WISHES, pins: Pins = NO_PINS
) -> Constraints:
    """Returns the constraints on a mesh; see the module.

    - DataParallel: the batch sharded over its first dim, state replicated and updated whole on every device.
    - Zero(1), Zero(2): the same with optimizer state sharded; Zero(3): parameters too.
    - TensorParallel: the batch replicated, parameters that products read sharded along a dim.

    Raises:
      MicrobatchError: micro-batches have too few examples for data parallelism.
      OptionError: if a batch argument does not divide over the devices, or a spec does not fit an argument.
    """
    rest, traced, grouping = base(method), step.traced, step.grouping
    values, inputs = traced.graph.values, traced.graph.block.inputs
    for op in step.constraints:
        if op.params["mesh"] is None:  # of the option `constrain`
            _check(Wish(op.params["dims"], op.params["why"]), values[op.results[0]].shape, mesh, "a value")
    found: Layouts = {}
    named: Layouts = {}
    own = frozenset(number for number, a in enumerate(traced.arguments) if wishes.names_leaf(a.path))
    for number, argument in enumerate(traced.arguments):
        wish, shape = wishes.leaf(argument.path), values[inputs[number]].shape
        if wish is None:
            continue
        if number in own:
            _check(wish, shape, mesh, repr(format_path(argument.path)))
        elif fits(wish, shape, mesh) is not None:
            continue
        if group := grouping.leaves[number]:
            (named if number in own else found)[group] = tuple(completions(wish, shape, mesh))
    operations, moves = {}, None
    if isinstance(rest, Textbook):
        taken = {a for p in wishes.given_paths for axes in wishes.leaves[p].dims for a in axes or ()}
        free = tuple(a for a in mesh.axis_names if a not in taken)
        found |= _textbook(step, rest, mesh, free or mesh.axis_names, own)
        if free and not pins:
            operations, moves = textbook.limit_operations(step, rest, mesh, free, own)
            count = mesh.product(free)
            if operations and moves is None and textbook.share_in_pieces(step, count) > _MOST:
                raise MicrobatchError(
                    f"most of the step works on fewer examples at a time than divide over {count} devices, or on a "
                    "number that does not: use a smaller num_microbatches, a larger batch, or method='auto'."
                )
    pinned = {grouping.leaves[number]: (pin.layout,) for number, pin in pins.arguments.items()}
    layouts = found | named | {group: layouts for group, layouts in pinned.items() if group}
    again = bool(operations) and textbook.zero_stage(rest) == 3
    return Constraints(layouts, operations, moves, again, *_forbidden(step, wishes.forbidden))


_MOST = 0.5  # of the work of products


def _check(wish: Wish, shape: tuple[int, ...], mesh: LogicalMesh, name: str) -> None:
    """Raises OptionError where a wish does not fit a value."""
    wrong = fits(wish, shape, mesh)
    if wrong is not None:
        raise OptionError(f"{wish.why} does not fit {name} of shape {shape}: {wrong}; change or remove it.")


def _forbidden(step: GroupedStep, names: Collection[str]) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
    """Returns `whole_factors` and `ungathered_values` of `Constraints` if some of `STRATEGIES` are forbidden."""
    assert set(names) <= set(STRATEGIES)
    traced, grouping = step.traced, step.grouping
    read = kinds.parameter_of(traced).keys()
    whole: set[connected.Place] = set()
    ungathered: set[int] = set()
    if "data parallel" in names:
        whole |= connected.find_connected_factors(grouping, connected.batch_factors(traced, grouping))
    if "tensor parallel" in names:
        demands = [demand for demand in grouping.demands if textbook.reads_weights(grouping, demand, read)]
        whole.update((demand.group, f) for demand in demands for f in factors_in(demand.dims))
    if "fsdp" in names:
        ungathered |= read
    if "zero" in names:
        block, of = traced.graph.block, kinds.state_kinds(traced)
        new = (block.outputs[out] for out, argument in traced.state if of.get(argument) == "params")
        ungathered.update(a for a in new if isinstance(a, int) and a not in block.inputs)
    return textbook.group_factors(whole), frozenset(ungathered)


def _textbook(step: GroupedStep, method: Textbook, mesh: LogicalMesh, axes: Axes, named: Collection[int]) -> Layouts:
    """Returns the argument layouts of a textbook method, data-parallel over some axes. Frozen weights are parameters.

    Args:
      named: arguments, by number, whose layouts `Manual` gives.

    Raises:
      OptionError: the batch does not divide, or there is none that data parallelism could shard.
    """
    traced, grouping, values = step.traced, step.grouping, step.traced.graph.values
    if isinstance(method, DataParallel) and not traced.state and all(a.role != "batch" for a in traced.arguments):
        raise OptionError(
            "method=DataParallel() shards the batch, but no argument was taken as the batch; name it with "
            "batch_argnums=(i,) or batch_argnames=(name,), or use another method"
        )
    out: Layouts = {}
    count, stage, tensor = mesh.product(axes), textbook.zero_stage(method), isinstance(method, TensorParallel)
    shapes = [values[v].shape for v in traced.graph.block.inputs]
    batch = [shape for shape, a in zip(shapes, traced.arguments, strict=False) if a.role == "batch" and shape]
    may_be_whole = not traced.has_named_batch and any(shape[0] % count == 0 for shape in batch)
    cut_by_loops = _stacked(grouping)
    in_blocks = textbook.parameters_of_products(step, count) if tensor else set()

    def blocks(group: int, shape: tuple[int, ...]) -> tuple[Layout, ...]:
        """Returns one dim over all axes; a stack of layers along another one than the stack's, if that divides."""
        dims = [d for d, size in enumerate(shape) if size % count == 0]
        kept = [d for d in dims if d not in cut_by_loops.get(group, ())] or dims
        return tuple(Layout(tuple(axes if i == d else () for i in range(len(shape)))) for d in kept)

    for number, (argument, group) in enumerate(zip(traced.arguments, grouping.leaves, strict=False)):
        if group == 0:
            continue
        shape = shapes[number]
        whole = (Layout(((),) * len(shape)),)
        if tensor:
            if argument.role == "batch":
                out[group] = whole
            elif number in in_blocks - set(named) and (found := blocks(group, shape)):
                out[group] = found
        elif argument.role == "batch":
            if number in named:
                continue
            if shape[0] % count and not may_be_whole:
                raise OptionError(
                    f"argument {format_path(argument.path)} has a batch of {shape[0]} (shape {shape}), which does not "
                    f"divide over {count} devices; use a batch that is a multiple of {count}, or method='auto'."
                )
            out[group] = whole if shape[0] % count else (Layout((axes, *whole[0].dims[1:])),)
        elif argument.is_resident:
            sharded = stage == 3 or (stage and kinds.state_kinds(traced).get(number) == "optimizer")
            out[group] = (sharded and blocks(group, shape)) or whole
    if isinstance(method, DataParallel):
        out |= _whole_updates(traced, grouping, named)
    return out


def _stacked(grouping: Grouping) -> dict[int, set[int]]:
    """Group of an argument -> its dims of which every iteration of a loop reads one element: layers in a stack."""
    out: dict[int, set[int]] = {}
    leaves = set(grouping.leaves)
    for demand in grouping.demands:
        home = grouping.homes[demand.value]
        if demand.op < 0 and home.group in leaves:
            gone = {i for i, (mine, used) in enumerate(zip(home.dims, demand.dims, strict=True)) if mine and not used}
            out.setdefault(home.group, set()).update(gone)
    return out


def _whole_updates(traced: Traced, grouping: Grouping, named: Collection[int]) -> Layouts:
    """Replication for the groups that compute new state, so that gradients are all-reduced."""
    ranks: dict[int, int] = {}  # of the first value of each
    for home in grouping.homes.values():
        ranks.setdefault(home.group, len(home.dims))
    ours = {number for number, argument in traced.state if argument in named}
    groups = kinds.update_groups(traced, grouping) - kinds.update_groups(traced, grouping, ours)
    return {g: (Layout(((),) * ranks[g]),) for g in groups if grouping.groups[g].kind == "light"}
