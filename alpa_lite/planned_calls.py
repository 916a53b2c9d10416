"""The planned calls of a step: one for each signature of its arguments, with its plan, its shardings, its executable.

A signature is the structure, shapes and dtypes of the arguments, the values of those that are static, and JAX's
settings. JAX traces a step again for every pattern of weak dtypes: `TrainState.step = 0` is a weak integer before the
first call and after it, a strong one once it was restored from a checkpoint. Nearly always the same program comes out.
So where a signature differs from a planned one in weak dtypes alone, the step is traced, which is cheap, and shares
plan and executable if that makes the same program with the same results.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.compilation.existing_placement import compile_with_placement
from alpa_lite.compilation.placing import Kind, kind_of
from alpa_lite.compiler import Compiled, trace_again
from alpa_lite.ir.calling import CallingForm
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import format_path, keys
from alpa_lite.options import Options
from alpa_lite.passes import checks
from alpa_lite.passes.ir.keys import digest
from alpa_lite.passes.tracing import calls, pytrees
from alpa_lite.passes.tracing.calls import Signature
from alpa_lite.plan.plan import Plan
from alpa_lite.processes.plan_broadcast import common_cluster, program_digest
from alpa_lite.runtime.debug import watchdog
from alpa_lite.runtime.load import load
from alpa_lite.runtime.ownership import DonationTracker
from alpa_lite.runtime.placement import DeviceCopies
from alpa_lite.runtime.step import Executable, LoadOptions

logger = logging.getLogger(__name__)

SIGNATURES = 32
"""The most signatures that a step keeps plans and executables for; a call with another one drops the one that was used
longest ago, which is planned again if it comes back. A step whose shapes go on changing would otherwise fill the memory
of the host: each entry holds the graph, the plan and the compiled code. Training has a handful of signatures (training
and evaluation, the last batch, a static flag), buckets of sequence lengths some more, each a power of two."""


class PlannedCall:
    """One signature, or several with the same program. Whoever plans or loads it holds its lock.

    Attributes:
      compiled: the planned step; None until it is planned.
      args, kwargs: of the call that was planned for, with shapes in place of arrays.
      loaded: the executable, once it was made.
    """

    def __init__(self, name: str, how: LoadOptions, verify: str) -> None:
        """Args:
        name: of the step.
        how: to load it.
        verify: the option; "hlo" checks the compiled program.
        """
        self.lock = threading.RLock()
        self.compiled: Compiled | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: Mapping[str, Any] = {}
        self.loaded: Executable | None = None
        self._name, self._how, self._verify = name, how, verify
        self._weak: list[tuple[Sequence[bool], Sequence[bool]]] = []  # of arguments and results, beyond the planned

    def plan(self, compile_call: Callable[[], Compiled], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Plans the call unless it is planned. Returns whether it was not."""
        with self.lock, watchdog.activity(f"planning or loading {self._name}"):
            if self.compiled is not None:
                return False
            compiled = compile_call()
            assert compiled.source.calling is not None
            self.args, self.kwargs = _abstract(compiled.source.calling, args, kwargs)
            self.compiled = compiled  # last: others read it without the lock
            return True

    @property
    def step(self) -> Compiled:
        """The planned step, once it is planned."""
        assert self.compiled is not None
        return self.compiled

    @property
    def calling(self) -> CallingForm:
        """The form of the call."""
        assert self.step.source.calling is not None
        return self.step.source.calling

    @functools.cached_property
    def digest(self) -> str:
        """The digest of the planned program, equal in all processes."""
        return program_digest(self.step.staged.program)

    def executable(self) -> Executable:
        """Returns the executable on the addressable devices, made once; its HLO is checked if requested."""
        with self.lock, watchdog.activity(f"planning or loading {self._name}"):
            if self.loaded is None:
                step = self.step
                executable = load(step.staged, step.plan, self._how)
                if self._verify == "hlo":
                    plan = checks.verify_compiled(step.plan, step.staged, executable.compiled_executables())
                    self.compiled = replace(step, plan=plan)
                for arguments, results in self._weak:
                    executable.accept(arguments, results)
                self.loaded = executable
            return self.loaded

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> None:
        """Takes arguments with other weak dtypes, which give results with these."""
        self._weak.append((arguments, results))
        if self.loaded is not None:
            self.loaded.accept(arguments, results)

    def leaves(self) -> list[tuple[str, Kind, NamedSharding]]:
        """Path, kind and sharding of each flat argument."""
        flat, _ = pytrees.flatten_nnx(self.calling.drop_static(self.args, self.kwargs))
        paths = calls.paths(self.calling, self.args, self.kwargs)
        shardings, _ = self.executable().shardings
        return [(path, kind_of(x) or ((), ""), one) for path, x, one in zip(paths, flat, shardings, strict=True)]

    def batch(self) -> list[int | str]:
        """The places of the arguments that have the batch, or a part of it: numbers and keywords."""
        roots = {keys(argument.path)[0] for argument in self.step.source.arguments if argument.role == "batch"}
        places: list[int | str] = [place for place, name in enumerate(self.calling.names) if name in roots]
        return [*places, *(name for name in self.kwargs if name in roots)]

    def batch_leaves(self) -> list[tuple[Kind, NamedSharding]]:
        """Kind and sharding of each leaf of the batch."""
        names = [place if isinstance(place, str) else self.calling.names[place] for place in self.batch()]
        leaves = self.leaves()
        return [(kind, sharding) for name in names for path, kind, sharding in leaves if keys(path)[0] == name]

    def with_batch(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of the call with another batch."""
        new = dict(zip(self.batch(), values, strict=True))
        args = tuple(new.get(place, x) for place, x in enumerate(self.args))
        return args, {name: new.get(name, x) for name, x in self.kwargs.items()}


class PlannedCalls:
    """The planned calls of a step, for the last `SIGNATURES` signatures. In any thread.

    Attributes:
      owned: the arrays that the step, or those whose state it shares, made, which its calls may overwrite.
    """

    def __init__(self, fun: Callable[..., Any], name: str, options: Options, like: PlannedCalls | None) -> None:
        """Args:
        fun, name, options: of the step.
        like: those of a step whose state it shares.
        """
        self._fun, self._name, self._options = fun, name, options
        self._entries: OrderedDict[Any, PlannedCall] = OrderedDict()  # the last used at the end
        self._plans: list[Plan] = []
        self._lock = threading.Lock()
        self.owned = DonationTracker() if like is None else like.owned
        self._copies = DeviceCopies() if like is None else like._copies

    @property
    def cluster(self) -> Cluster:
        """The cluster that plans are made for."""
        given, like = self._options.cluster, self._options.state_from
        if isinstance(given, Cluster):
            return given
        return like[0].cluster if like else _local_cluster(tuple(jax.devices()))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The first plan that was made, and those of later signatures, in the order in which they were made."""
        with self._lock:
            return tuple(self._plans)

    def recent_calls(self) -> list[PlannedCall]:
        """Returns the planned calls that are kept, the one used last first."""
        with self._lock:
            entries = dict.fromkeys(reversed(self._entries.values()))
        return [entry for entry in entries if entry.compiled is not None]

    def count(self) -> int:
        """Returns the number of signatures that are planned and kept."""
        with self._lock:
            return sum(entry.compiled is not None for entry in self._entries.values())

    def clear(self) -> None:
        """Drops all of them."""
        with self._lock:
            self._entries.clear()

    def find(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], running: Any) -> PlannedCall:
        """Returns the call of these arguments, planned if it is new. Drops the signatures used longest ago.

        A call that is dropped while a thread works on it, or runs its executable, lives until that thread is done.

        Args:
          running: the executable that runs now, which counts as used just before.
        """
        options, kwargs = self._options, dict(kwargs)
        form = calls.describe_calling(self._fun, args, kwargs, options.static_argnums, options.static_argnames)
        key = calls.signature(form, args, kwargs), self.cluster
        if self._entries and key not in self._entries:
            self._relate(key, calls.paths(form, args, kwargs), args, kwargs)
        how = LoadOptions(
            donate=options.donate, owned=self.owned, copies=self._copies, settings=form.settings,
            compiler_options=dict(options.compiler_options),
        )  # fmt: skip
        with self._lock:
            current = [k for k, one in self._entries.items() if one.loaded is running is not None]
            entry = self._entries.setdefault(key, PlannedCall(self._name, how, options.verify))
            for used in (*current, key):
                self._entries.move_to_end(used)
            while len(self._entries) > SIGNATURES:
                self._entries.popitem(last=False)
        try:
            if entry.plan(functools.partial(self._compile, args, kwargs), args, kwargs):
                with self._lock:
                    self._plans.append(entry.step.plan)
                    del self._plans[1:-SIGNATURES]
        finally:
            if entry.compiled is None:  # planning failed: nothing is worth keeping
                with self._lock:
                    if self._entries.get(key) is entry:
                        del self._entries[key]
        return entry

    def _compile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Compiled:
        own = self.plans
        why = "another signature of its arguments" if own else "first signature of its arguments"
        return compile_with_placement(self._fun, args, kwargs, self._options, self.cluster, own, why=why, shared=True)

    def _relate(self, key: Any, paths: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Lets a new signature share the entry of one with the same program, or logs how it differs from others.

        Only signatures that differ in weak dtypes alone are traced to compare the programs.
        """
        name, (signature, cluster) = self._name, key
        with self._lock:
            kept = {known: entry for (known, where), entry in self._entries.items() if where == cluster}
        for known, entry in kept.items():
            if not is_same_but_weak(known, signature):
                continue
            with entry.lock:
                if entry.compiled is None:
                    continue
                traced = trace_again(entry.compiled, self._fun, args, kwargs, self._options)
                if is_same_program(entry.compiled.source, traced):
                    entry.accept(weak_types(signature), [output.weak for output in traced.outputs])
                    with self._lock:
                        self._entries.setdefault(key, entry)
                    logger.info("%s: another pattern of weak dtypes makes the planned program, and shares it", name)
                    return
        made = {known: entry.compiled for known, entry in kept.items() if entry.compiled is not None}
        planned = {known: [argument.path for argument in one.source.arguments] for known, one in made.items()}
        if planned:
            why = explain_miss(signature, paths, planned)
            logger.warning("%s is planned again, for another signature: %s", name, why)


def _abstract(
    calling: CallingForm, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with a `jax.ShapeDtypeStruct` for each array; static ones as they are."""

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dtype, weak = calls.leaf_type(leaf)
        return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)

    traced = calling.drop_static(args, kwargs)
    return calling.insert_static(*pytrees.replace_arrays(traced, lambda leaves: list(map(spec, leaves))))


@functools.lru_cache(maxsize=1)
def _local_cluster(devices: tuple[Any, ...]) -> Cluster:
    """Returns the cluster of the devices that are here, described once for as long as they are the same."""
    return common_cluster(Cluster.local(devices))


LISTED = 4
"""How many differing arguments a message lists."""


def weak_types(signature: Signature) -> tuple[bool, ...]:
    """Returns whether the dtype of each leaf is weak."""
    return tuple(isinstance(kind, tuple) and kind[2] for kind in signature.types)


def is_same_but_weak(one: Signature, other: Signature) -> bool:
    """Returns whether two signatures differ at most in which dtypes are weak."""
    alike = (one.form, one.tree, one.settings) == (other.form, other.tree, other.settings)
    return alike and _strong(one) == _strong(other)


def is_same_program(one: Traced, other: Traced) -> bool:
    """Whether two traces of one step compute the same results from their arguments; weak dtypes do not count."""
    return (
        (one.arguments, one.outputs, one.state, one.returned_arguments)
        == (other.arguments, other.outputs, other.state, other.returned_arguments)
        and one.in_tree == other.in_tree
        and one.out_tree == other.out_tree
        and digest(one.graph) == digest(other.graph)
    )


def explain_miss(new: Signature, paths: Sequence[str], planned: Mapping[Signature, Sequence[str]]) -> str:
    """Describes the differences of a new signature from the planned one with which it has most in common.

    Args:
      new: the new signature.
      paths: of its leaves.
      planned: the planned signatures, at least one, with the paths of their leaves; of equals, the last counts.
    """
    found = min((_differences(old, planned[old], new, paths) for old in reversed([*planned])), key=len)
    more = len(found) - LISTED
    return "; ".join(found[:LISTED]) + (f"; and {more} more" if more > 0 else "")


def _differences(old: Signature, paths: Sequence[str], new: Signature, new_paths: Sequence[str]) -> list[str]:
    """Returns each difference of a signature from another, in words."""
    found = [f"{_called(new)}, planned was {_called(old)}"] if old.form[:2] != new.form[:2] else []
    kinds = zip(_facts(old, paths), _facts(new, new_paths), _ADDED, _REMOVED, strict=True)
    for before, after, added, removed in kinds:
        for name, (label, text, value) in after.items():
            if name not in before:
                found.append(f"{name} {added}")
            elif value != before[name][2]:
                found.append(f"{label} is {text}, planned was {before[name][1]}")
        found += [f"{name} {removed}" for name in before if removed and name not in after]
    return found or ["the containers of the arguments have other types or other static fields"]


_ADDED = "is static", "is a new setting of JAX", "is new"
_REMOVED = "is not static any more", "", "is missing"


def _facts(signature: Signature, paths: Sequence[str]) -> tuple[dict[Any, tuple[str, str, Any]], ...]:
    """Returns the label, the text and the value of each static argument, each setting of JAX, and each leaf."""
    static = {
        place: (f"{'the ' * isinstance(place, str)}static argument {place}", repr(value), (type(value), value))
        for place, _, value in signature.form[2]
    }
    settings = {name: (name, str(value), value) for name, value in _jax.name_settings(signature.settings).items()}
    leaves = zip(map(format_path, paths), signature.types, strict=False)
    return static, settings, {path: (path, _text(kind), kind) for path, kind in leaves}


def _called(signature: Signature) -> str:
    count, keywords, _ = signature.form
    return f"{count} positional arguments" + (f" and the keywords {', '.join(keywords)}" if keywords else "")


def _strong(signature: Signature) -> list[Any]:
    return [kind[:2] if isinstance(kind, tuple) else kind for kind in signature.types]


def _text(kind: Any) -> str:
    if not isinstance(kind, tuple):
        return f"no array but a {kind.__name__}"
    shape, dtype, weak = kind
    return f"{'weak ' if weak else ''}{dtype}[{','.join(map(str, shape))}]"
