"""Which of a step's arguments are state, which are the batch, and which are neither.

A training step maps (state, batch) to (new state, results), but nothing in its signature says which is which. The
state is what comes back: an argument, or a part of one, whose structure, shapes and dtypes an output repeats. The
batch is what is neither returned nor updated nor static. The rules, in order:

1. A leaf of an NNX object is state: the step updates the object in place.
2. Outputs are searched top down for pytrees with at least one container that have the structure, shapes and dtypes of
   a whole argument not yet taken; of several such arguments the one whose name the output's key repeats, else the
   first.
3. The same structure with most of the shapes and dtypes equal: the leaves that differ are no state, and a note says so.
4. If nothing matched so far, the same with parts of arguments: `step(everything)`.
5. A bare array is a weak sign: predictions often have the batch's shape, and a loss that of any scalar. Random keys
   and integer scalars are state if an output of their type depends on them. Other arrays only if nothing was found by
   the rules above, the batch is named by the user, or the output's key repeats the argument's name; and one argument
   with arrays must be left for the batch.

Arguments named as the batch are never state. Keys and scalars are never the batch. What remains is the batch if all of
it shares one leading dim; anything else is ambiguous, and an error that names the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.calling import Calling
from alpa_lite.errors import OptionError, SignatureError
from alpa_lite.graph import Traced
from alpa_lite.passes.tracing.calls import one_or_several, position_of
from alpa_lite.paths import shown

BatchArgnums = str | int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Tree:
    """A pytree of leaves that are known by number: an argument, the result, or a part of either.

    Attributes:
      treedef: its structure.
      start, stop: its leaves.
      key: the last part of its path, such as `params`; the parameter's name for a whole argument.
    """

    treedef: Any
    start: int
    stop: int
    key: str

    @property
    def leaves(self) -> range:
        """The numbers of its leaves."""
        return range(self.start, self.stop)

    @property
    def is_bare(self) -> bool:
        """Whether it is one leaf without a container."""
        return jax.tree_util.treedef_is_leaf(self.treedef)


@dataclass(frozen=True, eq=False)
class Flat:
    """All leaves of the arguments, or of the result.

    Attributes:
      trees: the whole arguments, or the result as one tree.
      paths: for each leaf its path.
      types: for each leaf (shape, dtype).
      modules: for each leaf, whether it belongs to an NNX object.
      keys: for each leaf the keys on the way to it from the root of its tree.
    """

    trees: tuple[Tree, ...]
    paths: tuple[str, ...]
    types: tuple[tuple[tuple[int, ...], Any], ...]
    modules: tuple[bool, ...]
    keys: tuple[tuple[str, ...], ...]

    def children(self, tree: Tree, depth: int) -> list[Tree]:
        """The parts of a tree that stands `depth` keys below its root."""
        out, start = [], tree.start
        for child in jax.tree_util.treedef_children(tree.treedef):
            stop = start + child.num_leaves
            if stop > start:
                keys = self.keys[start]
                out.append(Tree(child, start, stop, keys[depth] if depth < len(keys) else ""))
            start = stop
        return out


def match_state(
    inputs: Flat, outputs: Flat, batch: frozenset[int] | None, depends: Callable[[int, int], bool]
) -> tuple[dict[int, int], list[str]]:
    """Which outputs are the new values of which arguments (the module's docstring gives the rules).

    Args:
      inputs: the leaves of the arguments.
      outputs: the leaves of the result.
      batch: the leaves that the user named as the batch, or None.
      depends: whether an output depends on an argument, by number.

    Returns:
      {output: argument}, and notes.
    """
    matcher = _Matcher(inputs, outputs, batch or frozenset(), depends)
    matcher.modules()
    matcher.containers(whole=True, exact=True)
    matcher.containers(whole=True, exact=False)
    if not matcher.pairs:
        matcher.containers(whole=False, exact=True)
    matcher.bare(named_batch=batch is not None)
    return matcher.pairs, matcher.notes


class _Matcher:
    """The pairs found so far."""

    def __init__(self, inputs: Flat, outputs: Flat, batch: frozenset[int], depends: Callable[[int, int], bool]) -> None:
        self.pairs: dict[int, int] = {}
        self.notes: list[str] = []
        self._inputs, self._outputs, self._depends = inputs, outputs, depends
        self._taken = set(batch)

    def modules(self) -> None:
        """Rule 1: the leaf of an NNX object, by path."""
        found = {path: i for i, path in enumerate(self._inputs.paths) if self._inputs.modules[i]}
        for number, path in enumerate(self._outputs.paths):
            argument = found.get(path) if self._outputs.modules[number] else None
            if argument is not None and self._same(number, argument):
                self._pair(number, argument)
        self._taken.update(i for i, module in enumerate(self._inputs.modules) if module)

    def containers(self, *, whole: bool, exact: bool) -> None:
        """Rules 2 to 4: pytrees with the structure of an argument, or of a part of one."""
        candidates: dict[Any, list[Tree]] = {}
        for tree in self._inputs.trees:
            for part in [tree] if whole else list(_parts(self._inputs, tree, 0)):
                if not part.is_bare and part.stop > part.start:
                    candidates.setdefault(part.treedef, []).append(part)
        if candidates:
            for tree in self._outputs.trees:
                self._descend(tree, 0, candidates, exact)

    def _descend(self, tree: Tree, depth: int, candidates: dict[Any, list[Tree]], exact: bool) -> None:
        if tree.is_bare:
            return
        if not any(number in self.pairs or self._outputs.modules[number] for number in tree.leaves):
            fitting = [part for part in candidates.get(tree.treedef, ()) if self._fits(tree, part, exact)]
            fitting.sort(key=lambda part: part.key != tree.key)
            if fitting:
                self._take(tree, fitting[0])
                return
        for child in self._outputs.children(tree, depth):
            self._descend(child, depth + 1, candidates, exact)

    def _fits(self, tree: Tree, part: Tree, exact: bool) -> bool:
        if any(argument in self._taken for argument in part.leaves):
            return False
        equal = sum(map(self._same, tree.leaves, part.leaves))
        return equal == len(tree.leaves) if exact else 2 * equal > len(tree.leaves)

    def _take(self, tree: Tree, part: Tree) -> None:
        self._taken.update(part.leaves)
        for number, argument in zip(tree.leaves, part.leaves, strict=True):
            if self._same(number, argument):
                self._pair(number, argument)
            else:
                before, after = (
                    _type_text(side.types[i]) for side, i in ((self._inputs, argument), (self._outputs, number))
                )
                self.notes.append(
                    f"{shown(self._inputs.paths[argument])} is {before} but comes back as {after}: it is not kept as "
                    "state"
                )

    def bare(self, *, named_batch: bool) -> None:
        """Rule 5: arguments that are one array."""
        strong = named_batch or not self.pairs
        free = [tree for tree in self._inputs.trees if not any(i in self._taken for i in tree.leaves) and tree.leaves]
        arrays = {tree.start for tree in free if any(is_batch_like(*self._inputs.types[i]) for i in tree.leaves)}
        numbers = [n for n in range(len(self._outputs.types)) if n not in self.pairs and not self._outputs.modules[n]]
        for tree in free:
            if not tree.is_bare or (tree.start in arrays and len(arrays) == 1 and not named_batch):
                continue
            shape, dtype = self._inputs.types[tree.start]
            counter = is_key(shape, dtype) or (shape == () and np.issubdtype(dtype, np.integer))
            fitting = [n for n in numbers if self._same(n, tree.start) and self._depends(n, tree.start)]
            named = [n for n in fitting if self._outputs.keys[n][-1:] == (tree.key,)]
            chosen = named or (fitting if counter or strong else [])
            if chosen:
                numbers.remove(chosen[0])
                arrays.discard(tree.start)
                self._pair(chosen[0], tree.start)

    def _same(self, number: int, argument: int) -> bool:
        return self._outputs.types[number] == self._inputs.types[argument]

    def _pair(self, number: int, argument: int) -> None:
        self.pairs[number] = argument
        self._taken.add(argument)


def _parts(flat: Flat, tree: Tree, depth: int) -> list[Tree]:
    """The parts of a tree, larger ones first, without itself."""
    out: list[Tree] = []
    level = [tree]
    while level:
        level = [child for parent in level if not parent.is_bare for child in flat.children(parent, depth)]
        out.extend(level)
        depth += 1
    return out


def is_key(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a leaf is a random key: typed, or one raw `uint32[2]`."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == np.uint32 and shape == (2,)


def is_batch_like(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether a leaf may be a batch: an array with a leading dim that is no random key."""
    return len(shape) > 0 and not is_key(shape, dtype)


def named_batch(
    calling: Calling, inputs: Flat, batch_argnums: BatchArgnums, batch_argnames: str | Sequence[str]
) -> frozenset[int] | None:
    """The leaves of the arguments that the user named as the batch, or None for "auto".

    Raises:
      SignatureError: a name or a number that is no argument of this call, or a static one.
    """
    names = set(one_or_several(batch_argnames))
    automatic = isinstance(batch_argnums, str)
    if automatic and batch_argnums != "auto":
        raise SignatureError(f'batch_argnums is {batch_argnums!r}; give "auto", an int or a tuple of ints')
    if automatic and not names:
        return None
    numbers = () if automatic else one_or_several(batch_argnums)
    names |= {calling.names[position_of(i, len(calling.names), "batch_argnums")] for i in numbers}
    trees = {tree.key: tree for tree in inputs.trees}
    unknown = sorted(names - set(trees))
    if unknown:
        raise SignatureError(
            f"batch_argnums or batch_argnames name {', '.join(unknown)}, but the traced arguments are "
            f"{', '.join(trees)}"
        )
    return frozenset(i for name in names for i in trees[name].leaves)


def find_batch(inputs: Flat, state: frozenset[int], named: frozenset[int] | None) -> tuple[frozenset[int], str]:
    """The leaves of the batch, and a note that says which arguments they are and why.

    Raises:
      SignatureError: several arguments could be the batch, or none that was named has a leading dim.
    """
    if named is not None:
        units = [tree for tree in inputs.trees if tree.start in named and tree.leaves]
        why = "named by batch_argnums or batch_argnames"
    else:
        units = [unit for tree in inputs.trees for unit in _free_units(inputs, tree, 0, state)]
        why = "the step neither returns nor updates {}"
    units = [unit for unit in units if any(is_batch_like(*inputs.types[i]) for i in unit.leaves)]
    if not units:
        return frozenset(), "no argument was taken as the batch"
    leading = [Counter(inputs.types[i][0][0] for i in u.leaves if is_batch_like(*inputs.types[i])) for u in units]
    common = set(leading[0]).intersection(*leading[1:])
    if named is None and (not common or (len(units) > 1 and any(len(counter) > 1 for counter in leading))):
        listed = "; ".join(
            f"{shown(_path(inputs, unit))} with leading dims {sorted(c)}"
            for unit, c in zip(units, leading, strict=True)
        )
        raise SignatureError(
            f"cannot tell which argument is the batch: {listed}. Name it with batch_argnums=(i,) or "
            "batch_argnames=(name,), or return the arguments that are state"
        )
    total = sum(leading, Counter())
    if common:
        sizes = [max(sorted(common), key=lambda dim: total[dim])] * len(units)
    else:  # several batches, each of a size of its own
        sizes = [max(sorted(counter), key=lambda dim: counter[dim]) for counter in leading]
    leaves = frozenset(
        i
        for unit, size in zip(units, sizes, strict=True)
        for i in unit.leaves
        if is_batch_like(*inputs.types[i]) and inputs.types[i][0][0] == size
    )
    dims = f"leading dim {sizes[0]}" if common else f"leading dims {', '.join(map(str, sizes))}"
    names = ", ".join(f"`{shown(_path(inputs, unit))}`" for unit in units)
    one = len(units) == 1
    why = why.format("it" if one else "them")
    return leaves, f"{names} {'was' if one else 'were'} taken as the batch ({dims}): {why}"


def _free_units(inputs: Flat, tree: Tree, depth: int, state: frozenset[int]) -> list[Tree]:
    """The largest parts of a tree without any state."""
    if not any(i in state for i in tree.leaves):
        return [tree]
    if tree.is_bare:
        return []
    return [unit for child in inputs.children(tree, depth) for unit in _free_units(inputs, child, depth + 1, state)]


def _path(inputs: Flat, tree: Tree) -> str:
    """The name of an argument, or the path of a part: what the paths of its leaves have in common."""
    if any(tree is whole for whole in inputs.trees):
        return tree.key
    paths = [inputs.paths[i] for i in tree.leaves]
    shared = paths[0]
    for path in paths[1:]:
        while not path.startswith(shared):
            shared = shared[: shared.rfind("[")]
    return shared


def _type_text(kind: tuple[tuple[int, ...], Any]) -> str:
    return f"{kind[1]}[{','.join(map(str, kind[0]))}]"


def donated_leaves(traced: Traced, donate: int | str | Sequence[int]) -> list[int]:
    """The numbers of the leaves of the positional arguments that `donate_argnums` names.

    Raises:
      OptionError: there is no such argument, or it is static.
    """
    assert not isinstance(donate, str), "callers know what is donated automatically"
    positions = (donate,) if isinstance(donate, int) else tuple(donate)
    calling = traced.calling
    assert calling is not None
    ranges = dict(zip(calling.dynamic, argument_leaves(traced), strict=True))
    count = len(calling.names)
    for position in positions:
        if position % max(count, 1) not in ranges or not -count <= position < count:
            raise OptionError(
                f"donate_argnums names argument {position}, which is static or does not exist: the step was called "
                f"with {count} positional arguments"
            )
    return sorted({leaf for position in positions for leaf in ranges[position % count]})


def argument_leaves(traced: Traced) -> list[range]:
    """The numbers of the leaves of each positional argument that is not static."""
    out, start = [], 0
    args_tree, _ = jax.tree_util.treedef_children(traced.in_tree)
    for tree in jax.tree_util.treedef_children(args_tree):
        out.append(range(start, start + tree.num_leaves))
        start += tree.num_leaves
    return out
