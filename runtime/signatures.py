"""The parts of a signature that each call compares, from its form to its weak types (`tracing.calls`).

The form is compared where something is static, the structure by flattening, shapes and dtypes when arguments are bound
to buffers, and the weak types here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import AlpaLiteError
from alpa_lite.graph import Traced
from alpa_lite.passes.tracing.arguments import argument_leaves
from alpa_lite.passes.tracing.calls import is_weak, leaf_type
from alpa_lite.runtime import state_aliasing


class NewSignature(AlpaLiteError):
    """The arguments do not have the signature that the step was planned for (`tracing.calls`).

    `ParallelStep` then plans for theirs, so that no caller of it sees this error.
    """

    def __init__(self, what: str):
        super().__init__(f"this executable was planned for another signature: {what}")


FORM = "the number of arguments, the keywords or a static argument"
STRUCTURE = "the structure of the arguments"
WEAK = "whether a dtype is weak"
SETTINGS = "JAX's settings"


def check_leaf(leaf: Any, aval: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raises NewSignature unless a leaf has the shape (or a given one) and dtype of an abstract value."""
    wanted = (aval.shape if shape is None else shape, aval.dtype)
    try:
        have = leaf_type(leaf)[:2]
    except TypeError:
        raise NewSignature(f"a {type(leaf).__name__} in place of an array") from None
    if have != wanted:
        raise NewSignature(f"an argument's (shape, dtype) is {have} and was {wanted}")


@dataclass(frozen=True, eq=False)
class WeakPattern:
    """The flat arguments of a call that have a weak dtype, and the results that then have one.

    Attributes:
      owner: of the pattern.
      arguments: a flag for each flat argument.
      kept: of those arguments that are compared at every call.
      results: a flag for each flat result.
      changes: number and flag of each result that leaves the executable with the other flag.
    """

    owner: WeakTypes
    arguments: tuple[bool, ...]
    kept: list[bool]
    results: tuple[bool, ...]
    changes: tuple[tuple[int, bool], ...]

    def relabel(self, results: list[Any]) -> None:
        """Gives results the weak types that `jit` would."""
        for number, weak in self.changes:
            results[number] = _jax.array_with_weak_type(results[number], weak)

    @functools.cached_property
    def following(self) -> WeakPattern | None:
        """The pattern of the next call if state is passed on and nothing else changes; None if it is not accepted."""
        arguments = list(self.arguments)
        for argument, result in self.owner.state:
            arguments[argument] = self.results[result]
        return self.owner.accepted.get(tuple(arguments))


class WeakTypes:
    """The patterns of weak dtypes among the flat arguments that a step accepts.

    A step that was traced with a Python number, and with an array of the same dtype, is usually the same program: a
    pattern is accepted once tracing has shown that. Results may have other weak types all the same.

    Attributes:
      planned: the pattern that the step was planned for, whose results have the weak types that were compiled.
      accepted: every pattern, by the flags of the arguments.
      state: (argument, result) of state that comes back.
    """

    def __init__(self, traced: Traced, state: Iterable[tuple[int, int]], kept: Iterable[int]) -> None:
        """Accepts the weak types of the planned arguments.

        Args:
          traced: the step.
          state: as the attribute.
          kept: the arguments that are compared at every call.
        """
        self.accepted: dict[tuple[bool, ...], WeakPattern] = {}
        self.state, self._kept = tuple(state), tuple(kept)
        stacked = traced.stacked
        first = [one.numbers[0] for one in stacked.arguments] if stacked else range(len(traced.arguments))
        made = [one.numbers[0] for one in stacked.results] if stacked else range(len(traced.outputs))
        self._compiled = [traced.outputs[n].weak for n in made]
        self.planned = self.accept([traced.arguments[n].weak for n in first], self._compiled)

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> WeakPattern:
        """Marks this pattern as equivalent: it makes the same program."""
        kept = [arguments[n] for n in self._kept]
        changes = tuple((n, weak) for n, weak in enumerate(results) if weak != self._compiled[n])
        for known in self.accepted.values():
            known.__dict__.pop("following", None)
        found = WeakPattern(self, tuple(arguments), kept, tuple(results), changes)
        self.accepted[found.arguments] = found
        return found

    def pattern_of(self, leaves: Sequence[Any]) -> WeakPattern:
        """The pattern of these leaves. Raises NewSignature unless it is accepted."""
        found = self.accepted.get(tuple(map(is_weak, leaves)))
        if found is None:
            raise NewSignature(WEAK)
        return found


class Flattening:
    """Flattens the arguments of calls. Remembers by id what the last call returned, which may have been given again."""

    def __init__(self, traced: Traced) -> None:
        self._tree = traced.in_tree
        ranges = argument_leaves(traced, positional=True)
        count = len(state_aliasing.pieces_of(traced))
        state = {argument for argument, _ in state_aliasing.user_state(traced)}
        self._positions = [i for i, leaves in enumerate(ranges) if not state.isdisjoint(leaves)]
        keywords = range(ranges[-1].stop if ranges else 0, count)
        self._arity = len(ranges) if state and state.isdisjoint(keywords) else -1
        self._returned: frozenset[int] = frozenset()

    def returned(self, out: Any) -> None:
        """Remembers the result of a call."""
        self._returned = frozenset(map(id, (out, *out) if isinstance(out, tuple | list) else (out,)))

    def flatten(self, pure: Any) -> list[Any]:
        """The leaves of a pytree. Raises NewSignature if its structure is not the traced one."""
        leaves, tree = jax.tree_util.tree_flatten(pure)
        if tree != self._tree:
            raise NewSignature(STRUCTURE)
        return leaves

    def along(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the flat arguments, flattened faster if the state, all positional, is that of the last call's result.

        In place of an array, that also takes a pytree, which `check_leaf` refuses as it refuses a string.
        """
        if len(args) == self._arity and self._returned.issuperset([id(args[i]) for i in self._positions]):
            try:
                return self._tree.flatten_up_to((args, kwargs))
            except Exception:  # a pytree of the user's own may raise anything
                self._returned = frozenset()
        return self.flatten((args, kwargs))
