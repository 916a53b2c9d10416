"""Equations: in other forms (fewer results, the order of a token, simpler ones), and emitted, on blocks and in MLIR."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as _extend_core
import jax.numpy as jnp
from jax._src import callback as _callback
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import source_info_util as _source_info_util
from jax._src.compute_on import extend_compute_type as _extend_compute_type
from jax._src.interpreters import mlir as _mlir_tables
from jax._src.lax import lax as _lax
from jax._src.state import discharge as _discharge
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh

from alpa_lite._jax.jaxprs import CALLBACKS, source_line


def discharge_references(jaxpr: Any) -> Any:
    """Returns a closed jaxpr whose mutable references (`jax.new_ref`) are values, threaded through its control flow.

    The effect of creating one, and the pass, are private.
    """
    return _discharge.discharge_state(jaxpr) if _core.internal_mutable_array_effect in jaxpr.effects else jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class _Wrapped:
    """A callback around another one."""

    call: Callable[..., Any]

    @property
    def callback_func(self) -> Any:
        """The user's function, as JAX's own callbacks have it."""
        return getattr(self.call, "callback_func", None)


class _InOrder(_Wrapped):
    """A callback that takes the token of the callback before it, and returns that of its own."""

    def __call__(self, token: Any, *operands: Any) -> list[Any]:
        return [token, *self.call(*operands)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Selected(_Wrapped):
    """A callback that returns some of its results."""

    kept: tuple[int, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        results = jax.tree.leaves(self.call(*operands))
        return [results[i] for i in self.kept]


def keep_callback_results(params: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters of a callback that returns only the results with these numbers."""
    avals = tuple(params["result_avals"][i] for i in kept)
    return {**params, "callback": _Selected(params["callback"], tuple(kept)), "result_avals": avals}


def order_callback(primitive: Any, params: Mapping[str, Any], token: Any) -> tuple[Any, dict[str, Any]] | None:
    """The primitive and parameters of an ordered callback whose order is that of a value, which JAX need not keep.

    JAX orders effects on one device only. A value that each callback takes from the one before orders them on several
    devices and across programs.

    Args:
      primitive, params: of an equation.
      token: the abstract value that is one more operand and one more result, both first.

    Returns:
      None if the equation is not a callback.
    """
    if primitive.name == "debug_print":
        call = functools.partial(primitive.impl, **params)
    elif primitive.name in CALLBACKS:
        call = params["callback"]
    else:
        return None
    avals = token, *params.get("result_avals", ())
    return _callback.io_callback_p, {
        "callback": _InOrder(call),
        "result_avals": avals,
        "sharding": params.get("sharding"),
        "ordered": False,
    }


def expansion(eqn: Any) -> Any:
    """The jaxpr of simpler operations that an equation stands for, or None. JAX makes these when it lowers a program.

    From 0.12 some functions of JAX (`jnp.searchsorted`) are one equation of a primitive that says itself what it
    expands to. A loop that was vectorised with a condition for each element has an array of conditions: it runs until
    all are false, and leaves the elements alone whose condition is false. A loop whose condition has effects evaluates
    it in its body: XLA's CPU compiler skips conditions of loops whose number of iterations it knows. A linear solve
    that has been differentiated is what its user gave to solve with. A reshape that takes dims in another order
    transposes first, as gradients of convolutions in groups do.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "call_hi_primitive":
            return retrace(eqn, functools.partial(eqn.primitive.to_lojax, **params))
        case "while" if params["cond_jaxpr"].out_avals[0].shape or params["cond_jaxpr"].effects:
            return retrace(eqn, functools.partial(_condition_in_body, params))
        case "reshape" if (order := params["dimensions"]) is not None:
            return retrace(eqn, lambda x: jax.lax.reshape(jax.lax.transpose(x, order), params["new_sizes"]))
        case "custom_linear_solve":  # operands: the constants of four functions, of which one solves; right-hand sides
            lengths = params["const_lengths"]
            first = lengths.matvec + lengths.vecmat
            last, rest = first + lengths.solve, first + lengths.solve + lengths.transpose_solve
            solve = _extend_core.jaxpr_as_fun(params["jaxprs"].solve)
            return retrace(eqn, lambda *operands: solve(*operands[first:last], *operands[rest:]))
    return None


def retrace(eqn: Any, function: Callable[..., Any]) -> Any:
    """Returns the jaxpr of a function of an equation's operands, under its source line."""

    def under_source(*xs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), equation_scope(eqn.source_info):
            return function(*xs)

    return jax.make_jaxpr(under_source)(*(spec_of(v.aval) for v in eqn.invars))


def spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an abstract value, to trace with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _condition_in_body(params: Mapping[str, Any], *operands: Any) -> Any:
    """Returns a loop that carries whether it goes on, which is evaluated before it and at the end of each iteration.

    An array of conditions has the first dims of all that is carried.
    """
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    condition, body = (_extend_core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    condition, body = functools.partial(condition, *operands[:first]), functools.partial(body, *operands[first:last])

    def step(state: Sequence[Any]) -> Sequence[Any]:
        (going, *old), new = state, body(*state[1:])
        if going.ndim:
            masks = [jax.lax.broadcast_in_dim(going, one.shape, range(going.ndim)) for one in old]
            new = list(map(jax.lax.select, masks, new, old))
        return (*condition(*new), *new)

    def going_on(state: Sequence[Any]) -> Any:
        going, *_ = state
        return jax.lax.reduce_or(going, axes=tuple(range(going.ndim))) if going.ndim else going

    return jax.lax.while_loop(going_on, step, (*condition(*operands[last:]), *operands[last:]))[1:]


def emit(primitive: Any, params: Mapping[str, Any], source: Any, ctx: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds a primitive under its recorded name stack, source line and context; `bind` alone loses them.

    Of the context, what the user chose by `compute_on`, `set_xla_metadata` and `threefry_partitionable` is restored;
    the mesh is not: an equation that was traced outside any mesh may now be emitted inside `shard_map`. The public
    `compute_on` is a context manager in 0.10 and a decorator in 0.12; the context that both set is private.
    """
    stack = _source_info_util.current_name_stack() + source.name_stack
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(_source_info_util.user_context(source.traceback, name_stack=stack))
        if ctx is not None:
            if ctx.xla_metadata:
                contexts.enter_context(set_xla_metadata(**ctx.xla_metadata))
            if ctx.compute_type:
                contexts.enter_context(_extend_compute_type(ctx.compute_type))
            if ctx.threefry_partitionable != jax.config.jax_threefry_partitionable:
                contexts.enter_context(jax.threefry_partitionable(ctx.threefry_partitionable))
        return bind(primitive, params, source, operands)


# A callback's parameters, its source and its operands -> other parameters and operands.
ReplaceCallback = Callable[[Mapping[str, Any], Any, Sequence[Any]], tuple[Mapping[str, Any], Sequence[Any]]]
_replace_callback: contextvars.ContextVar[ReplaceCallback | None] = contextvars.ContextVar("callback", default=None)
ReplacementPredicate = Callable[[Any, Mapping[str, Any], Sequence[Any]], bool]
"""Primitive, parameters and operands of an equation -> whether something else is to stand in for it."""
_held: contextvars.ContextVar[ReplacementPredicate | None] = contextvars.ContextVar("held", default=None)


@contextlib.contextmanager
def _holding(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def replacing_callbacks(replace: ReplaceCallback) -> contextlib.AbstractContextManager[None]:
    """Gives every callback that its body binds to `replace`, which may wrap the function and add operands.

    Callbacks may take any number of operands, and their primitives pass them all to the parameter `callback`.
    """
    return _holding(_replace_callback, replace)


def replace_by_stand_ins(is_held: ReplacementPredicate) -> contextlib.AbstractContextManager[None]:
    """Replaces equations in its body that `is_held` selects by opaque operations with the same operands and results.

    JAX lowers some operations only for devices that are present.
    """
    return _holding(_held, is_held)


def lowers_for(primitive: Any, platform: str) -> bool:
    """Returns whether JAX lowers a primitive for a platform whose devices are not there.

    Its tables of that are private.
    """
    if primitive in _dispatch.prim_requires_devices_during_lowering:
        return False
    if primitive in _mlir_tables._platform_specific_lowerings.get(platform, {}):
        return True
    return primitive in _mlir_tables._lowerings or not _mlir_knows(primitive)


def _mlir_knows(primitive: Any) -> bool:
    """Returns whether a primitive has a platform-specific lowering. JAX expands those without a lowering earlier."""
    return any(primitive in table for table in _mlir_tables._platform_specific_lowerings.values())


def _hold(primitive: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an opaque operation on the operands of an equation: arrays like the equation's results.

    A foreign function lowers for every platform, whether there is one of that name or not. It has no random keys.
    """
    given = primitive.get_bind_params(dict(params))
    made = jax.tree.leaves(jax.eval_shape(lambda *xs: primitive.bind(*xs, **given), *operands))
    read = [jax.random.key_data(x) if _is_key(x) else x for x in operands]
    plain = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made if not _is_key(x)]
    found = iter(jax.ffi.ffi_call("alpa_lite_stand_in", plain, has_side_effect=True)(*read))
    keys = {x.dtype: jax.random.key(0, impl=jax.random.key_impl(x)) for x in made if _is_key(x)}
    return [jnp.broadcast_to(keys[x.dtype], x.shape) if _is_key(x) else next(found) for x in made]


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def bind(primitive: Any, params: Mapping[str, Any], source: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds a primitive by the parameters of its equation; always a list of results. `source` is for callbacks."""
    is_held = _held.get()
    if is_held is not None and is_held(primitive, params, operands):
        return _hold(primitive, params, operands)
    replace = _replace_callback.get()
    if replace is not None and primitive.name in CALLBACKS:
        params, operands = replace(params, source, operands)
    if primitive.name == "shard_map":  # of a step with callbacks, JAX refuses concrete meshes of several names
        params = {**params, "mesh": params["mesh"].abstract_mesh}
    if primitive.name == "fft":
        return [_in_rows(primitive.bind(*map(_in_rows, operands), **params))]
    results = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return list(results) if primitive.multiple_results else [results]


def _in_rows(x: Any) -> Any:
    """Returns the same array, on CPUs in row-major order.

    XLA's CPU compiler lets a collective's order of dims reach a Fourier transform, and refuses to run it then. Measured
    in 0.10.2 and 0.12: a transform, sliced and gathered along another dim than the first, in plain `shard_map`.
    """
    rows = Layout(tuple(range(x.ndim)))
    return jax.lax.platform_dependent(x, cpu=lambda x: with_layout_constraint(x, rows), default=lambda x: x)


@contextlib.contextmanager
def equation_scope(source: Any) -> Iterator[None]:
    """Runs its body under an equation's name stack and source line."""
    stack = _source_info_util.current_name_stack() + source.name_stack
    with _source_info_util.user_context(source.traceback, name_stack=stack):
        yield


def describe_location(source: Any) -> str:
    """Where an equation comes from: the user's source line, then the name stack, its unnamed derivatives in words."""
    stack = str(source.name_stack).replace("transpose(jvp())", "backward").replace("jvp()", "forward")
    line = source_line(source)
    return f"{line} {stack}".strip() if stack else line


def drop_weak_type(block: Any) -> Any:
    """`block` without a weak type, which carries and branch results must agree in. Random keys have none."""
    dtype = getattr(block, "dtype", None)
    if dtype is None:
        return jnp.asarray(block)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return block
    return jax.lax.convert_element_type(block, dtype)


def set_weak_type(block: Any, weak: bool) -> Any:
    """`block` with or without a weak type. JAX has a public way to drop one alone."""
    if bool(getattr(jax.typeof(block), "weak_type", False)) == weak:
        return block
    return _lax._convert_element_type(block, weak_type=True) if weak else drop_weak_type(block)


def constant_of(op: Any) -> Any:
    """Returns the value of a constant operation of MLIR: its attribute, or for complex numbers the text of it.

    The bindings of jaxlib (0.10 to 0.12) have no class for dense complex attributes, and raise where one is read.
    """
    try:
        return op.attributes["value"]
    except TypeError:
        return op.get_asm(large_elements_limit=4).partition("dense<")[2]


def attributes_of(op: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the names and attributes of an operation; equal if and only if the attributes are.

    The context keeps attributes unique, so that comparing them is comparing pointers. For those that the bindings
    cannot read (see `constant_of`) the operation's whole text stands, without the name of its result.
    """
    try:
        return tuple((name, op.attributes[name]) for name in op.attributes)
    except TypeError:
        return (("text", op.get_asm().partition("=")[2]),)


def materialise(x: jax.Array) -> jax.Array:
    """Returns the array behind an `optimization_barrier`, which every reader sees with the same bits.

    Before 0.12 the CPU compiler drops barriers before it fuses, and duplicates what was behind them. It does not see
    through a condition that comes out of a barrier.
    """
    if jax.__version_info__ >= (0, 12):
        return jax.lax.optimization_barrier(x)
    return jax.lax.platform_dependent(x, cpu=_behind_condition, default=jax.lax.optimization_barrier)


def _behind_condition(x: jax.Array) -> jax.Array:
    return jax.lax.cond(jax.lax.optimization_barrier(jnp.bool_(True)), lambda y: y, lambda y: -y, x)
