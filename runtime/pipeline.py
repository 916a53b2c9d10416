"""Runs a program: the lists of all submeshes, issued by one controller in an order that keeps each list's own.

Everything is dispatched without waiting: JAX starts a stage's executable when its inputs are there, so that stages run
side by side although one thread issues them. An instruction costs one call of a compiled executable or one of a
transfer (`building`); buffers are dropped, or donated, exactly where the program says.

*State* that the last call returned is where this one wants it, and needs no check: an update gives each leaf the layout
that its argument has. To see that it is the same state, its arrays are compared by identity with the remembered ones
(`ownership`). Other arrays are checked and placed, and what will be donated is copied unless the step made it and it
already lies as planned. No array may have been deleted: a run that met one would have donated others before.

*Errors.* What a compiled executable can raise on a CPU comes from the user's callbacks (`callbacks`). Other failures
name the instruction that met them, and the lines that its executable was made from (`failing`).

*Interrupts.* A run that was dispatched cannot be called back. An interrupt waits for what is under way, then goes on;
arrays that were donated before are gone, and all others can be used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.graph import Traced
from alpa_lite.passes.programs.writing import Written
from alpa_lite.passes.tracing import nnx_modules
from alpa_lite.passes.tracing.calls import is_weak
from alpa_lite.program import Program, Run, Send, describe
from alpa_lite.runtime import failing, invalid, moves, ownership, placement, presence, returning, watchdog
from alpa_lite.runtime.building import Builder, Step
from alpa_lite.runtime.elsewhere import Elsewhere
from alpa_lite.runtime.frozen import Copies
from alpa_lite.runtime.ownership import Owned
from alpa_lite.runtime.peaks import Peaks
from alpa_lite.runtime.signatures import FORM, SETTINGS, STRUCTURE, NewSignature, WeakPattern, WeakTypes, check_leaf
from alpa_lite.runtime.stacked import StackedArray, StackedLeaves
from alpa_lite.runtime.stopwatch import Stopwatch
from alpa_lite.timeline import Timeline

Watch = Callable[[int, Sequence[Any]], None]

_DISPATCHING = threading.Lock()
"""Held while a pipeline's executables are started, so that all devices get those of two threads in the same order.

Where devices get them in different orders, each waits in a collective for devices that wait in the other's.
"""
"""Called after each step of the dispatch loop with its number and all buffers."""


class PipelineExecutable:
    """A pipelined step on devices that are here. Call it like the user's function."""

    def __init__(
        self, traced: Traced, written: Written, cluster: Cluster, devices: Sequence[Any] | None = None,
        *, owned: Owned | None = None, named: bool = False, copies: Copies | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        settings: tuple[Any, ...] | None = None,
    ):  # fmt: skip
        """Prepares the executables; they are compiled by the first call, or by `compile`.

        Args:
          traced: the step as the user wrote it.
          written: the program of the same step.
          cluster: what transfers were planned for.
          devices: in the order of the cluster; by default `jax.devices()`.
          owned: what the step may overwrite, shared with other executables; by default what it returns itself.
          copies: of frozen weights, shared likewise.
          named: whether the user named what is donated, so that what is placed is taken as it is.
          compiler_options: for XLA; by default those of the cluster.
          settings: of JAX, under which it is called (`_jax.trace_context`); None if they are not compared.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        self._traced = traced
        self._program: Program = written.program
        self._builder = Builder(traced, written, cluster, devices, compiler_options)
        self._meshes, self._sharding = self._builder.meshes, self._builder.sharding
        assert traced.calling is not None
        self._calling, self._settings = traced.calling, settings
        self._match = self._calling.matches if self._calling.has_static else None
        self._compiled: list[Any] = []
        self._steps: list[Step] = []
        self._items: list[Run | Send] = []  # the instruction of each step
        self._empty: list[Any] = []  # all buffers before the arguments are placed
        self._donated = returning.owned_inputs(self._program)  # what becomes, or may become, the step's own
        self._elsewhere: Elsewhere | None = None
        if any(device.process_index != jax.process_index() for device in self._builder.devices):
            self._elsewhere = Elsewhere(
                traced, self._program, self._builder.devices, self._builder.here, self._sharding
            )  # fmt: skip
        self._stacked = StackedLeaves(traced, self._program, self._sharding) if traced.stacked else None
        self._user_state = returning.user_state(traced)
        self._state = returning.returning_state(self._program, traced)
        if self._elsewhere is not None:
            there = self._elsewhere.state
            self._state = [] if self._stacked else [one for one in self._state if one[0] not in there]
        self._shared = returning.shared_outputs(self._program, traced)
        in_place = {argument for argument, _, _ in self._state}
        pieces = [set(one.numbers) for one in traced.stacked.arguments] if traced.stacked else None
        self._last = [(a, r) for a, r in self._user_state if (pieces[a] if pieces else {a}) <= in_place]
        state = {n for a, _ in self._last for n in (pieces[a] if pieces else {a})}
        self._state = [one for one in self._state if one[0] in state]
        if self._elsewhere is not None:
            state |= self._elsewhere.state
        self._rest = [i for i in range(len(traced.arguments)) if i not in state]
        self._user_rest = [n for n, one in enumerate(pieces) if not one <= state] if pieces else self._rest
        self._compiling = threading.Lock()
        values, block = traced.graph.values, traced.graph.block
        self._owned = Owned() if owned is None else owned
        self._ours: Callable[[Any], bool] = (lambda _: True) if named else self._owned.has
        first = [i.numbers[0] for i in traced.stacked.arguments] if traced.stacked else range(len(traced.arguments))
        self._disjoint = ownership.Disjoint(
            [self._sharding(number) for _, number, _ in self._state],
            [values[block.inputs[argument]].aval for argument, _, _ in self._state],
            self._owned.has,
        )
        self._arguments = [traced.arguments[i] for i in first]  # of the user's step
        returned = [(a, r) for a, r in self._user_state if a not in set(self._user_rest)]
        self._weak = WeakTypes(traced, returned, self._user_rest)
        self._unlabelled = self._builder.unlabelled_results()
        if self._elsewhere is not None:
            self._unlabelled += self._elsewhere.told
        self._stays = Copies() if copies is None else copies
        self._wanted: dict[int, tuple[Any, Any, Any, list[int]]] = {}  # by argument that is no state
        self._called = False

    # -- the user's side --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
          ExecutionError: an executable failed; names the stage, the micro-batch and the source line.
        """
        if self._settings is not None and _jax.trace_context() != self._settings:
            raise NewSignature(SETTINGS)
        if self._match is not None:
            if not self._match(args, kwargs):
                raise NewSignature(FORM)
            args, kwargs = self._calling.traced(args, kwargs)
        if not self._calling.modules:
            return self._traced.out_tree.unflatten(self._results(self._leaves((args, kwargs))))
        with nnx_modules.updating(self):
            pure = nnx_modules.split_arguments((args, kwargs), self)
            return nnx_modules.merge_results(self._traced.out_tree.unflatten(self._results(self._leaves(pure))), self)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments on the submeshes that read them first, in buffers of their own. As `Executable.place`."""
        if not self._calling.matches(args, kwargs):
            raise NewSignature(FORM)
        new_args, new_kwargs = nnx_modules.replace_arrays(self._calling.traced(args, kwargs), self._copies)
        positional, keywords = self._calling.whole(new_args, new_kwargs)
        return (positional, keywords) if kwargs else positional

    @property
    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Where the flat arguments are read first, and where the flat results of the user's step lie.

        What no stage reads may lie anywhere: it is replicated on the first submesh.
        """
        anywhere = NamedSharding(self._meshes[0], jax.sharding.PartitionSpec())
        arguments = [self._sharding(group[0]) if group else anywhere for group in self._program.inputs]
        results = [self._sharding(number) for number in self._program.outputs]
        if self._elsewhere is not None:
            results = self._elsewhere.shardings(results)
        if self._stacked is not None:
            arguments, results = self._stacked.shardings(arguments, results, anywhere)
        for place, argument in self._traced.through:
            results.insert(place, arguments[argument])
        return arguments, results

    def hlo(self) -> tuple[str, ...]:
        """The optimised HLO text of each executable that this process runs, in the program's order."""
        return tuple(compiled.as_text() for compiled in self.compile() if compiled is not None)

    def memory_analysis(self) -> tuple[Any, ...]:
        """The compiler's count of bytes per device of each executable; None where the backend gives none."""
        return tuple(compiled.memory_analysis() for compiled in self.compile() if compiled is not None)

    def trace(self, *args: Any, **kwargs: Any) -> Timeline:
        """Runs the step once on copies of the arguments, and returns when everything of it ran. Results are dropped.

        The step is dispatched as by a call. Its arguments are neither donated nor, if they are modules, updated.
        """
        env = self._copied(args, kwargs)
        jax.block_until_ready([x for x in env if x is not None])
        with Stopwatch(self._program, self._items, self._sharding) as watch:
            self._dispatch(env, watch)
        return watch.timeline()

    def results(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The flat results of the step on copies of the arguments, which are neither donated nor updated."""
        env = self._copied(args, kwargs)
        self._dispatch(env)
        outputs = self._outputs(env)
        return outputs if self._stacked is None else self._stacked.together(outputs)

    def measure_peak(self, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Runs the step once on copies of the arguments, and returns the most bytes that live arrays took of it.

        Every array of the process counts that was not there before, and constants of the step; it waits for each
        instruction. What `program.peak_bytes` predicts.

        Returns:
          For each submesh, bytes of the device that holds most.
        """
        self.compile()
        peaks = Peaks(self._meshes, [x for x in self._empty if x is not None])
        env = self._copied(args, kwargs)
        peaks(-1, env)
        self._dispatch(env, peaks)
        return tuple(peaks.most)

    # -- compiling --------------------------------------------------------------------------------------------

    def compile(self) -> list[Any]:
        """The `jax.stages.Compiled` of each executable. Also writes the flat list of steps that a call walks."""
        with self._compiling:
            if not self._compiled:
                built = self._builder.build({} if self._elsewhere is None else self._elsewhere.labels)
                self._steps, self._items, self._empty = built.steps, built.items, built.empty
                self._compiled = built.compiled
            return self._compiled

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """Each executable lowered for its submesh, whose devices may be those of a topology that is described alone."""
        return self._builder.lowered()

    # -- placing ----------------------------------------------------------------------------------------------

    def _leaves(self, pure: Any) -> list[Any]:
        leaves, tree = jax.tree_util.tree_flatten(pure)
        if tree != self._traced.in_tree:
            raise NewSignature(STRUCTURE)
        return leaves

    def _copies(self, leaves: list[Any]) -> list[Any]:
        """The leaves in new buffers where the program reads them first; those that it never reads, as they are."""
        self._pattern_if_alive(leaves)
        leaves = self._apart(leaves, self._ours)
        self._check(range(len(leaves)), leaves)
        out, copied = list(leaves), []
        for i, buffers in enumerate(self._program.inputs):
            if buffers:
                (out[i],) = placement.copies([leaves[i]], [self._sharding(buffers[0])])
                copied.append(i)
        self._owned.add(out[i] for i in copied)
        stacked = self._traced.stacked
        if self._stacked is not None and stacked is not None:
            out = self._stacked.together(out, arguments=True)
            self._owned.add(array for one, array in zip(stacked.arguments, out, strict=True) if one.bounds)
        return out

    def _apart(self, leaves: list[Any], ours: Callable[[Any], bool], last: bool = False) -> list[Any]:
        """The arguments of the program: stacked leaves in the parts that stages own.

        Args:
          leaves: of the user's call.
          ours: whether an array may be overwritten.
          last: whether the state is what the last call returned.
        """
        if self._stacked is None:
            return leaves
        parts = self._stacked.apart(leaves, ours)
        leaves.clear()
        if not last:
            self._owned.add(part for one in self._stacked.cut for part in parts[one])
        return parts

    def _copied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All buffers at the start of a step on copies of the arguments."""
        if not self._calling.matches(args, kwargs):
            raise NewSignature(FORM)
        pure = self._calling.traced(args, kwargs)
        if self._calling.modules:
            with nnx_modules.updating(self):
                leaves = self._copies(self._leaves(nnx_modules.split_arguments(pure, self)))
        else:
            leaves = self._copies(self._leaves(pure))
        self.compile()
        return self._placed(self._apart(leaves, self._ours), self._ours)

    def _placed(self, leaves: Sequence[Any], ours: Callable[[Any], bool] | None) -> list[Any]:
        """All buffers at the start of a step. Takes the leaves that are placed, and copies what it will donate.

        Args:
          leaves: the arguments of the program.
          ours: whether an array may be overwritten; None if the state is what the last call returned, which may be.
        """
        env = list(self._empty)
        if ours is None:
            ours = self._ours
            for argument, number, _ in self._state:
                env[number] = leaves[argument]
            places: Sequence[int] = [i for i in self._rest if not self._is_there(i, leaves[i], env)]
            if not places:
                return env
        else:
            places = range(len(leaves))
            self._warn_of_moves(leaves)
        self._check(places, leaves)
        groups = [(i, number) for i in places for number in self._program.inputs[i]]
        if self._elsewhere is not None:
            groups = [one for one in groups if self._is_concerned(leaves[one[0]], one[1])]
        moved: list[tuple[int, int]] = []
        donated: dict[int, list[tuple[Any, int]]] = {}  # one executable copies on one submesh
        for i, number in groups:
            leaf = leaves[i]
            if number in self._donated:
                donated.setdefault(self._program.buffers[number].mesh, []).append((leaf, number))
            elif placement.is_placed(leaf, self._sharding(number)):
                env[number] = leaf
            elif self._traced.arguments[i].role == "frozen" and self._held(leaf, number, env):
                continue
            else:
                moved.append((i, number))
        if moved:
            own = dict(zip(read := [*dict(moved)], placement.snapshot([leaves[i] for i in read]), strict=True))
            arrays = presence.put([own[i] for i, _ in moved], [self._sharding(number) for _, number in moved])
            for (_, number), array in zip(moved, arrays, strict=True):
                env[number] = array
        for _, group in sorted(donated.items()):
            shardings = [self._sharding(number) for _, number in group]
            ready = placement.settle([leaf for leaf, _ in group], shardings, ours)
            for (_, number), array in zip(group, ready, strict=True):
                env[number] = array
        return env

    def _is_there(self, argument: int, leaf: Any, env: list[Any]) -> bool:
        """Takes a leaf with the sharding that this step gives to what it places; False leaves it to `_placed`."""
        wanted = self._wanted.get(argument)
        if wanted is None:
            wanted = self._wanted[argument] = self._wanted_of(argument)
        shape, dtype, sharding, buffers = wanted
        if type(leaf) is not _jax.PlainArray or leaf.sharding is not sharding:  # `isinstance` calls Python
            return False
        aval = leaf.aval
        if aval.shape != shape or aval.dtype != dtype:
            return False
        for b in buffers:
            env[b] = leaf
        return True

    def _wanted_of(self, argument: int) -> tuple[Any, Any, Any, list[int]]:
        """Shape and dtype of an argument, its sharding if it has one and is not donated, and its buffers here."""
        planned = self._traced.graph.values[self._traced.graph.block.inputs[argument]]
        buffers = self._program.inputs[argument]
        shardings = {id(one): one for one in map(self._sharding, buffers)}
        alone = len(shardings) == 1 and self._donated.isdisjoint(buffers)
        elsewhere = () if self._elsewhere is None else self._elsewhere.buffers
        here = [b for b in buffers if b not in elsewhere]
        return planned.shape, planned.dtype, next(iter(shardings.values())) if alone else None, here

    def _is_concerned(self, leaf: Any, number: int) -> bool:
        """Whether this process has a part in placing a leaf: a device that reads it, or one that has to send it."""
        assert self._elsewhere is not None
        if number not in self._elsewhere.buffers:
            return True
        return not placement.is_placed(leaf, self._sharding(number)) and presence.is_of_all(leaf)

    def _warn_of_moves(self, leaves: Sequence[Any]) -> None:
        """Says what of the state does not lie where the program reads it first."""
        arguments, inputs = self._traced.arguments, self._program.inputs
        state = [i for i, argument in enumerate(arguments) if argument.role == "state" and inputs[i]]
        wanted = [self._sharding(inputs[i][0]) for i in state]
        paths = [arguments[i].path for i in state]
        moves.warn(self._traced.name, [leaves[i] for i in state], wanted, paths, first=not self._called)
        self._called = True

    def _held(self, leaf: Any, number: int, env: list[Any]) -> bool:
        """Takes the copy of a frozen leaf that stays on a submesh; False if the leaf may change, and has none."""
        env[number] = self._stays.of(leaf, self._sharding(number))
        return env[number] is not None

    def _last_pattern(self, leaves: Sequence[Any]) -> WeakPattern | None:
        """The weak types of a call whose state is, leaf for leaf, what the last call returned, and no other argument.

        None if the state is another one, or an argument that is no state is a part of it.
        """
        state = [leaves[i] for i, _ in self._last]
        pattern = self._owned.last_pattern(self._weak, state) if state else None
        if pattern is None or (self._elsewhere is not None and not self._elsewhere.unchanged(leaves)):
            return None
        rest = [leaves[i] for i in self._user_rest]
        if self._traced.stacked is None:
            return pattern if self._disjoint(rest, state) else None
        parts: dict[int, Any] = {}
        for leaf, (argument, _) in zip(state, self._last, strict=True):
            pieces = self._traced.stacked.arguments[argument]
            if pieces.bounds and not isinstance(leaf, StackedArray):
                return None
            parts.update(zip(pieces.numbers, leaf.parts if pieces.bounds else [leaf], strict=True))
        donated = [parts[argument] for argument, _, _ in self._state]
        is_apart = {id(leaf) for leaf in rest}.isdisjoint(map(id, state))
        return pattern if is_apart and self._disjoint(rest, donated) else None

    def _remember(self, results: Sequence[Any], pattern: WeakPattern) -> None:
        """Remembers the state among the results, which the step may overwrite if it comes back."""
        if self._last:
            *rest, (_, last) = self._last
            self._owned.remember(results[last], [results[n] for _, n in rest], pattern.following)
        else:
            self._owned.add(results[n] for _, n in self._user_state)

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> None:
        """Takes calls whose flat arguments have weak dtypes like this, too: tracing makes the same program of them."""
        self._weak.accept(arguments, results)

    def _pattern_if_alive(self, leaves: Sequence[Any]) -> WeakPattern:
        """Which of the user's flat arguments have a weak dtype, none of which was deleted.

        Raises:
          NewSignature: another dtype is weak.
          DonatedError: an argument was donated or deleted.
        """
        if len(leaves) != len(self._arguments):
            raise NewSignature(STRUCTURE)
        pattern = self._weak.pattern_of(leaves)
        ownership.check_alive(leaves, self._arguments, self._traced.name)
        return pattern

    def _check(self, places: Sequence[int], leaves: Sequence[Any]) -> None:
        """Raises NewSignature unless these leaves have the planned shapes and dtypes."""
        values, block = self._traced.graph.values, self._traced.graph.block
        if len(leaves) != len(self._program.inputs):
            raise NewSignature(STRUCTURE)
        for i in places:
            check_leaf(leaves[i], values[block.inputs[i]].aval)

    # -- running ----------------------------------------------------------------------------------------------

    def _results(self, leaves: list[Any]) -> list[Any]:
        """The flat results of the user's step: the outputs, and the caller's own arrays where it hands them through."""
        through = [(place, placement.as_array(leaves[argument])) for place, argument in self._traced.through]
        out = self._run(leaves)
        for place, leaf in through:
            out.insert(place, leaf)
        return out

    def _run(self, leaves: list[Any]) -> list[Any]:
        """The flat outputs."""
        if not _jax.checks_values():
            return self._computed(leaves)
        stacked = self._stacked
        apart = list if stacked is None else lambda whole: stacked.apart(whole, lambda array: False)
        return invalid.watched(self._computed, leaves, self._traced, self._owned, apart)

    def _computed(self, leaves: list[Any]) -> list[Any]:
        if not self._compiled:
            self.compile()
        pattern = self._last_pattern(leaves) if len(leaves) == len(self._arguments) else None
        ours = None
        if pattern is not None:
            if [is_weak(leaves[i]) for i in self._user_rest] != pattern.kept:
                pattern = self._weak.pattern_of(leaves)
            if ownership.any_deleted(leaves):
                ownership.check_alive(leaves, self._arguments, self._traced.name)
        else:
            self._owned.recall()
            pattern = self._pattern_if_alive(leaves)
            ours = self._owned.unshared(leaves, self._ours)
        leaves = self._apart(leaves, ours or (lambda _: True), last=ours is None)
        env = self._placed(leaves, ours)
        leaves.clear()
        self._dispatch(env, self._tracker() if watchdog.active else None)
        outputs = self._outputs(env)
        if self._stacked is not None:
            outputs = self._stacked.together(outputs, pattern.results)
        elif pattern.changes:
            pattern.relabel(outputs)
        self._remember(outputs, pattern)
        return outputs

    def _outputs(self, env: Sequence[Any]) -> list[Any]:
        """The flat results of the program, each in buffers of its own."""
        outputs = [env[i] for i in self._program.outputs]
        shared = [n for n in self._shared if outputs[n] is not None]
        for n, copied in zip(shared, placement.fresh([outputs[n] for n in shared]), strict=True):
            outputs[n] = copied
        for n in self._unlabelled:
            outputs[n] = _jax.array_with_weak_type(outputs[n], self._traced.outputs[n].weak)
        return outputs if self._elsewhere is None else self._elsewhere.complete(outputs)

    def _tracker(self) -> Watch | None:
        """Returns the watchdog's tracker of the instructions."""
        return watchdog.track_instructions(
            lambda number: describe(self._program, self._items[number]), [step[3] for step in self._steps]
        )

    def _dispatch(self, env: list[Any], watch: Watch | None = None) -> None:
        """Walks the steps. Nothing but `env` holds a buffer, so that what is dropped there is free."""
        with _DISPATCHING:
            self._dispatch_alone(env, watch)

    def _dispatch_alone(self, env: list[Any], watch: Watch | None) -> None:
        number = 0
        try:
            for number, (is_run, call, read, made, consumed, freed) in enumerate(self._steps):
                results = call(*[env[i] for i in read]) if is_run else call([env[i] for i in read])
                for k, i in enumerate(made):
                    env[i] = results[k]
                results = None
                for i in consumed:
                    env[i] = None
                if watch is not None:
                    watch(number, env)
                for i in freed:
                    env[i] = None
        except KeyboardInterrupt:
            failing.drain(env if self._elsewhere is None else ())
            raise
        except Exception as error:
            failing.drain(env if self._elsewhere is None else ())
            item = self._items[number]
            made_from = self._builder.segment(item.executable).instructions if isinstance(item, Run) else ()
            raise failing.named(error, self._program, item, made_from) from error
