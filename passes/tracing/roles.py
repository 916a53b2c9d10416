"""Roles of the arguments of a step: state, batch, frozen weights, others; and which results are new values of which.

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

A step without state is a function like any other: evaluation, prediction, gradients. Keys and scalars are never the
batch, nor, where anything else could be, is an argument that comes back as it went in or that products read as a weight
(`evidence`): these are *frozen*, and so are pytrees whose arrays share no leading dim. An argument with indices, or a
bare array next to state, is data however it is read: the nodes of a graph are looked up, and an adjacency matrix is
multiplied. All else is data. The batch is the data whose leading dim most arguments share (in a step without state
first: that a result has); where none is shared, each is a batch of its own size (nodes, edges and graphs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Sequence, Set

import numpy as np
from scipy.optimize import linear_sum_assignment

from alpa_lite.errors import SignatureError
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing.evidence import Evidence
from alpa_lite.passes.tracing.leaves import Part


class Roles:
    """The roles of all leaves (the module's docstring gives the rules).

    Attributes:
      arguments: the role of each argument, as `Argument.role` has it.
      state: output -> the argument that it is the new value of.
      returned: output -> the argument that it is as it came, and that is not state.
      notes: for the plan.
    """

    def __init__(
        self, inputs: Part, outputs: Part, evidence: Evidence, *, state: frozenset[int] | None,
        batch: frozenset[int] | None, known: frozenset[int],
    ) -> None:  # fmt: skip
        """Finds the roles of a step's arguments.

        Args:
          inputs, outputs: the leaves of the arguments, and of the result.
          evidence: of the graph.
          state, batch: the leaves that the user named, or None.
          known: leaves that are state of another step.

        Raises:
          SignatureError: an argument that is named as state does not come back, or every argument comes back.
        """
        self.state: dict[int, int] = {}
        self.notes: list[str] = []
        self._inputs, self._outputs, self._evidence = inputs, outputs, evidence
        self._named, self._batch_known = state is not None, batch is not None or state is not None
        self._known = frozenset() if self._named else known
        self._weak = False  # whether the place of an argument that is one array may tell
        self._differentiated: set[int] = set()  # the arguments whose gradients are among the outputs: no batch
        self._taken = set(batch or ()).union(() if state is None else inputs.leaves.keys() - state)
        # State of another step is not expected among the results: `generate(params, cache)` returns (cache, token).
        own = [part for part in inputs.children if not self._known.issuperset(part.leaves)]
        results = [part for part in outputs.parts if len(part.keys) == 2] or outputs.children
        self._places = {argument.first: result.leaves for argument, result in zip(own, results, strict=False)}
        self._find_state(state or frozenset())
        back = frozenset(self.state.values())
        if batch is None and back:
            _refuse_all_state(inputs, back)
        handed = {n: evidence.returned_argument(n) for n in outputs.leaves if n not in self.state}
        self.returned = {n: i for n, i in handed.items() if i is not None and i in inputs.leaves.keys() - back}
        units, leaves = self._find_batch(batch, known)
        data = {i for unit in units for i in unit.leaves}
        self.arguments = [
            "state" if i in back else "batch" if i in leaves
            else "frozen" if leaf.is_batch_like and i not in data else "other"
            for i, leaf in inputs.leaves.items()
        ]  # fmt: skip

    def _find_state(self, named: Set[int]) -> None:
        """Pairs NNX objects, then pytrees, then arrays; of these one is left for the batch if none is named."""
        self._match_objects()
        self._match(part for part in self._inputs.children if not part.is_bare)
        if not self.state:
            self._match(part for part in self._inputs.parts if len(part.keys) > 1 and not part.is_bare)
        self._weak = self._batch_known or not self.state
        self._match(part for part in self._inputs.children if part.is_bare)
        for part in self._inputs.children:
            if part.first in named and set(self.state.values()).isdisjoint(part.leaves):
                raise SignatureError(
                    f"state_argnums or state_argnames name {part.key}, but no result has its structure, shapes and "
                    "dtypes; return its new value, or leave it out"
                )

    def _find_batch(self, named: Set[int] | None, known: Set[int]) -> tuple[Sequence[Part], Set[int]]:
        """Returns the data among the arguments, and the leaves of the batch; notes which it is."""
        state, why = frozenset(self.state.values()), "named by batch_argnums or batch_argnames"
        if named is not None:
            units = chosen = [part for part in self._inputs.children if part.first in named and part.leading_dims]
        else:
            taken = state | known | self._differentiated
            taken |= {i for i, leaf in self._inputs.leaves.items() if leaf.in_object}
            parts, handed = self._inputs.largest_without(taken), set(self.returned.values())
            units = _data(parts, handed, self._evidence.weights, has_state=bool(state))
            outputs = () if state else self._outputs.leaves.items()
            results = {leaf.shape[0] for n, leaf in outputs if leaf.shape and not self._evidence.is_learnt(n)}
            chosen, why = _most_shared(units, results), "the step neither returns nor updates {}"
        batch, note = _batch_of(chosen, why)
        self.notes.insert(0, note)
        return units, batch

    def _match_objects(self) -> None:
        """Pairs the leaves of NNX objects, by path."""
        found = {leaf.path: i for i, leaf in self._inputs.leaves.items() if leaf.in_object}
        for n, leaf in self._outputs.leaves.items():
            i = found.get(leaf.path) if leaf.in_object else None
            if i is not None and self._evidence.returned_argument(n) != i and self._same(n, i):
                self.state[n] = i
        self._taken.update(found.values())

    def _match(self, candidates: Iterable[Part]) -> None:
        """Pairs arguments, or parts of arguments, with results of their structure, larger ones first."""
        arguments, results_of = _by_structure(candidates), _by_structure(self._outputs.parts)
        for one in sorted(arguments, key=lambda one: arguments[one][0].size, reverse=True):
            free = list(filter(self._is_free, arguments[one]))
            left = [part for part in results_of.get(one, ()) if self.state.keys().isdisjoint(part.leaves)]
            for result, argument in self._assigned(left, free):
                if not self._is_last_array(argument):
                    self._take(result, argument)
            for result in left:
                if self.state.keys().isdisjoint(result.leaves):
                    self._doubt(result, [part for part in free if self._is_free(part) and self._fits(result, part)])

    def _is_last_array(self, argument: Part) -> bool:
        """Returns whether an argument that is one array is the only one that may be the batch."""
        arrays = [part for part in self._inputs.children if self._is_free(part) and part.leading_dims]
        return argument.is_bare and not self._batch_known and arrays == [argument]

    def _assigned(self, results: list[Part], arguments: list[Part]) -> list[tuple[Part, Part]]:
        """Returns the pairs among results and arguments of one structure, as the module's docstring says."""
        if not results or not arguments:
            return []

        def matrix(criterion: Callable[[Part, Part], float]) -> np.ndarray:
            return np.array([[criterion(result, argument) for argument in arguments] for result in results], float)

        alike = {leaf for part in arguments for leaf in part.leaves}
        weights, order = matrix(lambda r, a: self._weight(r, a, alike)), np.eye(len(results), len(arguments))
        carried, updates = matrix(lambda r, a: self._carried(r.leaves, a.leaves)) > 0, weights.any(axis=1)
        # Results that are updates of one argument each, and each of another. Pytrees that are handed through count.
        handed = [not result.is_bare and self._is_handed_through(result) for result in results]
        rows = np.flatnonzero(carried.any(axis=1) & (updates | handed))
        places = np.flatnonzero(carried[rows].any(axis=0))
        if updates[rows].any() and len(rows) == len(places) == carried[rows].sum():
            weights[rows], order[rows], order[rows, places] = 0, 0, 1  # where values come from does not count for these
            weights[np.ix_(rows, places)] = matrix(self._fits)[np.ix_(rows, places)]
        types = matrix(lambda r, a: all(map(self._same, r.leaves, a.leaves)))
        scores = order
        for criterion in (weights, matrix(lambda r, a: r.key == a.key), weights > 0, types):
            scores = (scores + (scores.max(axis=1).sum() + 1) * criterion) * (weights > 0)  # decides before the last
        chosen = zip(*linear_sum_assignment(scores, maximize=True), strict=True)
        pairs = [(results[r], arguments[a]) for r, a in chosen if weights[r, a]]
        return sorted((p for p in pairs if self._named or self._changed(*p)), key=lambda pair: pair[1].first)

    def _weight(self, result: Part, argument: Part, alike: set[int]) -> int:
        """How much speaks for a result as the new value of an argument: leaves that are carried; 0 if it is not.

        Args:
          alike: the leaves of all arguments of the structure. Those that are parts of a container may change places.
        """
        if not (self._may_update if argument.is_bare else self._fits)(result, argument):
            return 0
        changed = self._changed(result, argument)
        carried = [n for n in changed if self._carried([n], argument.leaves)]
        if not carried and not argument.is_bare and result.key == argument.key:
            carried = [n for n in changed if self._carried([n], alike)]
        learnt = any(map(self._evidence.is_learnt, carried))
        if not self._known.isdisjoint(argument.leaves) and not learnt:
            return 0
        if not argument.is_bare:
            return max(len(carried), self._named)
        leaf = argument.leaves[argument.first]
        counts = leaf.is_key or (not leaf.shape and np.issubdtype(leaf.dtype, np.integer))
        if counts or self._named or result.key == argument.key:
            return 1 + len(carried)
        is_placed = bool(leaf.shape) and result.first in self._places.get(argument.first, ())
        return int(self._weak and bool(carried) and (learnt or is_placed))

    def _doubt(self, result: Part, arguments: list[Part]) -> None:
        """Notes that a result has the structure of an argument and is not its new value; a gradient tells weights."""
        is_learnt = any(map(self._evidence.is_learnt, result.leaves))
        if result.is_bare:
            if is_learnt and len(result.keys) <= 2:
                alike = [part for part in arguments if self._may_update(result, part) and not self._is_last_array(part)]
                self._differentiated.update(part.first for part in alike)
            return
        if not arguments or self._is_handed_through(result):
            return
        if is_learnt:
            self._differentiated.update(arguments[0].leaves)
        note = (
            f"{result.name} has the structure of {arguments[0].name} but holds "
            f"{'gradients' if is_learnt else 'other values'}, no update of it: it is not taken as new state; "
            "state_argnums or state_argnames say otherwise"
        )
        if note not in self.notes:
            self.notes.append(note)

    def _take(self, result: Part, argument: Part) -> None:
        self._taken.update(argument.leaves)
        for (number, after), (i, before) in zip(result.leaves.items(), argument.leaves.items(), strict=True):
            if self._same(number, i):
                self.state[number] = i
            else:
                name = format_path(before.path)
                self.notes.append(f"{name} is {before} but comes back as {after}: it is not kept as state")

    def _may_update(self, result: Part, argument: Part) -> bool:
        """Returns whether one array may be the new value of another, by its type and its dependences."""
        is_changed = self._named or bool(self._changed(result, argument))
        return is_changed and self._evidence.depends(result.first, argument.first)

    def _changed(self, result: Part, argument: Part) -> list[int]:
        """Returns the leaves of a result that are not those of an argument as they came."""
        leaves = zip(result.leaves, argument.leaves, strict=True)
        return [n for n, i in leaves if self._evidence.returned_argument(n) != i]

    def _carried(self, numbers: Iterable[int], leaves: Container[int]) -> bool:
        """Returns whether some outputs are carried from any of some leaves."""
        return any(leaf in leaves for number in numbers for leaf in self._evidence.origins(number))

    def _is_handed_through(self, result: Part) -> bool:
        return all(self._evidence.returned_argument(n) is not None for n in result.leaves)

    def _fits(self, result: Part, argument: Part) -> bool:
        """Returns whether most leaves of a result and an argument of one structure have equal shapes and dtypes."""
        return 2 * sum(map(self._same, result.leaves, argument.leaves)) > len(argument.leaves)

    def _same(self, number: int, leaf: int) -> bool:
        return self._outputs.leaves[number].kind == self._inputs.leaves[leaf].kind

    def _is_free(self, part: Part) -> bool:
        return self._taken.isdisjoint(part.leaves)


def _by_structure(parts: Iterable[Part]) -> dict[Hashable, list[Part]]:
    """Returns the parts that hold no NNX object, by structure."""
    groups: dict[Hashable, list[Part]] = {}
    for part in parts:
        if not any(leaf.in_object for leaf in part.leaves.values()):
            groups.setdefault(part.structure, []).append(part)
    return groups


def _refuse_all_state(inputs: Part, state: frozenset[int]) -> None:
    """Several arguments that all come back leave no batch: more likely one of them is the batch."""
    arrays = [part for part in inputs.children if part.leading_dims]
    plain = [part for part in arrays if not all(leaf.in_object for leaf in part.leaves.values())]
    if plain and len(arrays) > 1 and all(state.issuperset(part.leaves) for part in plain):
        names = ", ".join(part.key for part in arrays)
        raise SignatureError(
            f"every argument ({names}) comes back with the same structure, shapes and dtypes, so none can be "
            "recognised as the batch. Name the batch with batch_argnums=(i,), or give batch_argnums=() if there is none"
        )


def _data(parts: Iterable[Part], handed: Set[int], weights: Set[int], *, has_state: bool) -> list[Part]:
    """Returns the data among the parts that are not state.

    Args:
      handed, weights: the leaves that the step returns as they are, and those that it reads as weights: an argument of
        nothing but the former, or with one of the latter, is not data if any other could be.
    """
    units = [unit for unit in parts if unit.leading_dims]
    units = [unit for unit in units if not handed >= unit.leaves.keys()] or units
    is_data = [
        weights.isdisjoint(unit.leaves) or (unit.is_bare and has_state) or unit.has_indices for unit in units
    ]  # fmt: skip
    units = [unit for unit, keep in zip(units, is_data, strict=True) if keep] or units
    uniform = [unit for unit in units if len(unit.leading_dims) == 1 or unit.has_indices]
    return uniform or (units if has_state else [])


def _most_shared(units: Sequence[Part], results: Collection[int]) -> Sequence[Part]:
    """Returns the arguments that have a leading dim of `results`, else that which most share; all if none is."""
    led = [unit for unit in units if not unit.leading_dims.keys().isdisjoint(results)]
    if led or not units:
        return led
    (dim, most), *others = Counter(dim for unit in units for dim in unit.leading_dims).most_common(2)
    alone = most == 1 or (others and others[0][1] == most)
    return [unit for unit in units if alone or dim in unit.leading_dims]


def _batch_of(units: Sequence[Part], why: str) -> tuple[frozenset[int], str]:
    """Returns the leaves of the batch among those of some arguments, and a note which it is and why."""
    if not units:
        return frozenset(), "no argument was taken as the batch; batch_argnums=(i,) or batch_argnames=(name,) name it"
    counters = [unit.leading_dims for unit in units]
    if common := set(counters[0]).intersection(*counters[1:]):
        counters = [sum(counters, Counter[int]())] * len(units)  # else each has a size of its own
    sizes = [max(sorted(common or counter), key=counter.__getitem__) for counter in counters]
    leaves = frozenset(
        i
        for unit, size in zip(units, sizes, strict=True)
        for i, leaf in unit.leaves.items()
        if leaf.is_batch_like and leaf.shape[0] == size
    )
    dims = f"leading dim {sizes[0]}" if common else f"leading dims {', '.join(map(str, sizes))}"
    names = ", ".join(f"`{unit.name}`" for unit in units)
    was, them = ("was", "it") if len(units) == 1 else ("were", "them")
    return leaves, f"{names} {was} taken as the batch ({dims}): {why.format(them)}"
