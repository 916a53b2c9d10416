"""The face: `parallelize` runs a train step that is written for one device on all of them. See `compiler`."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

import jax
from jax.core import Tracer

from alpa_lite import state_io
from alpa_lite.cluster import Cluster
from alpa_lite.compilation.existing_placement import compile_with_placement
from alpa_lite.compiler import Compiled
from alpa_lite.errors import OptionError
from alpa_lite.ir.timeline import Timeline
from alpa_lite.options import Method, Off, Options, PlanOptions, StepOptions, descriptions, make_options, signature
from alpa_lite.plan.plan import Plan
from alpa_lite.planned_calls import PlannedCall, PlannedCalls
from alpa_lite.processes.divergence import ProgramPoint
from alpa_lite.processes.failure_propagation import monitor
from alpa_lite.report import timeline
from alpa_lite.runtime.binding import NewSignature
from alpa_lite.runtime.debug import watchdog
from alpa_lite.runtime.jit_fallback import jit_fallback
from alpa_lite.runtime.pipeline import PipelineExecutable
from alpa_lite.runtime.prefetch import Prefetch
from alpa_lite.runtime.sharded_init import ShardedInit
from alpa_lite.runtime.step import Executable
from alpa_lite.step_forms import BoundStep, Lowered, copy_attributes

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
      options: the keywords that `alpa_lite.options.Options` describes.

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


parallelize.__signature__ = signature()  # pyright: ignore[reportFunctionMemberAccess]
parallelize.__doc__ = inspect.cleandoc(parallelize.__doc__ or "").replace(
    "  options: the keywords that `alpa_lite.options.Options` describes.", descriptions()
)


class Decorator(Protocol):
    """A decorator with options."""

    def __call__(self, fun: Callable[P, R], /) -> ParallelStep[P, R]:
        """Returns the step made from a function."""
        ...


def make_plan(
    fun: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    **options: Unpack[PlanOptions],
) -> Plan:
    """Returns the plan of a step for a cluster that need not be attached; `args` are arrays or `jax.ShapeDtypeStruct`s.

    Args:
      fun, args, kwargs: the step and its positional and keyword arguments.
      cluster: a `Cluster` or the name of a preset.
      options: as for `parallelize`.
    """
    if isinstance(fun, ParallelStep):
        fun = fun._fun
    checked = make_options({**options, "cluster": cluster})
    assert isinstance(checked.cluster, Cluster)
    return compile_with_placement(fun, args, kwargs, checked, checked.cluster, own=()).plan


class ParallelStep(Generic[P, R]):
    """A step that plans once for each signature of its arguments and then runs on every device.

    Call it like the function that it was made from, in any thread. It keeps what it made for the last
    `planned_calls.SIGNATURES` signatures: structure, shapes and dtypes of the arguments, values of those that are
    static, and JAX's settings.
    """

    __name__: str

    def __init__(self, fun: Callable[P, R], options: Options):
        if not callable(fun):
            raise OptionError(f"fun={fun!r}: give the train step, a function")
        copy_attributes(self, fun)
        self._fun = fun
        self._options = options
        shared = next((one._calls for one in options.state_from if isinstance(one, ParallelStep)), None)
        self._calls = PlannedCalls(fun, self.__name__, options, shared)
        self._first = 0  # the number of the first call
        self._current: Any = jit_fallback(fun, options) if isinstance(options.method, Off) else None

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(self: ParallelStep[Concatenate[Any, Q], R], instance: object, owner: Any = None) -> BoundStep[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Returns the step bound to an object as its method, as functions and those of `jax.jit` are."""
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
        entry = self._call(args, kwargs)
        # Other threads may call the step, too: what is `_current` by now is not asked again.
        self._current = current = entry.executable()
        if monitor.is_running:
            monitor.call_log.record_new_arguments(call, self._first, entry.digest)
        return current(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall:
        """Returns the call of these arguments, planned if it is new."""
        return self._calls.find(args, kwargs, self._current)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for arguments like these: arrays or `jax.ShapeDtypeStruct`s. Nothing is executed."""
        call = self._call(args, kwargs)
        if self._options.verify == "hlo":
            call.executable()  # compiling is what this check needs
        return call.step.plan

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the arguments as arrays sharded as in the plan. Never aliases the caller's buffers.

        Takes the batch alone, too, once the step is planned: `batch = step.place(batch)`. One argument is returned as
        it is, several as a tuple.

        In a multi-process run each process may give the whole batch, the same in all, or only the rows of it that its
        devices read, `step.local_batch_indices()`: a batch with the shapes of a planned one is taken as the whole, one
        with as many rows as those as a part of the last one, and anything else as a batch of another size.
        """
        known = [] if kwargs else self._calls.recent_calls()
        if not state_io.is_only_batch(known, args):
            return self._call(args, kwargs).executable().place(*args, **kwargs)
        placed = state_io.place_batch(known, args, self._call)
        return placed[0] if len(placed) == 1 else placed

    def local_batch_indices(self) -> Any:
        """Returns the rows of the global batch that devices of this process read, for loaders that read only these.

        Returns:
          A pytree like the batch, of the last planned call; for each array the positions in its leading dim, ascending.
          An array that this process reads nothing of, as that of another process's stage, has none.

        Raises:
          OptionError: the step is not planned yet, or has no batch.

        Example:
          mine = step.local_batch_indices()["x"]
          batch = step.place({"x": read_rows(mine), "y": read_labels(mine)})
        """
        known = self._calls.recent_calls()
        if not known or not known[0].batch():
            name = self.__name__
            raise OptionError(
                f"{name}.local_batch_indices: it has no plan with a batch yet; call {name}.plan(...) or init before"
            )
        return state_io.rows_of(known[0])

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
            known = self._calls.recent_calls()
            if not known:
                return batch
            several = len(known[0].batch()) > 1
            return self.place(*batch) if several else self.place(batch)

        return Prefetch(batches, place, size)

    def shardings(self, *args: Any, **kwargs: Any) -> state_io.Shardings:
        """The shardings of arguments and results: pytrees with a `NamedSharding` for each array. Nothing is executed.

        For restores, data loaders, and `jax.jit`, whose `in_shardings` and `out_shardings` they can be.

        Args:
          args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
        """
        return state_io.shardings_of(self._call(args, kwargs))

    def init(self, init_fn: Callable[..., Any], *args: Any, rest: Any = None) -> Any:
        """Initialises the state `init_fn(*args)` in its planned shardings; no device or host holds it unsharded.

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
        known = self._calls.recent_calls()
        call = known[-1] if known else self._call(*state_io.complete_arguments(self._fun, birth.shapes, rest))
        state, arrays = state_io.init_sharded(birth, call, room=self.cluster.usable_memory / 4)
        self._calls.owned.add(arrays)
        return state

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """The planned step before it is compiled, as of a function under `jax.jit`: `step.lower(...).compile()`.

        Args:
          args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
        """
        call = self._call(args, kwargs)
        return Lowered(call.executable(), call.step.plan)

    def clear_cache(self) -> None:
        """Drops all plans and executables: the next call plans again. State keeps its places."""
        self._calls.clear()
        if not isinstance(self._options.method, Off):
            self._current = None

    def hlo(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Returns the optimised HLO text of each executable; for a pipeline, of the executables of every stage."""
        return self._call(args, kwargs).executable().hlo()

    def profile(self, path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Timeline:
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
        call = self._call(args, kwargs)
        executable = call.executable()
        if not isinstance(executable, PipelineExecutable):
            raise OptionError(
                "profile: the plan has one mesh and no pipeline; use jax.profiler.trace for its executable"
            )
        executed = executable.trace(*args, **kwargs)
        if path is not None:
            timeline.write(path, executed, call.step.plan.division.timeline)
        return executed

    def prepare_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Compiled, Executable]:
        """Returns the planned step and its executable, for tools such as `alpa_lite.check`."""
        call = self._call(args, kwargs)
        executable = call.executable()  # which may add to the plan
        return call.step, executable

    def __repr__(self) -> str:
        name, method = getattr(self._fun, "__name__", type(self._fun).__name__), self._options.method
        assert isinstance(method, Method)  # `Options` has looked names up
        count = self._calls.count()
        return f"<ParallelStep {name}: {method.describe()}, {count} signature{'s' * (count != 1)} planned>"

    @property
    def options(self) -> Options:
        """The options given to `parallelize`."""
        return self._options

    @property
    def cluster(self) -> Cluster:
        """The cluster that plans are made for."""
        return self._calls.cluster

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The first plan that was made, and those of later signatures, in the order in which they were made."""
        return self._calls.plans


def _as_written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the step is called where no executable can run: with tracers (`jax.eval_shape`), or with jit disabled."""
    return jax.config.jax_disable_jit or any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
