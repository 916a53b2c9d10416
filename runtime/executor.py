"""Runs a planned step: one executable, called with the user's own pytrees.

The executable takes flat arrays, in two groups: those that are donated, and the rest. Flattening and unflattening are
JAX's, in C++, and replace those that `jax.jit` would do on the pytrees, so a call costs what the same `jax.jit` costs.
To call a `jax.jit` with the pytrees themselves would cost more: what is donated must be looked at leaf by leaf, which
means to flatten a second time. And it would compile the step again for a batch in NumPy arrays, for one on no certain
device, and for one on the mesh, because the sharding is part of an array's type; the executable takes them all.

What a call must make sure of:

1. *The signature is the planned one* (`tracing.calls`). Its form is compared where something is static, its structure
   with the traced one; shapes and dtypes are compared by the executable itself, which refuses others; which dtypes are
   weak, at which it does not look, is compared here (`weakness`). Each of them raises `NewSignature`, and the caller
   plans for the new one.
2. *Donated arrays are ours.* A donated buffer (`donation`) is overwritten. Arrays that the step did not make
   (`ownership`) or that are not placed as planned are copied (`placement`), and so are those whose buffers the call is
   given twice. With a `donate_argnums` of the user's own, what is placed is taken as it is.
3. *No array was deleted.*
4. *NumPy arrays are the caller's again when the call returns*: the executable gets copies (`placement.snapshot`).

The second check costs a few microseconds when the state is, leaf for leaf, what the last call returned: then it is
placed, no leaf of it occurs twice, and only other arguments that are new can share its buffers.

Flattening *along* the traced structure (`flatten_up_to`) takes half the time of flattening and comparing: 27 of 62
microseconds for 300 leaves in 200 dicts. But if the structure differs, its error message holds the `repr` of what it
met, for which JAX would fetch whole states from the devices. So only arguments that the last call returned are
flattened so: their structure differs only if they were changed in place.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph import Lit, Traced
from alpa_lite.passes.tracing import nnx_modules
from alpa_lite.passes.tracing.arguments import argument_leaves
from alpa_lite.passes.tracing.calls import is_weak
from alpa_lite.report import log_messages, progress
from alpa_lite.runtime import callbacks, compiling, donation, invalid, moves, ownership, pacing, placement, presence
from alpa_lite.runtime.donation import Donate
from alpa_lite.runtime.frozen import Copies, Frozen
from alpa_lite.runtime.ownership import Owned
from alpa_lite.runtime.signatures import FORM, SETTINGS, STRUCTURE, NewSignature, WeakPattern, WeakTypes, check_leaf

logger = logging.getLogger(__name__)


class Executable:
    """A step on a mesh. Call it like the user's function.

    NNX objects among the arguments are updated in place, as by `nnx.jit`.
    """

    def __init__(
        self,
        traced: Traced,
        flat_fun: Callable[..., Sequence[Any]],
        mesh: Mesh,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec],
        *,
        donate: Donate = "auto",
        calls_back: bool = False,
        owned: Owned | None = None,
        copies: Copies | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        settings: tuple[Any, ...] | None = None,
    ) -> None:
        """Prepares the executable; it is compiled by the first call, or by `compiled()`.

        Args:
          traced: what the step is.
          flat_fun: from the flat arguments, then the graph's constants, to the flat outputs, all global arrays.
          mesh: the devices.
          in_specs: a spec for each argument, then for each constant; those of constants may be missing (replicated).
          out_specs: a spec for each output.
          donate: as for `loading.load`.
          calls_back: whether the step calls functions of the user on the host, which may raise.
          owned: what it may overwrite, shared with other executables; by default what it returns itself.
          copies: of frozen weights, shared with other executables.
          compiler_options: what the compiler is asked for.
          settings: of JAX, under which it is called (`_jax.trace_context`); None if they are not compared.
        """
        self.mesh = mesh
        self._compiler_options = compiler_options
        self._owned = Owned() if owned is None else owned
        self._ours: Callable[[Any], bool] = self._owned.has if donate == "auto" else _anything
        self._dies = _jax.DIES_OF_DELETED and mesh.size > 1
        self._traced, self._flat_fun = traced, flat_fun
        self._failures = callbacks.Failures() if calls_back and mesh.size > 1 else None
        self._look: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        assert traced.calling is not None
        self._calling, self._settings = traced.calling, settings
        self._match = self._calling.matches if self._calling.has_static else None
        self._in_tree, self._out_tree = traced.in_tree, traced.out_tree
        count = len(traced.arguments)
        self._in_shardings, self._constant_shardings, self._out_shardings = _shardings(
            traced, mesh, in_specs, out_specs
        )
        self._donated = donation.donated(traced, in_specs, out_specs, donate)
        state = {argument for _, argument in traced.state}
        ranges = argument_leaves(traced, positional=True)
        self._state_positions = [i for i, leaves in enumerate(ranges) if not state.isdisjoint(leaves)]
        self._arity = len(ranges) if state and state.isdisjoint(range(ranges[-1].stop if ranges else 0, count)) else -1
        self._kept = [i for i in range(count) if i not in set(self._donated)]
        self._pick_donated, self._pick_kept = _picker(self._donated), _picker(self._kept)
        new_value = {argument: output for output, argument in traced.state}
        come_back = bool(self._donated) and all(i in new_value for i in self._donated)
        following = [new_value[i] for i in self._donated] if come_back else []
        self._pick_following = _picker(following[:-1])
        self._canary_output = following[-1] if following else None
        self._executable: Any = None
        self._launch: Any = None  # the executable as a call runs it
        self._constants: tuple[jax.Array, ...] = ()
        self._compiling = threading.Lock()
        self._returned: frozenset[int] = frozenset()  # ids of what the last call returned; may have been given again
        self._weak = WeakTypes(traced, [(i, new_value[i]) for i in self._donated if come_back], self._kept)
        frozen = [n for n, i in enumerate(self._kept) if traced.arguments[i].role == "frozen"]
        wanted = [self._in_shardings[self._kept[n]] for n in frozen]
        self._frozen = Frozen(frozen, wanted, Copies() if copies is None else copies) if frozen else None
        values, inputs = traced.graph.values, traced.graph.block.inputs
        wanted, avals = self._pick_donated(self._in_shardings), [values[inputs[i]].aval for i in self._donated]
        self._disjoint = ownership.Disjoint(wanted, avals, self._owned.has)
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
        """
        if self._settings is not None and _jax.trace_context() != self._settings:
            raise NewSignature(SETTINGS)
        if self._match is not None:
            if not self._match(args, kwargs):
                raise NewSignature(FORM)
            args, kwargs = self._calling.traced(args, kwargs)
        if not self._calling.modules:
            out = self._out_tree.unflatten(self._results(self._leaves_along(args, kwargs)))
            self._returned = frozenset(map(id, (out, *out) if isinstance(out, tuple | list) else (out,)))
            return out
        with nnx_modules.updating(self):
            pure = nnx_modules.split_arguments((args, kwargs), self)  # held until the end: freeing it now costs more
            out = self._results(self._leaves(pure))
            return nnx_modules.merge_results(self._out_tree.unflatten(out), self)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments as arrays that lie as the plan wants them, in buffers of their own.

        Args:
          args, kwargs: as for a call. NNX objects are not changed.

        Returns:
          The tuple of positional arguments; with keywords, that tuple and a dict of the keywords. NNX objects come as
          new objects of the same structure, shared references kept. Static arguments come as they are.

        Raises:
          NewSignature: the arguments are not what the step was planned for.
        """
        if not self._calling.matches(args, kwargs):
            raise NewSignature(FORM)

        def placed(leaves: list[Any]) -> list[Any]:
            if len(leaves) != len(self._in_shardings):
                raise NewSignature(STRUCTURE)
            self._check(range(len(leaves)), leaves)
            self._weak.pattern_of(leaves)
            self._check_alive(leaves)
            placed = placement.copies(leaves, self._in_shardings)
            self._owned.add(placed)
            return placed

        new_args, new_kwargs = nnx_modules.replace_arrays(self._calling.traced(args, kwargs), placed)
        positional, keywords = self._calling.whole(new_args, new_kwargs)
        return (positional, keywords) if kwargs else positional

    @property
    def shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Where the flat arguments and the flat results of the user's step lie."""
        results = list(self._out_shardings)
        for place, argument in self._traced.through:
            results.insert(place, self._in_shardings[argument])
        return list(self._in_shardings), results

    def compiled(self) -> jax.stages.Compiled:
        """The compiled step. Its inputs are (donated arguments, other arguments, constants), each flat."""
        with self._compiling:
            if self._executable is None:
                self._executable = self._compile()
                self._launch = pacing.paced(self._executable, self.mesh.devices.flat)
            return self._executable

    @_jax.without_mesh()
    def lowered(self) -> jax.stages.Lowered:
        """The step lowered for its mesh, whose devices may be those of a topology that is described alone."""
        groups = (self._pick_donated, self._pick_kept)  # lists or tuples: also of shardings and of types
        jitted = jax.jit(
            self._grouped(),
            in_shardings=(*(pick(self._in_shardings) for pick in groups), tuple(self._constant_shardings)),
            out_shardings=self._out_shardings,
            donate_argnums=0,
            keep_unused=True,  # the buffer of a state leaf that is overwritten unread can be reused all the same
        )
        specs = list(map(self._spec, range(len(self._in_shardings))))
        values, inputs = self._traced.graph.values, self._traced.graph.block.inputs
        constants = (values[number].aval for number in inputs[len(specs) :])
        shapes = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in constants)
        return jitted.lower(*(pick(specs) for pick in groups), shapes)

    def _launched(self) -> Any:
        self.compiled()
        return self._launch

    @_jax.without_mesh()
    def _compile(self) -> jax.stages.Compiled:
        start = time.perf_counter()
        with progress.planning(f"compiling {self._name}") as report:
            report.count("executables compiled", 0, 1)
            constants = placement.copies(self._traced.graph.constants, self._constant_shardings)
            compiled = compiling.compiled(self.lowered(), self.mesh.devices.flat, self._compiler_options)
        logger.info(log_messages.compiled(self._name, 1, time.perf_counter() - start))
        if self._failures is not None:
            self._look = self._looking(self._failures)
        self._constants = tuple(constants)
        return compiled

    def hlo(self) -> str:
        """The optimised HLO text."""
        text = self.compiled().as_text()
        assert text is not None
        return text

    def memory_analysis(self) -> Any:
        """The compiler's count of bytes per device; None where the backend gives none."""
        return self.compiled().memory_analysis()

    def _grouped(self) -> Callable[..., list[Any]]:
        """The step on the groups of leaves that the executable takes."""
        order, weak = [*self._donated, *self._kept], self._weak.planned.results
        flat_fun = self._flat_fun
        if self._failures is not None:
            located = callbacks.located(flat_fun, self._name, self._failures)
            flat_fun = functools.partial(_last, located, np.int32(-1))

        def step(donated: Sequence[Any], kept: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
            by_number = dict(zip(order, (*donated, *kept), strict=True))
            results = flat_fun(*(by_number[i] for i in range(len(order))), *constants)
            return list(map(_jax.with_weak_type, results, weak))

        step.__name__ = self._name
        return step

    @property
    def _name(self) -> str:
        return self._traced.name

    def _looking(self, failures: callbacks.Failures) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """What makes devices raise together where one of them had to."""
        graph = self._traced.graph
        outputs = [a.aval if isinstance(a, Lit) else graph.values[a] for a in graph.block.outputs]
        results = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding)
            for one, sharding in zip(outputs, self._out_shardings, strict=True)
        ]
        look = callbacks.looking(self._name, self.mesh, results, failures)
        number = jax.device_put(np.int32(-1), NamedSharding(self.mesh, PartitionSpec()))
        return lambda arrays: look(number, arrays)

    def _spec(self, number: int) -> jax.ShapeDtypeStruct:
        return _jax.spec_of(self._traced.graph.values[self._traced.graph.block.inputs[number]].aval)

    def _leaves(self, pure: Any) -> list[Any]:
        leaves, tree = jax.tree_util.tree_flatten(pure)
        if tree != self._in_tree:
            raise NewSignature(STRUCTURE)
        return leaves

    def _leaves_along(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flat arguments, in the faster way if the state, all positional, is what the last call returned.

        Where an array should be, the faster way also takes a pytree. The executable refuses it as it refuses a string.
        """
        if len(args) == self._arity and self._returned.issuperset([id(args[i]) for i in self._state_positions]):
            try:
                return self._in_tree.flatten_up_to((args, kwargs))
            except Exception:  # a pytree of the user's own may raise anything
                self._returned = frozenset()
        return self._leaves((args, kwargs))

    def _results(self, leaves: list[Any]) -> Sequence[Any]:
        """The flat results of the user's step: the outputs, and the caller's own arrays where it hands them through."""
        if not self._traced.through:
            return self._run(leaves)
        out = list(self._run(leaves))
        for place, argument in self._traced.through:
            out.insert(place, placement.as_array(leaves[argument]))
        return out

    def _run(self, leaves: list[Any]) -> list[Any]:
        """The flat outputs."""
        if _jax.checks_values():
            return invalid.watched(self._computed, leaves, self._traced, self._owned)
        return self._computed(leaves)

    def _computed(self, leaves: list[Any]) -> list[Any]:
        donated, kept = self._pick_donated(leaves), self._pick_kept(leaves)
        launch = self._launch or self._launched()
        pattern = self._owned.last_pattern(self._weak, donated) if donated else self._weak.planned
        if pattern is None or (donated and not self._disjoint(kept, donated)):
            pattern, donated = self._settled(donated, leaves)
        elif list(map(is_weak, kept)) != pattern.kept:
            pattern = self._weak.pattern_of(leaves)
        if self._frozen is not None:
            kept = self._frozen.placed(kept)
        kept = placement.snapshot(kept)
        if self._dies and (ownership.any_deleted(donated) or ownership.any_deleted(kept)):
            self._check_alive(leaves)
        try:
            out = launch(donated, kept, self._constants)
        except (TypeError, ValueError):  # raised while the arguments are checked: nothing has run
            self._check_alive(leaves)
            out = launch(donated, self._put(kept), self._constants)
        except RuntimeError as error:
            if ownership.says_deleted(error):  # nothing has run here, either
                self._check_alive(leaves)
            raise
        if self._look is not None:
            out = list(self._look(out))
        if pattern.changes:
            pattern.relabel(out)
        if self._canary_output is not None:
            self._owned.remember(out[self._canary_output], self._pick_following(out), pattern.following)
        return out

    def _settled(self, donated: Sequence[Any], leaves: Sequence[Any]) -> tuple[WeakPattern, Sequence[Any]]:
        """The weak types of a call, and the arrays to donate in buffers that are ours."""
        self._owned.recall()
        self._check(self._donated, donated)
        pattern = self._weak.pattern_of(leaves)
        self._check_alive(leaves)
        wanted, paths = [self._in_shardings[i] for i in self._donated], self._traced.arguments
        moves.warn(self._name, donated, wanted, [paths[i].path for i in self._donated], first=not self._called)
        self._called = True
        ready = placement.settle(donated, wanted, self._owned.unshared(leaves, self._ours))
        return pattern, (ready if isinstance(donated, list) else tuple(ready))  # the executable tells them apart

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> None:
        """Takes calls whose flat arguments have weak dtypes like this, too: tracing makes the same program of them."""
        self._weak.accept(arguments, results)

    def _check_alive(self, leaves: Sequence[Any]) -> None:
        """Raises DonatedError if an argument was deleted."""
        ownership.check_alive(leaves, self._traced.arguments, self._name)

    def _put(self, kept: Sequence[Any]) -> Sequence[Any]:
        """The arrays that are not donated, put where the plan wants them.

        The executable itself puts NumPy arrays and arrays on no certain device, and refuses others.
        """
        self._check(self._kept, kept)
        wanted = [self._in_shardings[i] for i in self._kept]
        ready = [
            leaf if placement.is_placed(leaf, sharding) else presence.put([leaf], [sharding])[0]
            for leaf, sharding in zip(kept, wanted, strict=True)
        ]
        return ready if isinstance(kept, list) else tuple(ready)

    def _check(self, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        """Raises NewSignature unless the leaves have the shapes and dtypes of these arguments."""
        values, inputs = self._traced.graph.values, self._traced.graph.block.inputs
        for number, leaf in zip(numbers, leaves, strict=True):
            check_leaf(leaf, values[inputs[number]].aval)


def _shardings(
    traced: Traced, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec]
) -> tuple[list[NamedSharding], list[NamedSharding], list[NamedSharding]]:
    """Those of the arguments, the constants and the results.

    Equal shardings are one object: the executable compares those of its arguments, sooner by identity.
    """
    count, block = len(traced.arguments), traced.graph.block
    specs = in_specs[count:] or [PartitionSpec()] * len(traced.graph.constants)
    known = {spec: NamedSharding(mesh, spec) for spec in (*in_specs, *out_specs, *specs)}
    whole = NamedSharding(mesh, PartitionSpec())

    def sharding(atom: Any, spec: PartitionSpec) -> NamedSharding:
        empty = 0 in (atom.aval if isinstance(atom, Lit) else traced.graph.values[atom]).shape
        return whole if empty else known[spec]  # executables return what has no elements as replicated

    return (
        list(map(sharding, block.inputs[:count], in_specs[:count])),
        list(map(sharding, block.inputs[count:], specs)),
        list(map(sharding, block.outputs, out_specs)),
    )


def _last(function: Callable[..., Any], argument: Any, *others: Any) -> Any:
    """Calls a function with one more argument at the end."""
    return function(*others, argument)


def _anything(_: Any) -> bool:
    """What may be overwritten where the user has named what to donate."""
    return True


def _picker(numbers: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """The fastest function that picks these items of a list, as a list or as a tuple."""
    start = numbers[0] if numbers else 0
    if list(numbers) == list(range(start, start + len(numbers))):
        return operator.itemgetter(slice(start, start + len(numbers)))
    return operator.itemgetter(*numbers)
