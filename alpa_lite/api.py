"""The face: `parallelize` runs a train step that is written for one device on all of them. See `compiler`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import jax
from jax.core import Tracer

from alpa_lite import around
from alpa_lite.around import Call, Shardings
from alpa_lite.cluster import Cluster
from alpa_lite.compilation import replanning
from alpa_lite.compilation.likeness import compile_alike
from alpa_lite.compiler import Compiled, trace_again
from alpa_lite.errors import OptionError
from alpa_lite.ir.timeline import Timeline
from alpa_lite.lowered import Lowered
from alpa_lite.options import Method, Off, Options, PlanOptions, StepOptions
from alpa_lite.passes import checks
from alpa_lite.passes.tracing import calls
from alpa_lite.plan.plan import Plan
from alpa_lite.processes.divergence import ProgramPoint
from alpa_lite.processes.failure_propagation import monitor
from alpa_lite.processes.plan_broadcast import common_cluster, program_digest
from alpa_lite.report import timeline
from alpa_lite.runtime.binding import NewSignature
from alpa_lite.runtime.debug import watchdog
from alpa_lite.runtime.jit_fallback import jit_fallback
from alpa_lite.runtime.load import load
from alpa_lite.runtime.ownership import Owned
from alpa_lite.runtime.pipeline import PipelineExecutable
from alpa_lite.runtime.placement import DeviceCopies
from alpa_lite.runtime.prefetch import Prefetch
from alpa_lite.runtime.sharded_init import ShardedInit
from alpa_lite.runtime.step import Executable, LoadOptions

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R", covariant=True)


@overload
def parallelize(fun: Callable[P, R], **options: Unpack[StepOptions]) -> ParallelStep[P, R]: ...


@overload
def parallelize(**options: Unpack[StepOptions]) -> Decorator: ...


def parallelize(fun: Callable[..., Any] | None = None, **options: Unpack[StepOptions]) -> Any:
    """Runs a step that is written for one device on every device of a cluster.

    Args:
      fun: the step: takes training state and a batch, in any order and any pytree, and returns the new state among its
        results. Flax NNX modules and optimizers are updated in place. Evaluation, prediction and other functions of
        arrays, which return no state, are planned in the same way. Without `fun`, returns a decorator.
      method: "auto", "off" (plain `jit`), or one of `Auto() Sharded() DataParallel() Zero() TensorParallel()
        Pipeline() Manual()`.
      cluster: the devices to plan for, or the name of a preset; by default those of this process. The file of a
        calibration, as "here.json", gives their measured figures.
      memory_per_device: bytes that a plan may use on each device, or a text such as "16 GiB"; by default its memory
        less a reserve.
      num_microbatches: the number of equal parts of the batch that are computed one after another. "auto" chooses
        the number with the least predicted seconds: on one mesh the least power of two that fits the memory, or a
        greater one where the memory that it leaves free buys more seconds than it costs.
      allow_inexact: whether micro-batches may change the result if a value needs the whole batch (batch norm);
        `Plan.notes` lists such values.
      batch_argnums, batch_argnames: the arguments that are the batch; "auto" finds them.
      state_argnums, state_argnames: the arguments that are state, whose new values the step returns; "auto" finds them.
      static_argnums, static_argnames: as in `jax.jit`.
      constrain: globs on scopes of Flax modules and `jax.named_scope`, with the `PartitionSpec` of the scope's output:
        `{"*/h_0/mlp": P("x", None)}`. That is the last value of its forward operations that another scope reads; `*`
        stands for any text, slashes included.
      allow, forbid: strategies that are searched, over plans of one mesh, or that are not: "data parallel", "fsdp",
        "zero", "tensor parallel" (`methods.STRATEGIES` describes each).
      donate_argnums, donate_argnames: as in `jax.jit`: these arguments are overwritten where they are placed as
        planned. "auto" donates the state, but only arrays that this step returned, or that `place` made to be given
        away: others are copied first, so that a caller's own arrays, and results of another step, are never deleted.
        () donates nothing.
      in_shardings, out_shardings: as in `jax.jit`, as constraints of the plan: pytree prefixes of the positional
        arguments and of the result, None where the plan may choose. For state one of the two is enough. The plan is
        one of one mesh.
      keep_unused, inline: as in `jax.jit`; a plan depends on neither.
      compiler_options: for XLA, as in `jax.jit`.
      ignore_annotations: plans as if the step had no sharding constraints, its arguments no annotations and no
        shardings, and the context no mesh.
      like: a step made by `parallelize`, or a plan, or several: arguments that it has as state stay where it has them.
        For evaluation and whatever else reads the state of a train step, on one mesh and on a pipeline's submeshes.
      communication: "explicit" writes every collective out; "compiler" leaves them to XLA.
      plan: a `Plan`, or the path of one, to run without solving.
      overlap: predicted seconds count communication that hides behind computing, gradient synchronisation and gathers
        of parameters ahead of their use, where the compiler does that: on GPUs and TPUs, of all plans alike.
      verify: "shardy" checks each plan against the partitioner; "hlo" also the compiled program; "off" neither.
      effort: the budget of work of the search: "quick", "normal" or "thorough", about 3, 20 and 180 CPU seconds for the
        largest models. It is counted, so that a plan does not depend on the machine that makes it; more effort never
        gives a slower plan.
      planning_time_limit: wall-clock seconds after which the search ends, once a plan fits; None for no limit. A plan
        that it cuts short says so (`Plan.search.truncated`), depends on the machine, and is not cached.
      dump_dir: a directory for the value after each pass, as text.
      cache_dir: a directory where plans are kept and found again without solving, for the same program, arguments,
        options, cluster and versions; by default that of the environment variable `ALPA_LITE_CACHE_DIR`, if it is set.

    Returns:
      A `ParallelStep`, called like `fun`.

    Raises:
      OptionError: for an option that cannot be used.

    Example:
      >>> import jax, alpa_lite
      >>> @alpa_lite.parallelize
      ... def step(w, x):
      ...     loss, grad = jax.value_and_grad(lambda w: ((x @ w["w"]) ** 2).mean())(w)
      ...     return {"w": w["w"] - 0.1 * grad["w"]}, loss
    """
    checked = make_options(options)
    if fun is None:
        return lambda fun: ParallelStep(fun, checked)
    return ParallelStep(fun, checked)


def _signature() -> inspect.Signature:
    """The signature with each option as a keyword, for `help` and for completion at run time."""
    kinds = inspect.Parameter
    keywords = [
        kinds(field.name, kinds.KEYWORD_ONLY, default=field.default, annotation=StepOptions.__annotations__[field.name])
        for field in fields(Options)
    ]
    return inspect.Signature([kinds("fun", kinds.POSITIONAL_OR_KEYWORD, default=None), *keywords])


parallelize.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]


class Decorator(Protocol):
    """A decorator with options."""

    def __call__(self, fun: Callable[P, R], /) -> ParallelStep[P, R]:
        """The step made from a function."""
        ...


def make_options(options: Mapping[str, Any]) -> Options:
    """`Options` from keyword arguments, with an error that lists the known names for an unknown one."""
    known = list(Options.__dataclass_fields__)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "help(alpa_lite.parallelize) lists the options"
            raise OptionError(f"{name}=: there is no such option; {hint}")
    return Options(**options)


def make_plan(
    fun: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    **options: Unpack[PlanOptions],
) -> Plan:
    """The plan of a step for a cluster that need not be attached; `args` are arrays or `jax.ShapeDtypeStruct`s.

    Args:
      fun, args, kwargs: the step and its positional and keyword arguments.
      cluster: a `Cluster` or the name of a preset.
      options: as for `parallelize`.
    """
    if isinstance(fun, ParallelStep):
        fun = fun._fun
    checked = make_options({**options, "cluster": cluster})
    assert isinstance(checked.cluster, Cluster)
    return compile_alike(fun, args, kwargs, checked, checked.cluster, own=()).plan


SIGNATURES = 32
"""The most signatures that a step keeps plans and executables for; a call with another one drops the one that was used
longest ago, which is planned again if it comes back. A step whose shapes go on changing would otherwise fill the memory
of the host: each entry holds the graph, the plan and the compiled code. Training has a handful of signatures (training
and evaluation, the last batch, a static flag), buckets of sequence lengths some more, each a power of two."""


class ParallelStep(Generic[P, R]):
    """A step that plans once for each signature of its arguments and then runs on every device.

    Call it like the function that it was made from, in any thread. It keeps what it made for the last `SIGNATURES`
    signatures: structure, shapes and dtypes of the arguments, values of those that are static, and JAX's settings.
    """

    __name__: str

    def __init__(self, fun: Callable[P, R], options: Options):
        if not callable(fun):
            raise OptionError(f"fun={fun!r}: give the train step, a function")
        _wrap(self, fun)
        self._fun = fun
        self._options = options
        self._planned: OrderedDict[Any, _Planned] = OrderedDict()  # the last used at the end
        self._plans: list[Plan] = []
        self._lock = threading.Lock()  # of `_planned` and `_plans`
        shared = next((one for one in options.like if isinstance(one, ParallelStep)), None)
        # Arrays that this step, or those whose state it shares, made, which its calls may overwrite; frozen weights.
        self._owned = Owned() if shared is None else shared._owned
        self._copies = DeviceCopies() if shared is None else shared._copies
        self._first = 0  # the number of the first call
        self._current: Any = jit_fallback(fun, options) if isinstance(options.method, Off) else None

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(self: ParallelStep[Concatenate[Any, Q], R], instance: object, owner: Any = None) -> BoundStep[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The step bound to an object as its method, as functions and those of `jax.jit` are."""
        return self if instance is None else BoundStep(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step. Plans first if the arguments have a new signature, and places arrays as planned."""
        call = monitor.call_log.begin_call()
        try:
            if not watchdog.active:
                return self._run(args, kwargs, call)
            with watchdog.active[-1].step(self.__name__) as activity:
                results = self._run(args, kwargs, call)
                activity.record_results(results)
                return results
        except Exception as error:
            monitor.report_raised(call.number, self.__name__, error)
            raise
        finally:
            monitor.call_log.end()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: ProgramPoint) -> Any:
        current = self._current
        if current is not None:
            try:
                return current(*args, **kwargs)
            except NewSignature:
                pass
            except Exception:
                if not _as_written(args, kwargs):
                    raise
        if _as_written(args, kwargs):
            logger.warning("%s is called by a JAX transformation: it runs as written, not as planned", self.__name__)
            return self._fun(*args, **kwargs)
        monitor.call_log.record_new_arguments(call)
        self._first = self._first or call.number
        # Other threads may call the step, too: what is `_current` by now is not asked again.
        with self._entry(args, kwargs) as entry:
            self._current = current = self._loaded(entry, args, kwargs)
            if monitor.is_running:
                monitor.call_log.record_program(call, self._first, entry.digest())
        return current(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments like these: arrays or `jax.ShapeDtypeStruct`s. Nothing is executed."""
        if self._options.verify == "hlo":
            self._executable(args, kwargs)  # compiling is what this check needs
        return self._compiled(args, kwargs).plan

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the arguments as arrays sharded as in the plan. Never aliases the caller's buffers.

        Takes the batch alone, too, once the step is planned: `batch = step.place(batch)`. One argument is returned as
        it is, several as a tuple.

        In a multi-process run each process may give the whole batch, the same in all, or only the rows of it that its
        devices read, `step.rows()`: a batch with the shapes of a planned one is taken as the whole, one with as many
        rows as those as a part of the last one, and anything else as a batch of another size.
        """
        known = [] if kwargs else self._calls()
        if not around.is_batch_alone(known, args):
            return self._executable(args, kwargs).place(*args, **kwargs)
        placed = around.place_batch(known, args, self._call)
        return placed[0] if len(placed) == 1 else placed

    def rows(self) -> Any:
        """The rows of the global batch that devices of this process read, for loaders that read only these.

        Returns:
          A pytree like the batch, of the last planned call; for each array the positions in its leading dim, ascending.
          An array that this process reads nothing of, as that of another process's stage, has none.

        Raises:
          OptionError: the step is not planned yet, or has no batch.

        Example:
          mine = step.rows()["x"]
          batch = step.place({"x": read_rows(mine), "y": read_labels(mine)})
        """
        known = self._calls()
        if not known or not known[0].batch():
            name = self.__name__
            raise OptionError(f"{name}.rows: it has no plan with a batch yet; call {name}.plan(...) or init before")
        return around.rows_of(known[0])

    def prefetch(self, batches: Iterable[Any], size: int = 2) -> Prefetch:
        """Returns the batches, placed on the devices as in the plan by a separate thread while the step computes.

        Batches of other shapes (a short last one) are planned for when they come. Until the step is planned, batches
        come as they are. An error of `batches` is raised where its batch would have come; `close()` ends the thread.
        In a multi-process run, all must have equally many batches: one that has more waits for the others in its step.

        Args:
          batches: each the argument that is the batch, or the tuple of these if there are several; whole or in the rows
            of this process, as for `place`.
          size: how many placed batches may wait.

        Example:
          for batch in step.prefetch(loader):
              state, loss = step(state, batch)
        """

        def place(batch: Any) -> Any:
            known = self._calls()
            if not known:
                return batch
            several = len(known[0].batch()) > 1
            return self.place(*batch) if several else self.place(batch)

        return Prefetch(batches, place, size)

    def shardings(self, *args: Any, **kwargs: Any) -> Shardings:
        """Where arguments and results lie: pytrees with a `NamedSharding` for each array. Nothing is executed.

        For restores, data loaders, and `jax.jit`, whose `in_shardings` and `out_shardings` they can be.

        Args:
          args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
        """
        call = self._call(args, kwargs)
        return around.shardings_of(call, self._compiled(args, kwargs).traced.out_tree)

    def init(self, init_fn: Callable[..., Any], *args: Any, rest: Any = None) -> Any:
        """State that is born sharded as the plan wants it: `init_fn(*args)`, no device or host of which has the whole.

        The numbers are those of `jax.jit(init_fn)(*args)`, bit for bit: each mesh of the plan makes its own leaves,
        some at a time, and each device keeps its blocks. A leaf that takes more than a quarter of a device's memory is
        made in blocks, equal up to rounding.

        Args:
          init_fn: makes an argument of the step, or a tuple of arguments: `TrainState.create` in a function, the `init`
            of a linen module or of an Optax optimizer, a constructor of NNX modules.
          args: of `init_fn`, such as a random key.
          rest: if the step is not planned yet, its arguments after those that `init_fn` makes, or a dict of all others
            by name; arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          OptionError: the step has no plan and `rest` is not given, or the step does not take what `init_fn` makes.

        Example:
          state = train_step.init(create_train_state, jax.random.key(0), rest=(batch,))
        """
        birth = ShardedInit(init_fn, args)
        known = self._calls()
        call = known[-1] if known else self._call(*around.completed(self._fun, birth.shapes, rest))
        state, arrays = around.init_sharded(birth, call, room=self.cluster.usable_memory / 4)
        self._owned.add(arrays)
        return state

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The planned step before it is compiled, as of a function under `jax.jit`: `step.lower(...).compile()`.

        Args:
          args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
        """
        return Lowered(self._executable(args, kwargs), self._compiled(args, kwargs).plan)

    def clear_cache(self) -> None:
        """Drops all plans and executables: the next call plans again. State keeps its places."""
        with self._lock:
            self._planned.clear()
            if not isinstance(self._options.method, Off):
                self._current = None

    def hlo(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """The optimised HLO text of each executable; for a pipeline, of the executables of every stage."""
        return self._executable(args, kwargs).hlo()

    def trace(self, path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Timeline:
        """Runs one pipelined step and writes when each of its tasks ran, and the predicted timeline.

        The file is in the trace-event format, which Perfetto opens. State is copied first: nothing is donated.

        Args:
          path: the file; None writes nothing.
          args, kwargs: of the step.

        Returns:
          The executed timeline.

        Raises:
          OptionError: the plan has no pipeline; `jax.profiler` shows what one executable does.
        """
        executable = self._executable(args, kwargs)
        plan = self.plan(*args, **kwargs)
        if not isinstance(executable, PipelineExecutable):
            raise OptionError("trace: the plan has one mesh and no pipeline; use jax.profiler.trace for its executable")
        executed = executable.trace(*args, **kwargs)
        if path is not None:
            timeline.write(path, executed, plan.division.timeline)
        return executed

    def planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Compiled, Executable]:
        """The planned step and its executable, for tools such as `alpa_lite.check`."""
        return self._compiled(args, kwargs), self._executable(args, kwargs)

    def __repr__(self) -> str:
        name, method = getattr(self._fun, "__name__", type(self._fun).__name__), self._options.method
        assert isinstance(method, Method)  # `Options` has looked names up
        with self._lock:
            count = sum(entry.compiled is not None for entry in self._planned.values())
        return f"<ParallelStep {name}: {method.describe()}, {count} signature{'s' * (count != 1)} planned>"

    @property
    def options(self) -> Options:
        """The options given to `parallelize`."""
        return self._options

    @property
    def cluster(self) -> Cluster:
        """The cluster that plans are made for."""
        given, like = self._options.cluster, self._options.like
        if isinstance(given, Cluster):
            return given
        return like[0].cluster if like else _local_cluster(tuple(jax.devices()))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The first plan that was made, and those of later signatures, in the order in which they were made."""
        with self._lock:
            return tuple(self._plans)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A call, planned for."""
        with self._entry(args, dict(kwargs)) as entry:
            compiled = self._planned_step(entry, args, dict(kwargs))
            return self._as_call(entry, compiled)

    def _calls(self) -> list[Call]:
        """The calls that were planned for and are kept, the one used last first."""
        with self._lock:
            entries = list(dict.fromkeys(reversed(self._planned.values())))
        return [self._as_call(entry, entry.compiled) for entry in entries if entry.compiled is not None]

    def _as_call(self, entry: _Planned, compiled: Compiled) -> Call:
        def executable() -> Executable:
            with entry.lock:
                return entry.load(self._options, self._owned, self._copies)

        roles = {argument.path: argument.role for argument in compiled.source.arguments}
        assert compiled.source.calling is not None
        return Call(compiled.source.calling, *entry.shapes, executable, roles)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        """The planned step for arguments with the signature of these."""
        with self._entry(args, kwargs) as entry:
            return self._planned_step(entry, args, kwargs)

    def _executable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        """The executable for arguments with the signature of these."""
        with self._entry(args, kwargs) as entry:
            return self._loaded(entry, args, kwargs)

    def _loaded(self, entry: _Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Executable:
        self._planned_step(entry, args, kwargs)
        return entry.load(self._options, self._owned, self._copies)

    def _planned_step(self, entry: _Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        if entry.compiled is None:
            own = self.plans
            why = "another signature of its arguments" if own else "first signature of its arguments"
            compiled = compile_alike(self._fun, args, kwargs, self._options, self.cluster, own, why, shared=True)
            assert compiled.source.calling is not None
            entry.shapes = around.abstract(compiled.source.calling, args, kwargs)
            entry.compiled = compiled
            with self._lock:
                self._plans.append(entry.compiled.plan)
                del self._plans[1:-SIGNATURES]
        return entry.compiled

    @contextlib.contextmanager
    def _entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Planned]:
        """Yields the cache entry of a call's signature, to one thread at a time. Drops the signatures used longest ago.

        Entries whose executable is `_current` count as used just before. An entry that is dropped while a thread works
        on it, or runs its executable, lives until that thread is done.
        """
        options = self._options
        call = calls.calling(self._fun, args, kwargs, options.static_argnums, options.static_argnames)
        key = calls.signature(call, args, kwargs), self.cluster
        if self._planned and key not in self._planned:
            self._relate(key, calls.paths(call, args, kwargs), args, kwargs)
        with self._lock:
            running = [k for k, one in self._planned.items() if one.executable is self._current is not None]
            entry = self._planned.setdefault(key, _Planned(call.settings))
            for used in (*running, key):
                self._planned.move_to_end(used)
            while len(self._planned) > SIGNATURES:
                self._planned.popitem(last=False)
        with entry.lock, watchdog.activity(f"planning or loading {self.__name__}"):
            try:
                yield entry
            finally:
                if entry.compiled is None:  # planning failed: nothing is worth keeping
                    with self._lock:
                        if self._planned.get(key) is entry:
                            del self._planned[key]

    def _relate(self, key: Any, paths: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Lets a new signature share the entry of one with the same program, or logs how it differs from others.

        Only signatures that differ in weak dtypes alone are traced to compare the programs.
        """
        name, (signature, cluster) = self.__name__, key
        with self._lock:
            kept = {known: entry for (known, where), entry in self._planned.items() if where == cluster}
        for known, entry in kept.items():
            if not replanning.same_but_weak(known, signature):
                continue
            with entry.lock:
                if entry.compiled is None:
                    continue
                traced = trace_again(entry.compiled, self._fun, args, kwargs, self._options)
                if replanning.same_program(entry.compiled.source, traced):
                    entry.accept(replanning.weak_types(signature), [output.weak for output in traced.outputs])
                    with self._lock:
                        self._planned.setdefault(key, entry)
                    logger.info("%s: another pattern of weak dtypes makes the planned program, and shares it", name)
                    return
        made = {known: entry.compiled for known, entry in kept.items() if entry.compiled is not None}
        planned = {known: [argument.path for argument in one.source.arguments] for known, one in made.items()}
        if planned:
            why = replanning.why(signature, paths, planned)
            logger.warning("%s is planned again, for another signature: %s", name, why)


class BoundStep(Generic[P, R]):
    """A step that is a method, bound to an object, which becomes its first argument."""

    def __init__(self, step: ParallelStep[..., R], instance: Any):
        self.__func__, self.__self__ = step, instance

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; see `ParallelStep`."""
        return self.__func__(self.__self__, *args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """As `ParallelStep.place`, of the arguments after the object that the step is bound to, or of the batch."""
        step = self.__func__
        if not kwargs and around.is_batch_alone(step._calls(), args):
            return step.place(*args)
        placed = step.place(self.__self__, *args, **kwargs)
        return (placed[0][1:], placed[1]) if kwargs else placed[1:]

    def trace(self, path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Timeline:
        """As `ParallelStep.trace`."""
        return self.__func__.trace(path, self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The step's own attributes; those that take its arguments take the others after the object."""
        value = getattr(self.__func__, name)
        return functools.partial(value, self.__self__) if name in ("plan", "shardings", "hlo", "lower") else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundStep) and (self.__func__, id(self.__self__)) == (
            other.__func__, id(other.__self__)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __repr__(self) -> str:
        return f"<{self.__func__!r} bound to a {type(self.__self__).__name__}>"


def _wrap(step: ParallelStep[..., Any], fun: Callable[..., Any]) -> None:
    """Gives a step the name, the documentation and the attributes of its function, as `functools.update_wrapper`.

    A callable object keeps its attributes: they are its own, not those of a function.
    """
    functools.update_wrapper(step, fun, updated=())
    if inspect.isfunction(fun):
        step.__dict__.update({name: value for name, value in vars(fun).items() if not hasattr(type(step), name)})
    step.__dict__["__wrapped__"] = fun
    if not hasattr(fun, "__name__"):
        inner = fun.func if isinstance(fun, functools.partial) else type(fun)
        step.__dict__["__name__"] = getattr(inner, "__name__", "step")


class _Planned:
    """The cache entry of one signature, or several with the same program; whoever plans or loads it holds the lock."""

    def __init__(self, settings: tuple[Any, ...]) -> None:
        """Args:
        settings: of JAX, which all its signatures have.
        """
        self._settings = settings
        self.lock = threading.RLock()
        self.compiled: Compiled | None = None
        self.shapes: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}  # of the call that was planned for
        self.executable: Executable | None = None
        self._digest: str | None = None
        self._weak: list[tuple[Sequence[bool], Sequence[bool]]] = []  # of arguments and results, beyond the planned

    def accept(self, arguments: Sequence[bool], results: Sequence[bool]) -> None:
        """Takes arguments with other weak dtypes, which give results with these."""
        self._weak.append((arguments, results))
        if self.executable is not None:
            self.executable.accept(arguments, results)

    def digest(self) -> str:
        """The digest of the planned program, equal in all processes."""
        if self._digest is None:
            assert self.compiled is not None
            self._digest = program_digest(self.compiled.staged.program)
        return self._digest

    def load(self, options: Options, owned: Owned, copies: DeviceCopies) -> Executable:
        """The executable of the planned step on the addressable devices, made once; its HLO is checked if requested."""
        if self.executable is None:
            assert self.compiled is not None
            staged, plan = self.compiled.staged, self.compiled.plan
            how = LoadOptions(
                donate=options.donate, owned=owned, copies=copies, settings=self._settings,
                compiler_options=dict(options.compiler_options),
            )  # fmt: skip
            executable = load(staged, plan, how)
            if options.verify == "hlo":
                plan = checks.verified_compiled(plan, staged, executable.compiled())
                self.compiled = replace(self.compiled, plan=plan)
            for arguments, results in self._weak:
                executable.accept(arguments, results)
            self.executable = executable
        return self.executable


def _as_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step is called where no executable can run: with tracers (`jax.eval_shape`), or with jit disabled."""
    return jax.config.jax_disable_jit or any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))


@functools.lru_cache(maxsize=1)
def _local_cluster(devices: tuple[Any, ...]) -> Cluster:
    """The cluster of the devices that are here, described once for as long as they are the same."""
    return common_cluster(Cluster.local(devices))
