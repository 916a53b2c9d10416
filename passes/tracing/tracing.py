"""From a Python training step to a `Traced` program. Nothing is executed.

JAX traces the step once, on the shapes and dtypes of its arguments; `conversion` turns the jaxpr into a `Graph`;
`state` says which leaves are state, `batches` which are the batch. NNX objects among the arguments are split into
arrays and rebuilt inside (`pytrees`).
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AxisType

from alpa_lite import _jax
from alpa_lite.errors import OptionError, SignatureError, TracingError
from alpa_lite.ir.calling import Calling
from alpa_lite.ir.graph import Argument, Graph, Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing import attention, calls, conversion, equations, pytrees
from alpa_lite.passes.tracing.arguments import Argnums, Flat, LeafKind, Tree, find_named_leaves, is_batch_like
from alpa_lite.passes.tracing.batches import Batch, find_batch
from alpa_lite.passes.tracing.constraints import constrain_results, constrain_scopes
from alpa_lite.passes.tracing.evidence import Evidence
from alpa_lite.passes.tracing.placements import spread
from alpa_lite.passes.tracing.state import Matcher, match_state


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
    inputs, evidence = run.inputs, Evidence(graph)
    batch_leaves = find_named_leaves(calling, inputs, "batch", batch_argnums, batch_argnames)
    state_leaves = find_named_leaves(calling, inputs, "state", state_argnums, state_argnames)
    matched = match_state(inputs, run.outputs, evidence, batch=batch_leaves, known=frozenset(known), named=state_leaves)
    state = frozenset(matched.pairs.values())
    if batch_leaves is None and state:
        _refuse_all_state(inputs, state)
    handed = {n: evidence.returned_argument(n) for n in range(len(graph.block.outputs)) if n not in matched.pairs}
    through = {n: i for n, i in handed.items() if i is not None and i < len(inputs.paths) and i not in state}
    batch = _batch_of(run, evidence, matched, batch_leaves, known, frozenset(through.values()))
    return _assembled(run, graph, matched, batch, through, out_shardings, has_named_batch=batch_leaves is not None)


def _batch_of(
    run: _Run, evidence: Evidence, matched: Matcher, named: frozenset[int] | None, known: Collection[int],
    returned: frozenset[int],
) -> Batch:  # fmt: skip
    """Returns the batch of a traced step; `returned` are the arguments that are results as they came."""
    inputs, state = run.inputs, frozenset(matched.pairs.values())
    weights = frozenset(known).union(matched.differentiated, (i for i, own in enumerate(inputs.modules) if own))
    results = {shape[0] for n, (shape, _) in enumerate(run.outputs.types) if shape and not evidence.is_learnt(n)}
    return find_batch(inputs, named, state, weights, returned, evidence.weights, results)


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


def _assembled(
    run: _Run, graph: Graph, matched: Matcher, batch: Batch, through: Mapping[int, int], out_shardings: Any, *,
    has_named_batch: bool,
) -> Traced:  # fmt: skip
    """Returns the traced step from its parts."""
    placed = run.spread("out_shardings", out_shardings)
    inputs, outputs, pairs = run.inputs, run.outputs, matched.pairs
    state, stays = frozenset(pairs.values()), {**pairs, **through}
    graph = constrain_results(graph, {n: one for n, one in enumerate(placed) if n not in stays}, outputs.paths)
    left = [n for n in range(len(outputs.paths)) if n not in through]
    block = replace(graph.block, outputs=tuple(graph.block.outputs[n] for n in left))
    return Traced(
        graph=replace(graph, block=block),
        arguments=tuple(
            Argument(path, "state" if i in state else batch.role(inputs, i), weak)
            for i, (path, weak) in enumerate(zip(inputs.paths, run.weak_inputs, strict=True))
        ),
        outputs=tuple(
            Argument(outputs.paths[n], "state" if n in pairs else "other", run.weak_outputs[n]) for n in left
        ),
        state=tuple((i, pairs[n]) for i, n in enumerate(left) if n in pairs),
        in_tree=run.in_tree,
        out_tree=run.out_tree,
        notes=(batch.note, *matched.notes),
        calling=run.calling,
        name=getattr(run.fun, "__name__", "step"),
        has_named_batch=has_named_batch,
        returned_arguments=tuple(through.items()),
        placements=tuple((argument, placed[n]) for n, argument in stays.items() if placed[n] is not None),
    )


class _Run:
    """One tracing: the step as a function of flat leaves, and its pytrees, which are known afterwards."""

    def __init__(
        self, fun: Callable[..., Any], calling: Calling, arguments: Any, shapes: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.fun, self.calling, self._arguments, self._shapes = fun, calling, arguments, shapes
        self.in_tree: Any = None
        self.out_tree: Any = None
        self.inputs: Flat
        self.outputs: Flat
        self.result: Any = None
        self.weak_inputs: list[bool] = []
        self.weak_outputs: list[bool] = []

    def jaxpr(self) -> Any:
        """Returns the closed jaxpr of the step."""
        if not self.calling.modules:
            return self._jaxpr_of(self._arguments)
        with pytrees.nnx_update_context(self):
            return self._jaxpr_of(pytrees.split_arguments(self._arguments, self))

    def _jaxpr_of(self, pure: Any) -> Any:
        leaves, self.in_tree = jax.tree_util.tree_flatten(pure)
        found = pytrees.leaf_paths(self._arguments)
        paths = [calls.path_of(self.calling, path.keys, path.inner) for path in found]
        specs = [_spec(leaf, paths[i], self._shapes.get(i)) for i, leaf in enumerate(leaves)]
        whole = [tree for group in self.in_tree.children() for tree in group.children()]
        starts = itertools.accumulate((tree.num_leaves for tree in whole), initial=0)
        trees = tuple(map(Tree, whole, starts, self.calling.roots()))
        self.inputs = _flat(trees, found, 2, paths, [(tuple(spec.shape), spec.dtype) for spec in specs])
        try:
            traced = jax.jit(self._on_leaves).trace(*specs)
        except tuple(_CONCRETE) as error:
            raise TracingError(_concrete_message(error)) from error
        except NameError as error:
            if (axis := _jax.unbound_axis(error)) is None:
                raise
            raise TracingError(
                f"the step uses the axis {axis!r} at {_user_line(error)}, which jax.pmap, jax.vmap or jax.shard_map "
                "around it would define. Leave pmean, psum and all_gather of it out: the step sees the whole batch, so "
                "that a mean over examples is one over all devices"
            ) from error
        avals = traced.jaxpr.in_avals, traced.jaxpr.out_avals
        self.weak_inputs, self.weak_outputs = ([_jax.spec_of(aval).weak_type for aval in some] for some in avals)
        types = tuple((tuple(aval.shape), aval.dtype) for aval in traced.jaxpr.out_avals)
        self.outputs = replace(self.outputs, types=types)
        return equations.without_references(self.fun, traced.jaxpr)

    def _on_leaves(self, *leaves: Any) -> list[Any]:
        """Returns the step on flat leaves. With NNX objects its result is (their arrays after the call, result)."""
        args, modules = jax.tree_util.tree_unflatten(self.in_tree, leaves), self.calling.modules
        if modules:
            args = pytrees.merge_arguments(args, self)
        out = self.calling.call(self.fun, *args)
        self.result = out = pytrees.hide(out, pytrees.has_static_numbers(self.fun))
        paths = pytrees.leaf_paths((args if modules else (), out))
        found = [path for path in paths if path.module or path.keys[0].idx == 1]  # plain arguments do not come back
        pure = pytrees.split_results(args, out, self) if modules else out
        results, self.out_tree = jax.tree_util.tree_flatten(pure)
        assert len(found) == len(results), (len(found), len(results))
        own = jax.tree_util.treedef_children(self.out_tree)[1] if modules else self.out_tree
        texts = [
            f"result{jax.tree_util.keystr(path.keys[1:])}{path.inner}"
            if path.keys[0].idx == 1
            else calls.path_of(self.calling, path.keys[1:], path.inner)
            for path in found
        ]
        self.outputs = _flat((Tree(own, len(results) - own.num_leaves),), found, 1, texts)
        return results

    def spread(self, option: str, prefix: Any) -> list[Any]:
        """Returns for each flat result the value that a pytree prefix of the result gives it; None without one."""
        found = [] if prefix is None else spread(option, prefix, self.result)
        return [None] * (len(self.outputs.paths) - len(found)) + found


def _flat(
    trees: tuple[Tree, ...], found: Sequence[pytrees.LeafPath], depth: int, paths: Sequence[str],
    types: Sequence[LeafKind] = (),
) -> Flat:  # fmt: skip
    """Returns the leaves of some trees; `depth` is the number of JAX's keys that lead to a tree."""
    keys = tuple(tuple(map(calls.key_text, path.keys[depth:])) for path in found)
    return Flat(trees, tuple(paths), tuple(types), tuple(path.module for path in found), keys)


def _spec(leaf: Any, path: str, shape: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
    """Shape (or a given one), dtype and weak type of a leaf; its placement does not matter to the program."""
    if isinstance(leaf, jax.Ref):
        raise SignatureError(f"{format_path(path)} is a mutable reference (jax.Ref); {equations.REFERENCE_REMEDY}")
    try:
        own, dtype, weak = calls.leaf_type(leaf)
    except TypeError as error:
        raise SignatureError(
            f"{format_path(path)} is an array of {leaf.dtype}, which JAX does not compute with; convert it, or leave "
            "it out of the arguments"
        ) from error
    return jax.ShapeDtypeStruct(own if shape is None else shape, dtype, weak_type=weak)


def _refuse_all_state(inputs: Flat, state: frozenset[int]) -> None:
    """Several arguments that all come back leave no batch: more likely one of them is the batch."""
    arrays = [tree for tree in inputs.trees if any(is_batch_like(inputs.types[i]) for i in tree.leaves)]
    plain = [tree for tree in arrays if not all(inputs.modules[i] for i in tree.leaves)]
    if plain and len(arrays) > 1 and all(state.issuperset(tree.leaves) for tree in plain):
        names = ", ".join(tree.key for tree in arrays)
        raise SignatureError(
            f"every argument ({names}) comes back with the same structure, shapes and dtypes, so none can be "
            "recognised as the batch. Name the batch with batch_argnums=(i,), or give batch_argnums=() if there is none"
        )


_CONCRETE = {
    jax.errors.TracerBoolConversionError: "the truth value of a traced array (in `if`, `while`, `and`, `or`, `not`)",
    jax.errors.TracerArrayConversionError: "a traced array as a NumPy array",
    jax.errors.TracerIntegerConversionError: "a traced array as a Python integer (an index, a shape or a range)",
    jax.errors.NonConcreteBooleanIndexError: "a traced boolean mask as an index, whose result has no fixed shape",
    jax.errors.ConcretizationTypeError: "the value of a traced array",
}
"""The errors of steps that read values in Python, each with a description of the read."""
_NOT_THE_USER = tuple(
    os.path.dirname(os.path.realpath(path)) + os.sep for path in (jax.__file__, __file__, os.__file__) if path
)


def _concrete_message(error: BaseException) -> str:
    used = next(text for kind, text in _CONCRETE.items() if isinstance(error, kind))
    return (
        f"the step uses {used} at {_user_line(error)}, but values are known only when it runs. "
        "Use jnp.where or jax.lax.cond for branches, jax.lax.while_loop or jax.lax.fori_loop for loops, and "
        "static_argnums for arguments that are no arrays"
    )


def _user_line(error: BaseException) -> str:
    """Returns the innermost line that is neither JAX's, nor Flax's, nor ours, nor the standard library's."""
    found = "an unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        path = os.path.realpath(code.co_filename)
        library = path.startswith(_NOT_THE_USER) and "site-packages" not in path
        packaged = any(f"site-packages{os.sep}{name}{os.sep}" in path for name in ("jax", "jaxlib", "flax", "optax"))
        if not library and not packaged and not code.co_filename.startswith("<"):
            found = f"{code.co_filename}:{line} (in {code.co_name})"
    return found
