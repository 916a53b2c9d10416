"""The state of a step, initialised in its planned shardings, and its batches, placed where the plan reads them.

All of it follows from the planned calls of a step (`planned_calls`): `step.init`, `step.place` of a batch alone,
`step.local_batch_indices` and `step.shardings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from alpa_lite.compilation.placing import Kind, PathSuffixIndex, kind_of
from alpa_lite.errors import OptionError
from alpa_lite.ir.paths import format_path, keys
from alpa_lite.passes.tracing import calls, pytrees
from alpa_lite.planned_calls import PlannedCall
from alpa_lite.runtime import placement, prefetch
from alpa_lite.runtime.sharded_init import ShardedInit


class Shardings(NamedTuple):
    """The shardings of the arguments and results of a step: pytrees like theirs with a `NamedSharding` for each array.

    Attributes:
      arguments: the tuple of positional arguments; with keywords, that tuple and a dict of the keywords.
      results: of the step. The arrays that NNX objects hold after the call are sharded as before it.
    """

    arguments: Any
    results: Any


def shardings_of(call: PlannedCall) -> Shardings:
    """Returns the shardings of arguments and results of a call."""
    where, results = call.executable().shardings
    traced = pytrees.replace_arrays(call.calling.drop_static(call.args, call.kwargs), lambda _: where)
    positional, keywords = call.calling.insert_static(*traced)
    out = jax.tree_util.tree_unflatten(call.step.traced.out_tree, results)
    if call.calling.modules:
        out = out[1]
    return Shardings((positional, keywords) if call.kwargs else positional, out)


# -- the batch alone ------------------------------------------------------------------------------------------------


def is_only_batch(known: Sequence[PlannedCall], args: tuple[Any, ...]) -> bool:
    """Returns whether some arguments are too few for the step, and as many as its batch has."""
    return bool(known) and len(args) < len(known[0].args) + len(known[0].kwargs) and len(args) == len(known[0].batch())


def place_batch(
    known: Sequence[PlannedCall], args: tuple[Any, ...], planned: Callable[..., PlannedCall]
) -> tuple[Any, ...]:
    """Returns the arguments that are the batch, where the plan reads them, in buffers of their own.

    Args:
      known: the planned calls, the one used last first. A batch of another shape is planned for with the state of that.
      args: the batch; of several processes, each may have the rows of the last one's batch that it reads (`rows_of`).
      planned: the call of some arguments, which is planned if it is new.
    """
    leaves, tree = pytrees.flatten_nnx(args)
    if jax.process_count() == 1:
        call = planned(*known[0].with_batch(args))
        return jax.tree_util.tree_unflatten(tree, placement.copies(leaves, [one for _, one in call.batch_leaves()]))
    kinds = list(map(kind_of, leaves))
    call = next((call for call in known if kinds == [kind for kind, _ in call.batch_leaves()]), None)
    if call is None and _are_parts(kinds, known[0].batch_leaves()):
        call = known[0]
    call = call or planned(*known[0].with_batch(args))
    wanted = zip(leaves, call.batch_leaves(), strict=True)
    placed = [prefetch.assemble_leaf(leaf, sharding, *kind) for leaf, (kind, sharding) in wanted]
    return jax.tree_util.tree_unflatten(tree, placed)


def rows_of(call: PlannedCall) -> Any:
    """The rows of each array of the batch that devices of this process read; of several arguments, a tuple of these."""
    found = [prefetch.rows(sharding, shape) for (shape, _), sharding in call.batch_leaves()]
    given = [call.args[place] if isinstance(place, int) else call.kwargs[place] for place in call.batch()]
    tree = jax.tree.structure(given[0] if len(given) == 1 else tuple(given))
    return jax.tree_util.tree_unflatten(tree, found)


def _are_parts(kinds: Sequence[Kind | None], batch: Sequence[tuple[Kind, NamedSharding]]) -> bool:
    """Returns whether leaves of some kinds are, each, the rows of a planned batch that this process reads."""
    return len(kinds) == len(batch) and all(
        kind is not None and kind[1] == dtype and prefetch.is_part(kind[0], sharding, shape)
        for kind, ((shape, dtype), sharding) in zip(kinds, batch, strict=True)
    )


# -- initialisation -------------------------------------------------------------------------------------------------


def complete_arguments(fun: Callable[..., Any], shapes: Any, rest: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a step whose state is initialised before anything was planned.

    Args:
      shapes: the result of the initialisation: the first argument, or a tuple of the first ones.
      rest: the arguments that follow, or all others by name.

    Raises:
      OptionError: `rest` is missing, or there are too many or too few arguments.
    """
    name = getattr(fun, "__name__", "the step")
    if rest is None:
        raise OptionError(
            f"{name} has no plan yet, which decides the shardings of its state: give the step's other arguments, "
            f"or their shapes, as in {name}.init(create, key, rest=(batch,)), or call {name}.plan(...) before"
        )
    more = dict(rest) if isinstance(rest, Mapping) else {}
    after = () if isinstance(rest, Mapping) else tuple(rest) if isinstance(rest, tuple | list) else (rest,)
    several = tuple(shapes) if type(shapes) in (tuple, list) else ()
    for first in (several, (shapes,)):
        if first and _binds(fun, (*first, *after), more):
            return (*first, *after), more
    raise OptionError(
        f"{name}.init: what the initialisation makes and the {len(after) + len(more)} arguments of rest= are not the "
        f"arguments of {name}{inspect.signature(fun)}; give all that follow, or all others by name, as in "
        "rest={'batch': batch}"
    )


def _binds(fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def init_sharded(birth: ShardedInit, call: PlannedCall, room: float) -> tuple[Any, list[jax.Array]]:
    """Returns the state that an initialisation makes, as a planned call reads it, and its flat arrays.

    The result is the argument, or the tuple of arguments, whose leaves it has most of in common: path, shape and dtype.
    Leaves that no argument has are found by the ends of their paths; if there is none, they are replicated.

    Args:
      room: bytes of a device that one leaf may take whole.

    Raises:
      OptionError: nothing of it is an argument.
    """
    leaves = call.leaves()
    exact = {(keys(path), kind) for path, kind, _ in leaves}
    ends = PathSuffixIndex(leaves)
    made = [
        (tuple(map(calls.key_text, path.keys)), keys(path.inner), (tuple(kind.shape), str(kind.dtype)))
        for path, kind in zip(birth.paths, birth.types, strict=True)
    ]
    roots = _roots(made, list(dict.fromkeys(keys(path)[0] for path, _, _ in leaves)), exact)
    shardings, found = [], 0
    anywhere = NamedSharding(leaves[0][2].mesh, jax.sharding.PartitionSpec())
    for (outer, inner, kind), (root, skip) in zip(made, roots, strict=True):
        place = ends.find((root, *outer[skip:], *inner), kind)
        found += place is not None
        shardings.append(place or anywhere)
    if not found:
        raise OptionError(
            "init: nothing that the initialisation makes has the path, shape and dtype of an argument of the step: it "
            f"makes {', '.join(f'{kind[1]}{list(kind[0])}' for _, _, kind in made[:3])}, and the step takes "
            f"{', '.join(f'{format_path(path)} {kind[1]}{list(kind[0])}' for path, kind, _ in leaves[:3])}; "
            "return the state as the step takes it"
        )
    return birth.run(shardings, room)


def _roots(
    made: Sequence[tuple[tuple[str, ...], tuple[str, ...], Kind]], names: Sequence[str], exact: Set[Any]
) -> list[tuple[str, int]]:
    """Returns the argument that each result is a part of, and the number of keys of its path that stand for it.

    Args:
      made: for each result the keys to it, those within an NNX object, and its kind.
      names: of the arguments.
      exact: what the arguments have, by path in keys and kind.
    """

    parts: dict[str, list[int]] = {}
    for number, (path, _, _) in enumerate(made):
        parts.setdefault(path[0] if path else "", []).append(number)

    def best(numbers: Sequence[int], skip: int) -> tuple[int, str]:
        """Returns how many of some results the argument has that has the most of them, and its name."""
        ends = [((*made[n][0][skip:], *made[n][1]), made[n][2]) for n in numbers]
        hits = {name: sum(((name, *end), kind) in exact for end, kind in ends) for name in names}
        name = max(names, key=hits.__getitem__)
        return hits[name], name

    num_whole, whole = best(range(len(made)), 0)
    each = {part: best(numbers, 1) for part, numbers in parts.items()}
    if sum(count for count, _ in each.values()) <= num_whole:
        return [(whole, 0)] * len(made)
    return [(each[path[0] if path else ""][1], 1) for path, _, _ in made]
