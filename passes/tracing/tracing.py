"""From a Python training step to a `Traced` program. Nothing is executed.

JAX traces the step once, on the shapes and dtypes of its arguments; `conversion` turns the jaxpr into a `Graph`;
`roles` says which leaves are state, and which are the batch. NNX objects among the arguments are split into arrays and
rebuilt inside (`pytrees`).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType

from alpa_lite import _jax
from alpa_lite.errors import OptionError, SignatureError, TracingError
from alpa_lite.ir.calling import CallingForm
from alpa_lite.ir.graph import Argument, Graph, Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing import attention, calls, conversion, equations, pytrees
from alpa_lite.passes.tracing.constraints import constrain_results, constrain_scopes
from alpa_lite.passes.tracing.evidence import Evidence
from alpa_lite.passes.tracing.leaves import Argnums, Leaf, Part, find_named_leaves
from alpa_lite.passes.tracing.placements import spread
from alpa_lite.passes.tracing.roles import Roles


def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    batch_argnums: Argnums = "auto",
    batch_argnames: str | Sequence[str] = (),
    state_argnums: Argnums = "auto",
    state_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    known: Collection[int] = (),
    shapes: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    platform: str = "",
    constrain: Mapping[str, Any] = MappingProxyType({}),
    out_shardings: Any = None,
    annotations: bool = True,
) -> Traced:
    """Traces `fun(*args, **kwargs)`.

    Args:
      fun: the training step, written for one device.
      args, kwargs: its arguments: pytrees of arrays, NumPy arrays, Python scalars or `jax.ShapeDtypeStruct`s, and NNX
      objects.
      batch_argnums, batch_argnames: the arguments that are the batch; `batch_argnums=()` for none; "auto" finds it.
      state_argnums, state_argnames: the arguments that are state; `state_argnums=()` for none; "auto" finds them.
      static_argnums, static_argnames: as in `jax.jit`.
      known: the flat arguments that are state of another step: never the batch.
      shapes: for the flat arguments with these numbers, in place of their own.
      platform: that the step is planned for.
      constrain: glob on scopes -> `PartitionSpec` of their outputs (`constraints`).
      out_shardings: as in `jax.jit`.
      annotations: whether constraints that the step itself writes are applied.

    Returns:
      The traced step. `in_tree` is the structure of the traced (args, kwargs), with NNX objects split; `out_tree` that
      of the result, or, with NNX objects, of ((args, kwargs) after the call, result).

    Raises:
      SignatureError: a named argument is not there or does not come back, every argument comes back, or an argument is
        no array.
      OptionError: `constrain` names no scope.
      TracingError: the step uses the value of a traced array in Python, or an axis that is not defined in it.
    """
    calling = calls.describe_calling(fun, args, kwargs, static_argnums, static_argnames)
    run = _Run(fun, calling, calling.drop_static(args, kwargs), shapes)
    with attention.as_one_operation(platform):
        jaxpr = run.jaxpr()
    graph = constrain_scopes(conversion.graph_of(jaxpr, platform=platform, annotations=annotations), constrain)
    batch = find_named_leaves(calling, run.inputs, "batch", batch_argnums, batch_argnames)
    state = find_named_leaves(calling, run.inputs, "state", state_argnums, state_argnames)
    roles = Roles(run.inputs, run.outputs, Evidence(graph), state=state, batch=batch, known=frozenset(known))
    return replace(_assembled(run, graph, roles, out_shardings), has_named_batch=batch is not None)


def trace_under(context: Any, trace: Callable[..., Traced]) -> Callable[..., Traced]:
    """Returns the same tracing under the mesh of a context, its axes `Auto`, so that specs in the step find their axes.

    Args:
      context: the mesh of the context; None without one.
      trace: traces the step.
    """
    explicit = context is not None and AxisType.Auto not in context.axis_types

    def traced(**shapes: Any) -> Traced:
        try:
            with _jax.trace_under_mesh(context):
                return trace(**shapes)
        except (ValueError, TypeError) as error:
            if not explicit or not any(word in str(error) for word in ("Auto", "Explicit", "explicit")):
                raise
            raise OptionError(
                f"the step is written for the explicit axes of {context}, which are planned as AxisType.Auto: {error} "
                "Use jax.lax.with_sharding_constraint in place of jax.sharding.reshard and out_sharding=, and "
                "jax.make_mesh(..., axis_types=(AxisType.Auto, ...))"
            ) from error

    return traced


def _assembled(run: _Run, graph: Graph, roles: Roles, out_shardings: Any) -> Traced:
    """Returns the traced step from its parts, without the results that are arguments as they came."""
    leaves, stays, placed = run.outputs.leaves, {**roles.state, **roles.returned}, run.spread(out_shardings)
    paths, left = [leaf.path for leaf in leaves.values()], [n for n in leaves if n not in roles.returned]
    graph = constrain_results(graph, {n: one for n, one in enumerate(placed) if n not in stays}, paths)
    block = replace(graph.block, outputs=tuple(graph.block.outputs[n] for n in left))
    arguments = zip(run.inputs.leaves.values(), roles.arguments, strict=True)
    return Traced(
        graph=replace(graph, block=block),
        arguments=tuple(Argument(leaf.path, role, leaf.weak) for leaf, role in arguments),
        outputs=tuple(Argument(paths[n], "state" if n in roles.state else "other", leaves[n].weak) for n in left),
        state=tuple((i, roles.state[n]) for i, n in enumerate(left) if n in roles.state),
        in_tree=run.in_tree,
        out_tree=run.out_tree,
        notes=tuple(roles.notes),
        calling=run.calling,
        name=getattr(run.fun, "__name__", "step"),
        returned_arguments=tuple(roles.returned.items()),
        placements=tuple((argument, placed[n]) for n, argument in stays.items() if placed[n] is not None),
    )


@dataclass(eq=False)
class _Run:
    """One tracing: the step as a function of flat leaves, and its pytrees, which are known afterwards."""

    fun: Callable[..., Any]
    calling: CallingForm
    _arguments: Any
    _shapes: Mapping[int, tuple[int, ...]]
    inputs: Part = field(init=False)
    outputs: Part = field(init=False)
    in_tree: Any = None
    out_tree: Any = None
    _result: Any = None
    _rows: Sequence[tuple[str, tuple[str, ...], bool]] = ()  # path, keys and `in_object` of each result

    def jaxpr(self) -> Any:
        """Returns the closed jaxpr of the step."""
        calling, pure = self.calling, self._arguments
        with pytrees.nnx_update_context(self) if calling.modules else contextlib.nullcontext():
            if calling.modules:
                pure = pytrees.split(pure, self)
            leaves, self.in_tree = jax.tree_util.tree_flatten(pure)
            paths = pytrees.leaf_paths(self._arguments)
            rows = [self._input(n, *pair) for n, pair in enumerate(zip(paths, leaves, strict=True))]
            self.inputs = Part((), dict(enumerate(rows)))
            try:
                jaxpr = jax.jit(self._on_leaves).trace(*map(Leaf.to_spec, rows)).jaxpr
            except tuple(_CONCRETE) as error:
                raise TracingError(_concrete_message(error)) from error
            except NameError as error:
                if (axis := _jax.unbound_axis(error)) is None:
                    raise
                raise TracingError(
                    f"the step uses the axis {axis!r} at {_user_line(error)}, which jax.pmap, jax.vmap or "
                    "jax.shard_map around it would define. Leave pmean, psum and all_gather of it out: the step sees "
                    "the whole batch, so that a mean over examples is one over all devices"
                ) from error
        results = zip(self._rows, map(_jax.spec_of, jaxpr.out_avals), strict=True)
        rows = [Leaf(path, keys, spec.shape, spec.dtype, spec.weak_type, own) for (path, keys, own), spec in results]
        self.outputs = Part((), dict(enumerate(rows)))
        return equations.without_references(self.fun, jaxpr)

    def _input(self, number: int, path: pytrees.LeafPath, leaf: Any) -> Leaf:
        """Returns the row of an argument, whose placement does not matter to the program."""
        text = calls.path_of(self.calling, path.keys, path.inner)
        if isinstance(leaf, jax.Ref):
            raise SignatureError(f"{format_path(text)} is a mutable reference (jax.Ref); {equations.REFERENCE_REMEDY}")
        try:
            shape, dtype, weak = calls.leaf_type(leaf)
        except TypeError as error:
            raise SignatureError(
                f"{format_path(text)} is an array of {leaf.dtype}, which JAX does not compute with; convert it, or "
                "leave it out of the arguments"
            ) from error
        keys = calls.path_of(self.calling, path.keys[:2]), *map(calls.key_text, path.keys[2:])
        return Leaf(text, keys, self._shapes.get(number, shape), dtype, weak, path.module)

    def _on_leaves(self, *leaves: Any) -> list[Any]:
        """Returns the step on flat leaves. With NNX objects its result is (their arrays after the call, result)."""
        args, has_objects = jax.tree_util.tree_unflatten(self.in_tree, leaves), self.calling.modules
        if has_objects:
            args = pytrees.merge(args, self, is_inner=True)
        out = self.calling.call(self.fun, *args)
        self._result = out = pytrees.hide(out, pytrees.has_static_numbers(self.fun))
        self._rows = rows = list[tuple[str, tuple[str, ...], bool]]()
        for path in pytrees.leaf_paths((args if has_objects else (), out)):
            side, *keys = path.keys
            if side.idx == 1:
                text = f"result{jax.tree_util.keystr(tuple(keys))}{path.inner}"
                rows.append((text, ("result", *map(calls.key_text, keys)), path.module))
            elif path.module:  # plain arguments do not come back
                rows.append((calls.path_of(self.calling, keys, path.inner), (), True))
        pure = pytrees.split_results(args, out, self) if has_objects else out
        results, self.out_tree = jax.tree_util.tree_flatten(pure)
        return results

    def spread(self, out_shardings: Any) -> list[Any]:
        """Returns for each flat result the sharding that the option gives it; None without one."""
        found = [] if out_shardings is None else spread("out_shardings", out_shardings, self._result)
        return [None] * (len(self.outputs.leaves) - len(found)) + found


_CONCRETE = {
    jax.errors.TracerBoolConversionError: "the truth value of a traced array (in `if`, `while`, `and`, `or`, `not`)",
    jax.errors.TracerArrayConversionError: "a traced array as a NumPy array",
    jax.errors.TracerIntegerConversionError: "a traced array as a Python integer (an index, a shape or a range)",
    jax.errors.NonConcreteBooleanIndexError: "a traced boolean mask as an index, whose result has no fixed shape",
    jax.errors.ConcretizationTypeError: "the value of a traced array",
}
"""The errors of steps that read values in Python, each with a description of the read."""


def _concrete_message(error: BaseException) -> str:
    used = next(text for kind, text in _CONCRETE.items() if isinstance(error, kind))
    return (
        f"the step uses {used} at {_user_line(error)}, but values are known only when it runs. "
        "Use jnp.where or jax.lax.cond for branches, jax.lax.while_loop or jax.lax.fori_loop for loops, and "
        "static_argnums for arguments that are no arrays"
    )


def _user_line(error: BaseException) -> str:
    """Returns the innermost line that is neither JAX's, nor Flax's, nor ours, nor the standard library's."""
    frames = traceback.walk_tb(error.__traceback__)
    found = [(frame.f_code, line) for frame, line in frames if _jax.is_user_file(frame.f_code.co_filename)]
    return f"{found[-1][0].co_filename}:{found[-1][1]} (in {found[-1][0].co_name})" if found else "an unknown line"
