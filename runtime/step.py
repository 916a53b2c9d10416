"""The front-end of every planned step, on one mesh or on the submeshes of a pipeline.

A call flattens the user's arguments, compares the signature, gives every buffer of the program its array, runs the
program, and returns the results as the user's pytree. `Executable` runs a program of one executable by itself, and
`pipeline.PipelineExecutable` walks a list of instructions. docs/runtime.md follows one call.

A call makes sure of these:

1. *The signature is the planned one* (`binding`). Any difference raises `NewSignature` before anything runs, and the
   caller plans for the new signature.
2. *Donated arrays are ours.* A donated buffer is overwritten. Arrays that the step did not make (`ownership`) or that
   are not placed as planned are copied (`placement`), and so are those whose buffers the call is given twice. With the
   user's own `donate_argnums`, an array that is placed is taken as it is.
3. *No array was deleted.* JAX 0.10 ends the process where an executable on several devices meets one.
4. *NumPy arrays are the caller's again when the call returns*: the program reads copies.

In the ordinary loop the state is, leaf for leaf, what the last call returned. One comparison of identities shows it,
and nothing else is asked of these leaves: their types are known, they are placed, none occurs twice, and only other
arguments that are new can share their buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.ir.graph import Traced
from alpa_lite.passes.lowering.program import Instruction
from alpa_lite.passes.tracing import calls, pytrees
from alpa_lite.runtime import ownership, placement
from alpa_lite.runtime.binding import ArgumentBinder, NewSignature, weak_flags
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.compile import Call, FlatFunction, compile_all, picker
from alpa_lite.runtime.debug import callbacks, nans
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.ownership import DonationTracker
from alpa_lite.runtime.placement import DeviceCopies
from alpa_lite.runtime.stacked import StackedLeaf, leaves_of, pieces

Donate = str | int | Sequence[int | str]
"""The user's choice of donation: "auto", or positions and names of arguments."""


@dataclass(frozen=True, eq=False)
class LoadOptions:
    """Options of loading a step onto devices."""

    donate: Donate = "auto"  # of a step on one mesh; the program of a pipeline has it
    devices: Sequence[Any] | None = None  # in the order of the cluster; None for the first of `jax.devices()`
    owned: DonationTracker = field(
        default_factory=DonationTracker
    )  # the arrays that the step may overwrite, shared by its executables
    copies: DeviceCopies = field(default_factory=DeviceCopies)  # of frozen weights, shared likewise
    settings: tuple[Any, ...] | None = None  # of JAX, under which it is called; None if they are not compared
    compiler_options: Mapping[str, Any] = field(default_factory=dict)


class WeakPattern(NamedTuple):
    """The results of a call that have a weak dtype, as `jit` would give it, and of these the new state."""

    executable: Executable
    results: tuple[bool, ...]
    state: tuple[bool, ...]


Emit = Callable[[int], tuple[Callable[..., Sequence[Any]], Iterable[Instruction]]]
"""From the number of an executable to its function of global arrays, and the instructions that it is made from."""


class Executable:
    """A planned step on devices: here on one mesh, with its arguments, constants and results as buffers in this order.

    Call it like the user's function. NNX objects among the arguments are updated in place, as by `nnx.jit`.
    """

    takes_uncommitted = True
    """Whether executables themselves put arrays that are on no certain device (`ArgumentBinder`)."""

    def __init__(self, traced: Traced, buffers: ProgramBuffers, options: LoadOptions, emit: Emit) -> None:
        """Compiles nothing; the first call does, or `compiled_executables`. Arguments of `traced` are the program's."""
        assert traced.calling is not None
        self._traced, self._calling, self._buffers, self._options = traced, traced.calling, buffers, options
        self._emit, self._owned = emit, options.owned
        self._may_overwrite = self._owned.has if options.donate == "auto" else lambda _: True
        self._compiling, self._compiled = threading.Lock(), ()
        self._returned: frozenset[int] = frozenset()  # ids of the objects that the last call returned
        self._failures = callbacks.Failures()
        self._numbers: dict[tuple[int, int], Any] = {}  # of micro-batches, for their callbacks, by submesh
        leaves, outputs = leaves_of(traced), buffers.program.outputs
        self._results_of = [
            (one.numbers, StackedLeaf(one.bounds, [outputs[n] for n in one.numbers], buffers) if one.bounds else None)
            for one in leaves.results
        ]
        # State that comes back, and that of it which comes back in place: (argument, result) of the user's step.
        new_value = {argument: output for output, argument in traced.state}
        result_of = {numbers[0]: n for n, (numbers, _) in enumerate(self._results_of)}
        parts = [one.numbers for one in leaves.arguments]
        returned = [(a, result_of[new_value[n[0]]]) for a, n in enumerate(parts) if n[0] in new_value]
        state = [
            (a, r) for a, r in returned if buffers.in_place.keys() >= set(parts[a])
            and not (leaves.arguments[a].bounds and buffers.is_key(buffers.in_place[parts[a][0]]))  # joined at once
        ]  # fmt: skip
        # Non-addressable state comes back as the same arrays, which live as long as this: one of the others comes last.
        state.sort(key=lambda pair: global_array.is_addressable(buffers.sharding(buffers.in_place[parts[pair[0]][0]])))
        position = {argument: n for n, (argument, _) in enumerate(state)}
        self._has_state, self._donates = bool(state), bool(buffers.donated)
        self._pick_state, self._pick_returned = picker(list(position)), picker([r for _, r in (state or returned)])
        self._pick_rest = picker([a for a in range(len(parts)) if a not in position])
        self._binder = ArgumentBinder(
            traced, buffers, position, options.copies, takes_uncommitted=self.takes_uncommitted
        )
        self._in_place = [(slot.argument, slot.part, slot.buffer) for slot in self._binder.in_place]
        self._state_blocks = {
            ownership.block_type(buffers.sharding(b), buffers.program.buffers[b]) for *_, b in self._in_place
        }
        self._planned_weak = tuple(traced.outputs[numbers[0]].weak for numbers, _ in self._results_of)
        self._accepted: dict[Any, WeakPattern] = {}  # by the weak dtypes of the state, and of other arguments
        self.accept([argument.weak for argument in self._binder.arguments], self._planned_weak)

    # -- the back-end -----------------------------------------------------------------------------------------

    def _load(self, calls: Mapping[int, Call], numbered: Collection[int]) -> None:
        """Takes the calls of executables, and copies the constants.

        Args:
          numbered: the executables whose callbacks need the number of the micro-batch (`_bind_number`).
        """
        donated = self._buffers.program.executables[0].donated_inputs
        kept = [n for n in self._buffers.runs[0].inputs if n not in set(donated)]
        self._pick_donated, self._pick_kept = picker(donated), picker(kept)
        self._call = self._bind_number(calls[0], 0, -1) if numbered else calls[0]
        self._constants = list(self._buffers.constants(self._traced).values())

    def _start(self, leaves: Sequence[Any] | None) -> list[Any]:
        """Returns all buffers at the start of a step: constants, and the state of a call that is in place, if it is."""
        return [*(leaves or [None] * len(self._traced.arguments)), *self._constants]

    def _execute(self, buffers: list[Any]) -> list[Any]:
        """Runs the program: the flat results, each in buffers of its own. Holds no buffer that the program ends."""
        return list(self._call(self._pick_donated(buffers), self._pick_kept(buffers)))

    def _output_shardings(self) -> list[NamedSharding]:
        """Returns the shardings of the results of the program."""
        return list(map(self._buffers.sharding, self._buffers.program.outputs))

    def _bind_number(self, call: Call, mesh: int, microbatch: int) -> Call:
        """Returns the call of a function with callbacks for a micro-batch, whose number is an array of the submesh."""
        key = mesh, microbatch
        if key not in self._numbers:
            (self._numbers[key],) = global_array.put([np.int32(microbatch)], [self._buffers.sharding_on(mesh)])
        number = self._numbers[key]
        return lambda donated, kept: call(donated, (*kept, number))

    # -- the user's side --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
          ExecutionError: an executable of a pipeline failed; names the stage, the micro-batch and the source line.
        """
        if self._options.settings is not None and _jax.trace_context() != self._options.settings:
            raise NewSignature("JAX's settings")
        pure: Any = self._dynamic(args, kwargs)
        if not self._calling.modules:
            out = self._traced.out_tree.unflatten(self._results(self._flat(pure)))
            self._returned = frozenset(map(id, (out, *out) if isinstance(out, tuple | list) else (out,)))
            return out
        with pytrees.nnx_update_context(self):
            pure = pytrees.split(pure, self)  # held until the end: freeing it now costs more
            out = self._results(self._flat(pure))
            return pytrees.merge(self._traced.out_tree.unflatten(out), self, is_inner=False)[1]

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
        positional, keywords = self._calling.insert_static(new_args, new_kwargs)
        return (positional, keywords) if kwargs else positional

    def results(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the flat results of the step on copies of the arguments, which are neither donated nor updated."""
        return self._joined(self._execute(self._buffers_of_copies(args, kwargs)), self._planned_weak)

    @property
    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """The shardings with which the flat arguments are read first, and those of the results of the user's step.

        An argument that no stage reads is replicated on the first submesh.
        """
        anywhere, outputs = self._buffers.sharding_on(0), self._output_shardings()
        arguments = [self._binder.first_sharding(n) or anywhere for n in range(len(self._binder.arguments))]
        results = [outputs[numbers[0]] if leaf is None else leaf.whole for numbers, leaf in self._results_of]
        for place, argument in self._traced.returned_arguments:
            results.insert(place, arguments[argument])
        return arguments, results

    def compiled_executables(self) -> tuple[Any, ...]:
        """The `jax.stages.Compiled` of each executable, in the program's order; None for those of other processes."""
        with self._compiling:
            if not self._compiled:
                executables = self._buffers.program.executables
                functions = {n: self._function(n) for n, one in enumerate(executables) if self._buffers.here[one.mesh]}
                with _jax.clear_mesh_context():
                    made = compile_all(self._traced.name, list(functions.values()), self._options.compiler_options)
                    found = dict(zip(functions, made, strict=True))
                    numbered = {n for n, function in functions.items() if function.failures is not None}
                    self._load({n: call for n, (_, call) in found.items()}, numbered)
                self._compiled = tuple(found[n][0] if n in found else None for n in range(len(executables)))
            return self._compiled

    def lowered_executables(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its mesh, whose devices may be those of a topology that is described alone."""
        for number in range(len(self._buffers.program.executables)):
            yield self._function(number).lower()

    def hlo(self) -> tuple[str, ...]:
        """Returns the optimised HLO text of each executable that this process runs, in the program's order."""
        return tuple(compiled.as_text() for compiled in self.compiled_executables() if compiled is not None)

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> None:
        """Accepts calls whose flat arguments have weak dtypes like this, too, since tracing makes the same program."""
        given = tuple(self._pick_state(arguments)), tuple(self._pick_rest(arguments))
        self._accepted[given] = WeakPattern(self, tuple(results), tuple(self._pick_returned(results)))

    # -- a call -----------------------------------------------------------------------------------------------

    def _dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the arguments that are not static. Raises NewSignature if the form of the call is another."""
        if not self._calling.matches(args, kwargs):
            raise NewSignature("the number of arguments, the keywords or a static argument")
        return self._calling.drop_static(args, kwargs)

    def _flat(self, pure: Any) -> list[Any]:
        """Returns the leaves. Raises NewSignature if their structure is not the traced one.

        Flattening along the traced structure takes half the time, but prints the arrays of another one, which would
        fetch them: only arguments that the last call returned are taken to have it. It takes any object for a leaf;
        those that are no arrays are refused when they are bound.
        """
        if not self._returned.isdisjoint(map(id, pure[0])):
            try:
                return self._traced.in_tree.flatten_up_to(pure)
            except Exception:  # a pytree of the user's own may raise anything
                self._returned = frozenset()
        leaves, tree = jax.tree.flatten(pure)
        if tree != self._traced.in_tree:
            raise NewSignature("the structure of the arguments")
        return leaves

    def _results(self, leaves: list[Any]) -> list[Any]:
        """The flat results of the user's step: the outputs, and the caller's own arrays where it hands them through."""
        through = [(place, leaves[argument]) for place, argument in self._traced.returned_arguments]
        results = self._run_checked(leaves) if _jax.checked_values() else self._run(leaves)
        for place, leaf in through:
            results.insert(place, placement.as_array(leaf))
        return results

    def _run_checked(self, leaves: list[Any]) -> list[Any]:
        """As `_run`, on copies. Raises FloatingPointError for an invalid result, with what made it."""
        kinds = _jax.checked_values()
        with _jax.skip_value_checks():
            copies = [jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            self._owned.add(copies)
            results = self._run(copies)
            nans.check(results, kinds, self._traced, lambda: pieces(self._traced, leaves))
        return results

    def _run(self, leaves: list[Any]) -> list[Any]:
        """Returns the flat outputs.

        Clears the list of leaves, so that nothing but the program holds what it may free.
        """
        if not self._compiled:
            self.compiled_executables()
        pattern, is_last = self._look(leaves)
        buffers = self._bind(leaves, is_last=is_last)
        leaves.clear()
        outputs = self._joined(self._execute(buffers), pattern.results)
        if self._has_state:
            *others, last = self._pick_returned(outputs)
            self._owned.remember(last, others, pattern)
        elif self._donates:
            self._owned.add(self._pick_returned(outputs))
        return outputs

    def _look(self, leaves: Sequence[Any]) -> tuple[WeakPattern, bool]:
        """Returns the weak dtypes of a call, and whether its state is, leaf for leaf, that of the last call's results.

        Raises:
          NewSignature: the weak dtypes of the arguments are not those of an accepted call.
          DonatedError: an argument was donated or deleted.
        """
        state, rest = self._pick_state(leaves), self._pick_rest(leaves)
        owner = self._owned.owner_of(state) if state else None
        last = owner if isinstance(owner, WeakPattern) and owner.executable is self else None
        pattern = self._accepted.get((weak_flags(state) if last is None else last.state, weak_flags(rest)))
        if pattern is None:
            raise NewSignature("whether a dtype is weak")
        if ownership.any_deleted(state) or ownership.any_deleted(rest):
            raise ownership.deleted_error(leaves, self._binder.arguments, self._traced.name)
        return pattern, last is not None or not (state or self._donates)

    def _bind(self, leaves: Sequence[Any], *, is_last: bool) -> list[Any]:
        """Returns all buffers at the start of a step. Takes the leaves that are placed, and copies what it will donate.

        Raises:
          NewSignature: a leaf has another shape or dtype.
        """
        if is_last:
            buffers = self._start(leaves)
            if self._binder.bind(buffers, leaves, self._may_overwrite, self._may_share):
                return buffers
        self._owned.flush()
        buffers = self._start(None)
        self._binder.bind(buffers, leaves, self._owned.find_overwritable(leaves, self._may_overwrite))
        return buffers

    def _may_share(self, leaf: Any) -> bool:
        """Returns whether an argument may be state that is in place, or a view of it, judged by the type of its blocks.

        Arrays that the step made, and has not just returned, have buffers of their own.
        """
        if self._owned.has(leaf):
            return False
        return isinstance(leaf, _jax.LazyArray) or ownership.view_type(leaf) in self._state_blocks

    def _joined(self, outputs: list[Any], weak: Sequence[bool]) -> list[Any]:
        """Returns the flat results of the user's step, with weak dtypes like these."""
        if self._traced.stacked is not None:
            return [
                _jax.array_with_weak_type(outputs[numbers[0]], is_weak) if leaf is None
                else leaf.array_of([outputs[n] for n in numbers], is_weak)
                for (numbers, leaf), is_weak in zip(self._results_of, weak, strict=True)
            ]  # fmt: skip
        return outputs if weak == self._planned_weak else list(map(_jax.array_with_weak_type, outputs, weak))

    # -- copies of arguments ----------------------------------------------------------------------------------

    def _placed_copies(self, leaves: list[Any]) -> list[Any]:
        """The leaves in new buffers where the program reads them first; those that it never reads, as they are."""
        if len(leaves) != len(self._binder.arguments):
            raise NewSignature("the structure of the arguments")
        self._look(leaves)
        out = self._binder.copies(leaves)
        self._owned.add(array for array, leaf in zip(out, leaves, strict=True) if array is not leaf)
        return out

    def _buffers_of_copies(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns all buffers at the start of a step on copies of the arguments."""
        self._dynamic(args, kwargs)
        leaves, tree = calls.flatten_call(self._calling, args, kwargs)
        if tree != self._traced.in_tree:
            raise NewSignature("the structure of the arguments")
        self.compiled_executables()
        return self._bind(self._placed_copies(leaves), is_last=False)

    # -- compiling --------------------------------------------------------------------------------------------

    def _function(self, number: int) -> FlatFunction:
        """Returns an executable, to be compiled.

        Errors of its callbacks are located, but for a whole step on one device.
        """
        executable = self._buffers.program.executables[number]
        mesh, (function, instructions) = self._buffers.meshes[executable.mesh], self._emit(number)
        inputs, results = self._buffers.types(number)
        is_located = self._buffers.program.schedule != "none" or mesh.size > 1
        failures = self._failures if is_located and callbacks.has_callback(instructions) else None
        return FlatFunction(executable.name, function, mesh, inputs, results, executable.donated_inputs, failures)
