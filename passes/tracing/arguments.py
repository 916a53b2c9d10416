"""Which of a step's arguments are state, which are the batch, and which are neither.

A training step maps (state, batch) to (new state, results), but nothing in its signature says which is which. The
state is what comes back: an argument, or a part of one, whose structure, shapes and dtypes an output repeats, and
which that output is an update of (`evidence`). The rules, in order:

1. A leaf of an NNX object is state if the step updates it: it does so in place.
2. Outputs are searched top down for pytrees with at least one container that have the structure, shapes and dtypes of
   a whole argument not yet taken, and at least one leaf of which is carried from a leaf of the argument, be it in
   another place (buffers that change places): gradients and predictions are no new state, nor are weights that are
   handed through. Of several such arguments the one whose name the output's key repeats, else the one that most leaves
   are carried from, else the first.
   Arguments that change places, `return descended(q), p` of `step(p, q, batch)`, are paired in order: where as many
   parts of the result as arguments have one structure, each is carried from another of these arguments, and some
   argument comes back as it went in, in the place of another.
3. The same structure with most of the shapes and dtypes equal: the leaves that differ are no state, and a note says so.
4. If nothing matched so far, the same with parts of arguments: `step(everything)`.
5. A bare array is a weak sign: predictions often have the batch's shape, and a loss that of any scalar. Random keys
   and integer scalars are state if an output of their type depends on them. Other arrays only if an output is carried
   from them and either its key repeats the argument's name, or nothing was found by the rules above, or the batch is
   named by the user; without a name it must in addition be learnt (depend on a reverse pass) or stand among the results
   where the argument stands among the arguments. Of several results those that are carried from it come first, from
   it alone before those from others, too: arguments may change places, and an average is carried from what it averages.
   One argument with arrays must be left for the batch.

Arguments that the user names as state are state without evidence, and no others are, NNX objects apart. Arguments named
as the batch are never state by rules 2 to 5. What is *known* to be the state of another step (an evaluation's
parameters) is state of this one only if a carried leaf is learnt, too: what merely derives values from it must not
donate it.

A step without state is a function like any other: evaluation, prediction, gradients. Keys and scalars are never the
batch, nor, where anything else could be, is an argument that comes back as it went in or that products read as a weight
(`evidence`): these are *frozen*, and so are pytrees whose arrays share no leading dim. An argument with indices, or a
bare array next to state, is data however it is read: the nodes of a graph are looked up, and an adjacency matrix is
multiplied. All else is data. The batch is the data whose leading dim most arguments share (in a step without state
first: that a result has); where none is shared, each is a batch of its own size (nodes, edges and graphs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alpa_lite.calling import Calling
from alpa_lite.errors import OptionError, SignatureError
from alpa_lite.graph import Traced
from alpa_lite.passes.tracing.calls import one_or_several, position_of
from alpa_lite.passes.tracing.evidence import Evidence
from alpa_lite.passes.tracing.leaves import Flat, Tree, common_path, is_batch_like, is_key, parts
from alpa_lite.paths import shown

Argnums = str | int | Sequence[int]
"""An option that names arguments by number: "auto", one, or several."""


@dataclass(frozen=True)
class Matched:
    """Which outputs are the new values of which arguments.

    Attributes:
      pairs: {output: argument}.
      notes: for the plan.
      differentiated: the arguments whose gradients are among the outputs: weights, no batch.
    """

    pairs: Mapping[int, int]
    notes: Sequence[str]
    differentiated: frozenset[int]


def match_state(
    inputs: Flat,
    outputs: Flat,
    evidence: Evidence,
    *,
    batch: frozenset[int] = frozenset(),
    known: frozenset[int] = frozenset(),
    named: frozenset[int] | None = None,
    batch_named: bool = False,
) -> Matched:
    """Which outputs are the new values of which arguments (the module's docstring gives the rules).

    Args:
      inputs: the leaves of the arguments.
      outputs: the leaves of the result.
      evidence: what the graph says.
      batch: the leaves that the user named as the batch.
      known: leaves that are state of another step.
      named: the leaves that the user named as state, or None.
      batch_named: whether the user named the batch.

    Raises:
      SignatureError: an argument that is named as state does not come back.
    """
    matcher = _Matcher(inputs, outputs, batch, known, evidence, named)
    matcher.modules()
    matcher.changed_places()
    matcher.containers(whole=True, exact=True)
    matcher.containers(whole=True, exact=False)
    if not matcher.pairs:
        matcher.containers(whole=False, exact=True)
    matcher.bare(named_batch=batch_named)
    if named is not None:
        matcher.complete()
    return Matched(matcher.pairs, matcher.notes, frozenset(matcher.differentiated))


class _Matcher:
    """The pairs found so far."""

    def __init__(
        self, inputs: Flat, outputs: Flat, batch: frozenset[int], known: frozenset[int], evidence: Evidence,
        named: frozenset[int] | None,
    ) -> None:  # fmt: skip
        self.pairs: dict[int, int] = {}
        self.notes: list[str] = []
        self.differentiated: set[int] = set()
        self._inputs, self._outputs, self._evidence, self._named = inputs, outputs, evidence, named
        self._taken, self._known = set(batch), known if named is None else frozenset()
        if named is not None:
            self._taken |= set(range(len(inputs.types))) - named

    def modules(self) -> None:
        """Rule 1: the leaf of an NNX object, by path."""
        found = {path: i for i, path in enumerate(self._inputs.paths) if self._inputs.modules[i]}
        for number, path in enumerate(self._outputs.paths):
            argument = found.get(path) if self._outputs.modules[number] else None
            if argument is None or not self._same(number, argument):
                continue
            if not self._evidence.unchanged(number, argument):
                self._pair(number, argument)
        self._taken.update(i for i, module in enumerate(self._inputs.modules) if module)

    def changed_places(self) -> None:
        """Rule 2, of arguments that change places with each other."""
        alike: dict[Any, list[Tree]] = {}
        for tree in self._inputs.trees:
            if not tree.is_bare and tree.leaves and self._taken.isdisjoint(tree.leaves):
                alike.setdefault(self._kind(self._inputs, tree), []).append(tree)
        level, depth = [self._outputs.trees[0]], 0
        while level:
            siblings = [[] if tree.is_bare else self._outputs.children(tree, depth) for tree in level]
            for results in siblings:
                for kind, arguments in alike.items():
                    same = [tree for tree in results if self._kind(self._outputs, tree) == kind]
                    for result, argument in self._moved(same, arguments):
                        self._take(result, argument)
            level, depth = [tree for trees in siblings for tree in trees], depth + 1

    def _moved(self, results: Sequence[Tree], arguments: Sequence[Tree]) -> list[tuple[Tree, Tree]]:
        """Results in the places of other arguments than those that they are carried from, with the arguments there.

        None unless each is of one argument, one of them as it came in the place of another, and one updated.
        """
        numbers = {leaf: number for number, tree in enumerate(arguments) for leaf in tree.leaves}
        sources: list[int] = []
        for tree in results:
            found = {numbers[leaf] for n in tree.leaves for leaf in self._evidence.origins(n) if leaf in numbers}
            if len(found) != 1:
                return []
            sources += found
        places = sorted(set(sources))
        there = [arguments[place] for place in places]
        named = not {tree.key for tree in results}.isdisjoint(tree.key for tree in there)
        taken = not self._taken.isdisjoint(leaf for tree in there for leaf in tree.leaves)
        if len(places) < len(results) or named or taken:
            return []
        handed = [all(map(self._evidence.hands_through, tree.leaves)) for tree in results]
        moved = [number for number, place in enumerate(places) if place != sources[number]]
        if all(handed) or not any(handed[number] for number in moved):
            return []
        return [(results[number], there[number]) for number in moved]

    def _kind(self, flat: Flat, tree: Tree) -> Any:
        return tree.treedef, tuple(flat.types[i] for i in tree.leaves)

    def containers(self, *, whole: bool, exact: bool) -> None:
        """Rules 2 to 4: pytrees with the structure of an argument, or of a part of one.

        Where several arguments fit, those that only one result is an update of are taken first: a moving average is
        carried from the average and from the parameters, new parameters are carried from the parameters alone.
        """
        candidates: dict[Any, list[Tree]] = {}
        for tree in self._inputs.trees:
            for part in [tree] if whole else list(parts(self._inputs, tree, 0)):
                if not part.is_bare and part.stop > part.start:
                    candidates.setdefault(part.treedef, []).append(part)
        if not candidates:
            return
        before = -1
        while before < len(self._taken):
            before = len(self._taken)
            self._descend(self._outputs.trees[0], 0, candidates, exact, alone=True)
        self._descend(self._outputs.trees[0], 0, candidates, exact, alone=False)

    def _descend(self, tree: Tree, depth: int, candidates: dict[Any, list[Tree]], exact: bool, alone: bool) -> None:
        if tree.is_bare:
            return
        if not any(number in self.pairs or self._outputs.modules[number] for number in tree.leaves):
            fitting = [part for part in candidates.get(tree.treedef, ()) if self._fits(tree, part, exact)]
            weights = {id(part): self._weight(tree, part, candidates[tree.treedef]) for part in fitting}
            chosen = [part for part in fitting if weights[id(part)]]
            chosen.sort(key=lambda part: (part.key != tree.key, -weights[id(part)]))
            if chosen and (not alone or len(chosen) == 1 or chosen[0].key == tree.key):
                self._take(tree, chosen[0])
                return
            if fitting and not chosen and not alone and not all(map(self._evidence.hands_through, tree.leaves)):
                self._doubt(tree, fitting[0])
        for child in self._outputs.children(tree, depth):
            self._descend(child, depth + 1, candidates, exact, alone)

    def _fits(self, tree: Tree, part: Tree, exact: bool) -> bool:
        if any(argument in self._taken for argument in part.leaves):
            return False
        equal = sum(map(self._same, tree.leaves, part.leaves))
        return equal == len(tree.leaves) if exact else 2 * equal > len(tree.leaves)

    def _weight(self, tree: Tree, part: Tree, alike: Sequence[Tree]) -> int:
        """How many leaves of a result are carried from leaves of an argument; of one that is named at least one.

        Parts of one structure (`alike`) may change places with each other.
        """
        changed = [n for n, i in zip(tree.leaves, part.leaves, strict=True) if not self._evidence.unchanged(n, i)]
        carried = [n for n in changed if not self._evidence.origins(n).isdisjoint(part.leaves)]
        if not carried and part.key == tree.key:
            others = {leaf for other in alike for leaf in other.leaves}
            carried = [n for n in changed if not self._evidence.origins(n).isdisjoint(others)]
        if not self._known.isdisjoint(part.leaves) and not any(map(self._evidence.learnt, carried)):
            return 0
        return max(len(carried), self._named is not None)

    def _doubt(self, tree: Tree, part: Tree) -> None:
        """A note that a result looks like state and was not taken for it."""
        what = "other values"
        if any(map(self._evidence.learnt, tree.leaves)):
            what = "gradients"
            self.differentiated.update(part.leaves)
        name = shown(common_path(self._outputs, tree)) or "the result"
        note = (
            f"{name} has the structure of {shown(common_path(self._inputs, part))} but holds {what}, no update of it: "
            "it is not taken as new state; state_argnums or state_argnames say otherwise"
        )
        if note not in self.notes:
            self.notes.append(note)

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
        named = self._named is not None
        strong = named_batch or named or not self.pairs
        free = [tree for tree in self._inputs.trees if not any(i in self._taken for i in tree.leaves) and tree.leaves]
        arrays = {tree.start for tree in free if any(is_batch_like(*self._inputs.types[i]) for i in tree.leaves)}
        numbers = [n for n in range(len(self._outputs.types)) if n not in self.pairs and not self._outputs.modules[n]]
        for tree in free:
            if not tree.is_bare or (tree.start in arrays and len(arrays) == 1 and not (named_batch or named)):
                continue
            shape, dtype = self._inputs.types[tree.start]
            counter = is_key(shape, dtype) or (shape == () and np.issubdtype(dtype, np.integer))
            fitting = [
                n
                for n in numbers
                if self._same(n, tree.start)
                and self._evidence.depends(n, tree.start)
                and (named or not self._evidence.unchanged(n, tree.start))
            ]
            if tree.start in self._known:
                fitting = [n for n in fitting if self._evidence.carried(n, tree.start) and self._evidence.learnt(n)]
            fitting.sort(key=lambda n: (not self._evidence.carried(n, tree.start), len(self._evidence.origins(n))))
            called = [n for n in fitting if self._outputs.keys[n][-1:] == (tree.key,)]
            others = fitting if counter or named else self._updates(tree, fitting) if strong else []
            chosen = called or others
            if chosen:
                numbers.remove(chosen[0])
                arrays.discard(tree.start)
                self._pair(chosen[0], tree.start)
            elif any(
                one.is_bare and one.start in fitting and self._evidence.learnt(one.start) for one in self._results()
            ):
                self.differentiated.add(tree.start)

    def _updates(self, tree: Tree, numbers: Sequence[int]) -> list[int]:
        """Of results with the type of a bare array, those that are an update of it."""
        # State of another step is not expected among the results: `generate(params, cache)` returns (cache, token).
        own = [one for one in self._inputs.trees if not one.leaves or not self._known.issuperset(one.leaves)]
        there = self._results()
        pairs = zip(own, there, strict=False)
        same_place = next((result.leaves for one, result in pairs if one is tree), range(0))
        scalar = not self._inputs.types[tree.start][0]
        return [
            n
            for n in numbers
            if self._evidence.carried(n, tree.start) and (self._evidence.learnt(n) or (n in same_place and not scalar))
        ]

    def _results(self) -> list[Tree]:
        """The parts of the result, or the result if it is one array."""
        whole = self._outputs.trees[0]
        return [whole] if whole.is_bare else self._outputs.children(whole, 0)

    def complete(self) -> None:
        """Looks whether all that is named as state comes back.

        Raises:
          SignatureError: naming the argument.
        """
        assert self._named is not None
        back = set(self.pairs.values())
        for tree in self._inputs.trees:
            if tree.start in self._named and tree.leaves and back.isdisjoint(tree.leaves):
                raise SignatureError(
                    f"state_argnums or state_argnames name {tree.key}, but no result has its structure, shapes and "
                    "dtypes; return its new value, or leave it out"
                )

    def _same(self, number: int, argument: int) -> bool:
        return self._outputs.types[number] == self._inputs.types[argument]

    def _pair(self, number: int, argument: int) -> None:
        self.pairs[number] = argument
        self._taken.add(argument)


def named_leaves(
    calling: Calling, inputs: Flat, kind: str, argnums: Argnums, argnames: str | Sequence[str]
) -> frozenset[int] | None:
    """The leaves of the arguments that the user named as the state or as the batch, or None for "auto".

    Args:
      kind: "state" or "batch".
      argnums, argnames: the options `state_argnums` and `state_argnames`, or those of the batch.

    Raises:
      SignatureError: a name or a number that is no argument of this call, or a static one.
    """
    names = set(one_or_several(argnames))
    automatic = isinstance(argnums, str)
    if automatic and argnums != "auto":
        raise SignatureError(f'{kind}_argnums is {argnums!r}; give "auto", an int or a tuple of ints')
    if automatic and not names:
        return None
    numbers = () if automatic else one_or_several(argnums)
    names |= {calling.names[position_of(i, len(calling.names), f"{kind}_argnums")] for i in numbers}
    trees = {tree.key: tree for tree in inputs.trees}
    unknown = sorted(names - set(trees))
    if unknown:
        raise SignatureError(
            f"{kind}_argnums or {kind}_argnames name {', '.join(unknown)}, but the traced arguments are "
            f"{', '.join(trees)}"
        )
    return frozenset(i for name in names for i in trees[name].leaves)


def _type_text(kind: tuple[tuple[int, ...], Any]) -> str:
    return f"{kind[1]}[{','.join(map(str, kind[0]))}]"


def donated_leaves(traced: Traced, donate: int | str | Sequence[int | str]) -> list[int]:
    """The numbers of the leaves of the arguments that `donate_argnums` and `donate_argnames` name.

    A name that is not passed, as that of a default, donates nothing.

    Raises:
      OptionError: there is no such argument, or it is static.
    """
    assert not isinstance(donate, str), "callers know what is donated automatically"
    named = (donate,) if isinstance(donate, int) else tuple(donate)
    calling = traced.calling
    assert calling is not None
    leaves = argument_leaves(traced)
    positions = dict(zip(calling.dynamic, leaves, strict=False))
    roots: dict[int | str, range] = dict(zip(calling.roots(), leaves, strict=True))
    count = len(calling.names)
    chosen: set[int] = set()
    for one in named:
        if isinstance(one, str):
            chosen.update(roots.get(one, ()))
            continue
        if one % max(count, 1) not in positions or not -count <= one < count:
            raise OptionError(
                f"donate_argnums names argument {one}, which is static or does not exist: the step was called "
                f"with {count} positional arguments"
            )
        chosen.update(positions[one % count])
    return sorted(chosen - {argument for _, argument in traced.through})  # the caller gets these back


def argument_leaves(traced: Traced, positional: bool = False) -> list[range]:
    """The numbers of the leaves of each argument that is not static: positional ones, then keywords if not left out."""
    out, start = [], 0
    for group in jax.tree_util.treedef_children(traced.in_tree)[: 1 if positional else 2]:
        for tree in jax.tree_util.treedef_children(group):
            out.append(range(start, start + tree.num_leaves))
            start += tree.num_leaves
    return out
