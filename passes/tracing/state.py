"""State: which results of a step are the new values of which of its arguments.

A training step maps (state, batch) to (new state, results), but nothing in its signature says which is which. The
state is an argument, or a part of one, that comes back: a result has its structure, shapes and dtypes, and is an
update of it (`evidence`), in whole or in part. Gradients and predictions are no updates, nor are weights that are
handed through.

    NNX object    updated in place: each leaf that the step changes is state
    pytree        state if a leaf of the result is carried from a leaf of the argument, be it in another place (buffers
                  that change places). Whole arguments come first; parts of arguments, `step(everything)`, only if none
                  comes back. Where most of the shapes and dtypes are equal, the leaves that differ are no state, and a
                  note says so
    bare array    a weak sign: predictions often have the batch's shape, and a loss that of any scalar. Random keys and
                  integer scalars are state if an output of their type depends on them. Other arrays if an output that
                  depends on them repeats the argument's name; or, where nothing was found by the rules above or the
                  batch is named, if one is carried from them that is learnt (depends on a reverse pass) or stands among
                  the results where the argument stands among the arguments. One argument with arrays must be left for
                  the batch

Results and arguments of one structure are paired so that, in this order, most pairs, most results under their
argument's name, and most carried leaves are found: a moving average is carried from the average and from the
parameters, new parameters from the parameters alone. Where each result is an update of one argument, and each of
another, the results are taken in the order of these arguments: `return f(q), g(p)` of `step(p, q, batch)` gives the new
p first, as its caller passes them back, `p, q = step(p, q, batch)`. To return them in another order, return them in a
container whose keys are the arguments' names.

Arguments that the user names as state are state without evidence, and no others are, NNX objects apart. Arguments named
as the batch are never state but for NNX objects. Those *known* to be the state of another step (an evaluation's
parameters) are state of this one only if a carried leaf is learnt, too: a step that merely derives values from them
must not donate them.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from alpa_lite.errors import SignatureError
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing.arguments import Flat, LeafKind, Tree, common_path, is_batch_like, is_key
from alpa_lite.passes.tracing.evidence import Evidence


def match_state(
    inputs: Flat,
    outputs: Flat,
    evidence: Evidence,
    *,
    batch: frozenset[int] | None = None,
    known: frozenset[int] = frozenset(),
    named: frozenset[int] | None = None,
) -> Matcher:
    """Pairs outputs with the arguments that they are the new values of (the module's docstring gives the rules).

    Args:
      inputs: the leaves of the arguments.
      outputs: the leaves of the result.
      evidence: of the graph.
      batch: the leaves that the user named as the batch, or None.
      known: leaves that are state of another step.
      named: the leaves that the user named as state, or None.

    Raises:
      SignatureError: an argument that is named as state does not come back.
    """
    matcher = Matcher(inputs, outputs, batch, known, evidence, named)
    matcher.match_modules()
    matcher.match(tree for tree in inputs.trees if not tree.is_bare)
    if not matcher.pairs:
        parts = (part for tree in inputs.trees for part in inputs.subtrees(tree) if part.depth)
        matcher.match(part for part in parts if not part.is_bare)
    matcher.match_arrays()
    if named is not None:
        matcher.check_complete(named)
    return matcher


class Matcher:
    """Which outputs are the new values of which arguments.

    Attributes:
      pairs: {output: argument}, as far as found.
      notes: for the plan.
      differentiated: the arguments whose gradients are among the outputs: weights, no batch.
    """

    def __init__(
        self, inputs: Flat, outputs: Flat, batch: frozenset[int] | None, known: frozenset[int], evidence: Evidence,
        named: frozenset[int] | None,
    ) -> None:  # fmt: skip
        self.pairs: dict[int, int] = {}
        self.notes: list[str] = []
        self.differentiated: set[int] = set()
        self._inputs, self._outputs, self._evidence = inputs, outputs, evidence
        self._named, self._batch_known = named is not None, batch is not None or named is not None
        self._known = frozenset() if self._named else known
        self._weak = False  # whether the place of an argument that is one array may tell
        self._taken = set(batch or ()).union(() if named is None else set(range(len(inputs.types))) - named)
        # State of another step is not expected among the results: `generate(params, cache)` returns (cache, token).
        own = [tree for tree in inputs.trees if not tree.leaves or not self._known.issuperset(tree.leaves)]
        children = outputs.children(outputs.trees[0]) or outputs.trees
        self._places = {argument.start: result.leaves for argument, result in zip(own, children, strict=False)}

    def match_modules(self) -> None:
        """Pairs the leaves of NNX objects, by path."""
        found = {path: i for i, path in enumerate(self._inputs.paths) if self._inputs.modules[i]}
        for number, path in enumerate(self._outputs.paths):
            argument = found.get(path) if self._outputs.modules[number] else None
            if (
                argument is not None
                and self._same(number, argument)
                and self._evidence.returned_argument(number) != argument
            ):
                self.pairs[number] = argument
        self._taken.update(found.values())

    def match_arrays(self) -> None:
        """Pairs arguments that are one array. One is left for the batch unless that, or the state, is named."""
        self._weak = self._batch_known or not self.pairs
        self.match(tree for tree in self._inputs.trees if tree.is_bare)

    def match(self, candidates: Iterable[Tree]) -> None:
        """Pairs arguments, or parts of arguments, with results of their structure, larger ones first."""
        arguments = self._grouped(candidates, self._inputs)
        results_of = self._grouped(self._outputs.subtrees(self._outputs.trees[0]), self._outputs)
        sizes = {one: (trees[0].treedef.num_leaves, trees[0].treedef.num_nodes) for one, trees in arguments.items()}
        for one in sorted(arguments, key=sizes.__getitem__, reverse=True):
            free = list(filter(self._is_free, arguments[one]))
            left = [
                tree
                for tree in results_of.get(one, ())
                if not any(n in self.pairs or self._outputs.modules[n] for n in tree.leaves)
            ]
            for result, argument in self._assigned(left, free):
                if not self._is_last_array(argument):
                    self._take(result, argument)
            for result in left:
                if self.pairs.keys().isdisjoint(result.leaves):
                    self._doubt(result, [tree for tree in free if self._is_free(tree) and self._fits(result, tree)])

    def _grouped(self, trees: Iterable[Tree], flat: Flat) -> dict[Hashable, list[Tree]]:
        """Trees by structure; those that are one array, by its type."""
        groups: dict[Hashable, list[Tree]] = {}
        for tree in trees:
            if tree.leaves:
                groups.setdefault(flat.types[tree.start] if tree.is_bare else tree.treedef, []).append(tree)
        return groups

    def _is_last_array(self, argument: Tree) -> bool:
        """Returns whether an argument that is one array is the only one that may be the batch."""
        if not argument.is_bare or self._batch_known:
            return False
        arrays = {
            tree.start
            for tree in self._inputs.trees
            if self._is_free(tree) and any(is_batch_like(self._inputs.types[i]) for i in tree.leaves)
        }
        return arrays == {argument.start}

    def check_complete(self, named: frozenset[int]) -> None:
        """Raises SignatureError for an argument that is named as state and does not come back."""
        back = set(self.pairs.values())
        for tree in self._inputs.trees:
            if tree.leaves and tree.start in named and back.isdisjoint(tree.leaves):
                raise SignatureError(
                    f"state_argnums or state_argnames name {tree.key}, but no result has its structure, shapes and "
                    "dtypes; return its new value, or leave it out"
                )

    def _assigned(self, results: list[Tree], arguments: list[Tree]) -> list[tuple[Tree, Tree]]:
        """Returns the pairs among results and arguments of one kind, as the module's docstring says."""
        if not results or not arguments:
            return []
        alike = {leaf for tree in arguments for leaf in tree.leaves}
        weights = np.array([[self._weight(result, tree, alike) for tree in arguments] for result in results], float)
        order = np.eye(*weights.shape)
        rows, places = self._permutation(results, arguments, [best > 0 for best in weights.max(axis=1)])
        weights[rows], order[rows], order[rows, places] = 0, 0, 1  # where values come from does not count for these
        weights[np.ix_(rows, places)] = [[self._fits(results[r], arguments[p]) for p in places] for r in rows]
        keys = np.array([[result.key == argument.key for argument in arguments] for result in results])
        scores = order
        types = np.array([[all(map(self._same, r.leaves, a.leaves)) for a in arguments] for r in results])
        for criterion in (weights, keys, weights > 0, types):  # each decides before those ahead of it
            scores = (scores + (scores.max(axis=1).sum() + 1) * criterion) * (weights > 0)
        chosen = zip(*linear_sum_assignment(scores, maximize=True), strict=True)
        pairs = [(results[r], arguments[p]) for r, p in chosen if weights[r, p]]
        pairs.sort(key=lambda pair: pair[1].start)
        return [(result, argument) for result, argument in pairs if self._named or self._changed(result, argument)]

    def _permutation(
        self, results: list[Tree], arguments: list[Tree], updates: Sequence[bool]
    ) -> tuple[list[int], list[int]]:
        """The results that are updates of one argument each, and each of another, and these arguments, in order.

        Pytrees that are handed through count, if any other result is an update. None if a result has several origins.
        """
        sources = [{k for k, tree in enumerate(arguments) if self._carried(r.leaves, tree.leaves)} for r in results]
        handed = [
            not r.is_bare and all(self._evidence.returned_argument(n) is not None for n in r.leaves) for r in results
        ]
        rows = [k for k, found in enumerate(sources) if found and (updates[k] or handed[k])]
        places = sorted({place for k in rows for place in sources[k]})
        one_each = len(places) == len(rows) == sum(len(sources[k]) for k in rows)
        return (rows, places) if one_each and any(updates[k] for k in rows) else ([], [])

    def _weight(self, result: Tree, argument: Tree, alike: set[int]) -> int:
        """How much speaks for a result as the new value of an argument: leaves that are carried; 0 if it is not.

        Args:
          alike: the leaves of all arguments of the kind. Those that are parts of a container may change places.
        """
        evidence, is_bare = self._evidence, argument.is_bare
        if not (self._may_update(result, argument) if is_bare else self._fits(result, argument)):
            return 0
        changed = self._changed(result, argument)
        carried = [n for n in changed if self._carried([n], argument.leaves)]
        if not carried and not is_bare and result.key == argument.key:
            carried = [n for n in changed if self._carried([n], alike)]
        learnt = any(map(evidence.is_learnt, carried))
        if not self._known.isdisjoint(argument.leaves) and not learnt:
            return 0
        if not is_bare:
            return max(len(carried), self._named)
        shape, dtype = kind = self._inputs.types[argument.start]
        counts = is_key(kind) or (not shape and np.issubdtype(dtype, np.integer))
        if counts or self._named or result.key == argument.key:
            return 1 + len(carried)
        is_placed = bool(shape) and result.start in self._places.get(argument.start, ())
        return int(self._weak and bool(carried) and (learnt or is_placed))

    def _doubt(self, result: Tree, arguments: list[Tree]) -> None:
        """Notes that a result has the kind of some arguments and is not their new value; a gradient tells weights."""
        if result.is_bare:
            if self._evidence.is_learnt(result.start) and result.depth <= 1:
                alike = [tree for tree in arguments if self._may_update(result, tree) and not self._is_last_array(tree)]
                self.differentiated.update(tree.start for tree in alike)
            return
        if not arguments or all(self._evidence.returned_argument(n) is not None for n in result.leaves):
            return
        argument, kind = arguments[0], "other values"
        if any(map(self._evidence.is_learnt, result.leaves)):
            kind = "gradients"
            self.differentiated.update(argument.leaves)
        name = format_path(common_path(self._outputs, result)) or "the result"
        note = (
            f"{name} has the structure of {format_path(common_path(self._inputs, argument))} but holds {kind}, no "
            "update of "
            "it: it is not taken as new state; state_argnums or state_argnames say otherwise"
        )
        if note not in self.notes:
            self.notes.append(note)

    def _take(self, result: Tree, argument: Tree) -> None:
        self._taken.update(argument.leaves)
        for number, leaf in zip(result.leaves, argument.leaves, strict=True):
            if self._same(number, leaf):
                self.pairs[number] = leaf
            else:
                before, after = _type_text(self._inputs.types[leaf]), _type_text(self._outputs.types[number])
                self.notes.append(
                    f"{format_path(self._inputs.paths[leaf])} is {before} but comes back as {after}: it is not kept as "
                    "state"
                )

    def _may_update(self, result: Tree, argument: Tree) -> bool:
        """Returns whether one array may be the new value of another, by its type and its dependences."""
        changed = self._named or self._changed(result, argument)
        return bool(changed) and self._evidence.depends(result.start, argument.start)

    def _changed(self, result: Tree, argument: Tree) -> list[int]:
        """Returns the leaves of a result that are not those of an argument as they came."""
        return [
            n for n, i in zip(result.leaves, argument.leaves, strict=True) if self._evidence.returned_argument(n) != i
        ]

    def _carried(self, numbers: Iterable[int], leaves: Container[int]) -> bool:
        """Returns whether some outputs are carried from any of some leaves."""
        return any(leaf in leaves for number in numbers for leaf in self._evidence.origins(number))

    def _fits(self, result: Tree, argument: Tree) -> bool:
        """Returns whether most leaves of a result and an argument of one structure have equal shapes and dtypes."""
        return 2 * sum(map(self._same, result.leaves, argument.leaves)) > len(argument.leaves)

    def _same(self, number: int, leaf: int) -> bool:
        return self._outputs.types[number] == self._inputs.types[leaf]

    def _is_free(self, tree: Tree) -> bool:
        return self._taken.isdisjoint(tree.leaves)


def _type_text(kind: LeafKind) -> str:
    return f"{kind[1]}[{','.join(map(str, kind[0]))}]"
