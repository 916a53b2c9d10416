"""The front-end of every planned step, on one mesh or on the submeshes of a pipeline.

A call flattens the user's arguments, compares the signature, gives every buffer of the program its array, has the
back-end run the program, and returns the results as the user's pytree. Back-ends are `single.SingleExecutable`, one
executable, and `pipeline.PipelineExecutable`, which walks a list of instructions. docs/runtime.md follows one call.

A call makes sure of these:

1. *The signature is the planned one* (`binding`). Any difference raises `NewSignature` before anything runs, and the
   caller plans for the new signature.
2. *Donated arrays are ours.* A donated buffer is overwritten. Arrays that the step did not make (`ownership`) or that
   are not placed as planned are copied (`placement`), and so are those whose buffers the call is given twice. With the
   user's own `donate_argnums`, an array that is placed is taken as it is.
3. *No array was deleted.* JAX 0.10 ends the process where an executable on several devices meets one.
4. *NumPy arrays are the caller's again when the call returns*: the program reads copies.

The second check costs a few microseconds when the state is, leaf for leaf, the state that the last call returned: then
it is placed, no leaf of it occurs twice, and only other arguments that are new can share its buffers.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.ir.graph import Pieces, Stacked, Traced
from alpa_lite.passes.tracing import calls, pytrees
from alpa_lite.runtime import ownership, placement
from alpa_lite.runtime.binding import ArgumentBinder, Buffers, NewSignature, weak_flags
from alpa_lite.runtime.compile import picker
from alpa_lite.runtime.debug import nans
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.ownership import Owned
from alpa_lite.runtime.placement import DeviceCopies
from alpa_lite.runtime.stacked import StackedLeaves

Donate = str | int | Sequence[int | str]
"""The user's choice of donation: "auto", or positions and names of arguments."""


@dataclass(frozen=True, eq=False)
class LoadOptions:
    """Options of loading a step onto devices.

    Attributes:
      donate: "auto", or the positions of the arguments to donate; () for none. The program of a pipeline has it.
      devices: in the order of the cluster; None for the first of `jax.devices()`.
      owned: the arrays that the step may overwrite, shared by its executables.
      copies: of frozen weights, shared likewise.
      settings: of JAX, under which the step is called (`_jax.trace_context`); None if they are not compared.
      compiler_options: for XLA.
    """

    donate: Donate = "auto"
    devices: Sequence[Any] | None = None
    owned: Owned = field(default_factory=Owned)
    copies: DeviceCopies = field(default_factory=DeviceCopies)
    settings: tuple[Any, ...] | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)


class Executable(abc.ABC):
    """A planned step on devices. Call it like the user's function.

    NNX objects among the arguments are updated in place, as by `nnx.jit`.
    """

    def __init__(
        self, traced: Traced, buffers: Buffers, options: LoadOptions, stacked: StackedLeaves | None = None
    ) -> None:
        """Compiles nothing; the first call does, or `compiled`.

        Args:
          traced: the step, of which each argument is one of the program.
          stacked: the leaves of the user's step that are several arguments here, if there are any.
        """
        assert traced.calling is not None
        self._traced, self._calling, self._stacked = traced, traced.calling, stacked
        self._settings, self._owned = options.settings, options.owned
        self._may_overwrite = self._owned.has if options.donate == "auto" else _anything
        self._compiling, self._compiled = threading.Lock(), ()
        each_whole = (tuple(Pieces((n,)) for n in range(len(some))) for some in (traced.arguments, traced.outputs))
        leaves = traced.stacked or Stacked(*each_whole)
        pieces = [leaf.numbers for leaf in leaves.arguments]
        self._arguments = [traced.arguments[numbers[0]] for numbers in pieces]  # of the user's step
        self._planned_weak = tuple(traced.outputs[leaf.numbers[0]].weak for leaf in leaves.results)
        self._weak_results = {tuple(argument.weak for argument in self._arguments): self._planned_weak}
        # State by the flat arguments and results of the user's step, and that of it which comes back in place.
        new_value = {argument: output for output, argument in traced.state}
        result_of = {leaf.numbers[0]: n for n, leaf in enumerate(leaves.results)}
        returned = [(a, result_of[new_value[n[0]]]) for a, n in enumerate(pieces) if n[0] in new_value]
        state = [(a, r) for a, r in returned if buffers.in_place.keys() >= set(pieces[a])]
        # Non-addressable state comes back as the same arrays, which live as long as this: one of the others comes last.
        state.sort(key=lambda pair: global_array.is_addressable(buffers.sharding(buffers.in_place[pieces[pair[0]][0]])))
        self._in_place = [(n, buffers.in_place[n]) for a, _ in state for n in pieces[a]]
        self._has_state, steady = bool(state), {n for n, _ in self._in_place}
        self._pick_state = picker([a for a, _ in state])
        self._pick_rest = picker([a for a, numbers in enumerate(pieces) if not steady.issuperset(numbers)])
        self._pick_returned = picker([r for _, r in (state or returned)])
        self._donates = bool(buffers.donated)
        self._binder = ArgumentBinder(traced, buffers, steady, options.copies)
        avals = [traced.graph.values[v].aval for v in traced.graph.block.inputs]
        self._disjoint = ownership.Disjoint(
            [(buffers.sharding(b), avals[n]) for n, b in self._in_place], self._owned.has
        )

    # -- the back-end -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _compile(self) -> tuple[Any, ...]:
        """Compiles all executables: the `jax.stages.Compiled` of each; None for those of other processes."""

    @abc.abstractmethod
    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its mesh, whose devices may be those of a topology that is described alone."""

    @abc.abstractmethod
    def _start(self, leaves: Sequence[Any]) -> list[Any]:
        """All buffers at the start of a step: constants, and at least the state of `Buffers.in_place`, as it is."""

    @abc.abstractmethod
    def _execute(self, buffers: list[Any]) -> list[Any]:
        """Runs the program: the flat results, each in buffers of its own. Holds no buffer that the program ends."""

    @property
    @abc.abstractmethod
    def _program_shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings of the flat arguments and results of the program."""

    # -- the user's side --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
          ExecutionError: an executable of a pipeline failed; names the stage, the micro-batch and the source line.
        """
        if self._settings is not None and _jax.trace_context() != self._settings:
            raise NewSignature("JAX's settings")
        pure: Any = self._dynamic(args, kwargs)
        if not self._calling.modules:
            return self._traced.out_tree.unflatten(self._results(self._flat(*jax.tree.flatten(pure))))
        with pytrees.updating(self):
            pure = pytrees.split_arguments(pure, self)  # held until the end: freeing it now costs more
            out = self._results(self._flat(*jax.tree.flatten(pure)))
            return pytrees.merge_results(self._traced.out_tree.unflatten(out), self)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the arguments as arrays where the plan reads them first, in buffers of their own.

        Args:
          args, kwargs: as for a call. NNX objects are not changed.

        Returns:
          The tuple of positional arguments; with keywords, that tuple and a dict of the keywords. NNX objects come as
          new objects of the same structure, shared references kept. Static arguments come as they are.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
        """
        new_args, new_kwargs = pytrees.replace_arrays(self._dynamic(args, kwargs), self._placed_copies)
        positional, keywords = self._calling.whole(new_args, new_kwargs)
        return (positional, keywords) if kwargs else positional

    def results(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the flat results of the step on copies of the arguments, which are neither donated nor updated."""
        outputs = self._execute(self._buffers_of_copies(args, kwargs))
        return outputs if self._stacked is None else self._stacked.join(outputs)

    @property
    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings with which the flat arguments are read first, and those of the results of the user's step."""
        arguments, results = self._program_shardings
        for place, argument in self._traced.through:
            results.insert(place, arguments[argument])
        return arguments, results

    def compiled(self) -> tuple[Any, ...]:
        """The `jax.stages.Compiled` of each executable, in the program's order; None for those of other processes."""
        with self._compiling:
            if not self._compiled:
                self._compiled = self._compile()
            return self._compiled

    def hlo(self) -> tuple[str, ...]:
        """The optimised HLO text of each executable that this process runs, in the program's order."""
        return tuple(compiled.as_text() for compiled in self.compiled() if compiled is not None)

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> None:
        """Accepts calls whose flat arguments have weak dtypes like this, too, since tracing makes the same program."""
        self._weak_results[tuple(arguments)] = tuple(results)

    # -- a call -----------------------------------------------------------------------------------------------

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments that are not static. Raises NewSignature if the form of the call is another."""
        if not self._calling.matches(args, kwargs):
            raise NewSignature("the number of arguments, the keywords or a static argument")
        return self._calling.traced(args, kwargs)

    def _flat(self, leaves: list[Any], tree: Any) -> list[Any]:
        """The leaves. Raises NewSignature if their structure is not the traced one."""
        if tree != self._traced.in_tree:
            raise NewSignature("the structure of the arguments")
        return leaves

    def _results(self, leaves: list[Any]) -> list[Any]:
        """The flat results of the user's step: the outputs, and the caller's own arrays where it hands them through."""
        through = [(place, placement.as_array(leaves[argument])) for place, argument in self._traced.through]
        results = self._run_checked(leaves) if _jax.checks_values() else self._run(leaves)
        for place, leaf in through:
            results.insert(place, leaf)
        return results

    def _run_checked(self, leaves: list[Any]) -> list[Any]:
        """As `_run`, on copies. Raises FloatingPointError for an invalid result, with what made it."""
        kinds = _jax.checked_values()
        with _jax.values_unchecked():
            copies = [jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            self._owned.add(copies)
            results = self._run(copies)
            nans.check(results, kinds, self._traced, lambda: self._split(leaves, lambda array: False, add=False))
        return results

    def _run(self, leaves: list[Any]) -> list[Any]:
        """The flat outputs. Clears the list of leaves, so that nothing but the program holds what it may free."""
        if not self._compiled:
            self.compiled()
        weak = self._check(leaves)
        buffers = self._bind(leaves, self._is_steady(leaves))
        leaves.clear()
        outputs = self._execute(buffers)
        if self._stacked is not None:
            outputs = self._stacked.join(outputs, weak)
        elif weak != self._planned_weak:
            outputs = list(map(_jax.array_with_weak_type, outputs, weak))
        if self._has_state:
            *others, last = self._pick_returned(outputs)
            self._owned.remember(last, others, self._disjoint)
        elif self._donates:
            self._owned.add(self._pick_returned(outputs))
        return outputs

    def _check(self, leaves: Sequence[Any]) -> tuple[bool, ...]:
        """Returns whether each result of a call is to have a weak dtype, as `jit` would give it.

        Raises:
          NewSignature: the weak dtypes of the arguments are not those of an accepted call.
          DonatedError: an argument was donated or deleted.
        """
        weak = self._weak_results.get(weak_flags(leaves))
        if weak is None:
            raise NewSignature("whether a dtype is weak")
        ownership.check_alive(leaves, self._arguments, self._traced.name)
        return weak

    def _is_steady(self, leaves: Sequence[Any]) -> bool:
        """Returns whether the state needs no look.

        It is, leaf for leaf, what the last call returned, and no other argument shares a buffer with it.
        """
        if not self._donates and not self._has_state:
            return True
        state: Any = self._pick_state(leaves)
        if not self._owned.is_last(state, self._disjoint):
            return False
        rest = self._pick_rest(leaves)
        if self._stacked is not None:
            state = self._stacked.parts(state, rest)
        return len(state) == len(self._in_place) and self._disjoint(rest, state)

    def _bind(self, leaves: Sequence[Any], steady: bool) -> list[Any]:
        """All buffers at the start of a step. Takes the leaves that are placed, and copies what it will donate.

        Raises:
          NewSignature: a leaf has another shape or dtype.
        """
        may_overwrite = self._may_overwrite
        if not steady:
            self._owned.flush()
            may_overwrite = self._owned.unshared(leaves, may_overwrite)
        leaves = self._split(leaves, _anything if steady else may_overwrite, add=not steady)
        buffers = self._start(leaves)
        self._binder.bind(buffers, leaves, may_overwrite, steady)
        return buffers

    # -- copies of arguments, and stacked leaves --------------------------------------------------------------

    def _placed_copies(self, leaves: list[Any]) -> list[Any]:
        """The leaves in new buffers where the program reads them first; those that it never reads, as they are."""
        if len(leaves) != len(self._arguments):
            raise NewSignature("the structure of the arguments")
        self._check(leaves)
        out = list(self._split(leaves, self._may_overwrite, add=True))
        self._owned.add(self._binder.copy_all(out))
        if self._stacked is not None:
            out = self._stacked.join(out, arguments=True)
            self._owned.add(out)
        return out

    def _buffers_of_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All buffers at the start of a step on copies of the arguments."""
        self._dynamic(args, kwargs)
        leaves = self._placed_copies(self._flat(*calls.flattened(self._calling, args, kwargs)))
        self.compiled()
        return self._bind(leaves, steady=False)

    def _split(self, leaves: Sequence[Any], may_overwrite: Callable[[Any], bool], *, add: bool) -> Sequence[Any]:
        """The arguments of the program: stacked leaves in the parts that stages own, which `add` makes the step's."""
        if self._stacked is None:
            return leaves
        parts = self._stacked.split(leaves, may_overwrite)
        if add:
            self._owned.add(part for one in self._stacked.cut for part in parts[one])
        return parts


def _anything(_: Any) -> bool:
    """Allows every array to be overwritten, if the user has named the arguments to donate."""
    return True
