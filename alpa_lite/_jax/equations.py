"""Equations in another form: with fewer results, in the order of a token, expanded into simpler ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as _extend_core
from jax._src import callback as _callback
from jax._src.state import discharge as _discharge
from jax.sharding import AbstractMesh

from alpa_lite._jax.emission import under
from alpa_lite._jax.jaxprs import CALLBACKS


def without_references(jaxpr: Any) -> Any:
    """A closed jaxpr whose mutable references are values, threaded through its control flow. The pass is private."""
    return _discharge.discharge_state(jaxpr)


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


def with_results(params: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The parameters of a callback that returns only the results with these numbers."""
    avals = tuple(params["result_avals"][i] for i in kept)
    return {**params, "callback": _Selected(params["callback"], tuple(kept)), "result_avals": avals}


def in_order(primitive: Any, params: Mapping[str, Any], token: Any) -> tuple[Any, dict[str, Any]] | None:
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
    if eqn.primitive.name == "call_hi_primitive":
        return retrace(eqn, functools.partial(eqn.primitive.to_lojax, **eqn.params))
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return retrace(eqn, functools.partial(_one_condition, eqn.params))
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return retrace(eqn, functools.partial(_transposed_first, eqn.params))
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].effects:
        return retrace(eqn, functools.partial(_condition_in_body, eqn.params))
    if eqn.primitive.name == "custom_linear_solve":
        return retrace(eqn, functools.partial(_solved, eqn.params))
    return None


def retrace(eqn: Any, function: Callable[..., Any]) -> Any:
    """The jaxpr of a function of an equation's operands, under its source line."""

    def under_source(*xs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), under(eqn.source_info):
            return function(*xs)

    return jax.make_jaxpr(under_source)(*(spec_of(v.aval) for v in eqn.invars))


def spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an abstract value, to trace with."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def _solved(params: Mapping[str, Any], *operands: Any) -> Any:
    """Solves a linear system. Operands: the constants of four functions, of which one solves, and right-hand sides."""
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    first = lengths.matvec + lengths.vecmat
    rest = first + lengths.solve + lengths.transpose_solve
    return _extend_core.jaxpr_as_fun(jaxprs.solve)(*operands[first : first + lengths.solve], *operands[rest:])


def _transposed_first(params: Mapping[str, Any], x: Any) -> Any:
    """A reshape that takes the dims in another order, as two operations."""
    return jax.lax.reshape(jax.lax.transpose(x, params["dimensions"]), params["new_sizes"])


def _loop_parts(params: Mapping[str, Any], operands: Sequence[Any]) -> tuple[Any, Any, Sequence[Any]]:
    """The condition and the body of a loop as functions of the carried values, and the first carried values."""
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    condition, body = (_extend_core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    read, held = operands[:first], operands[first:last]
    return functools.partial(condition, *read), functools.partial(body, *held), operands[last:]


def _one_condition(params: Mapping[str, Any], *operands: Any) -> Any:
    """A loop with an array of conditions, its dims the first ones of all that is carried, as a loop with one."""
    conditions, body, carried = _loop_parts(params, operands)

    def step(state: Sequence[Any]) -> Sequence[Any]:
        (going,) = conditions(*state)

        def chosen(new: Any, old: Any) -> Any:
            return jax.lax.select(jax.lax.broadcast_in_dim(going, new.shape, range(going.ndim)), new, old)

        return tuple(map(chosen, body(*state), state))

    def going_on(state: Sequence[Any]) -> Any:
        (going,) = conditions(*state)
        return jax.lax.reduce_or(going, axes=tuple(range(going.ndim)))

    return jax.lax.while_loop(going_on, step, tuple(carried))


def _condition_in_body(params: Mapping[str, Any], *operands: Any) -> Any:
    """A loop that carries whether it goes on, which is evaluated before it and at the end of each iteration."""
    condition, body, carried = _loop_parts(params, operands)

    def step(state: Sequence[Any]) -> Sequence[Any]:
        new = body(*state[1:])
        return (*condition(*new), *new)

    return jax.lax.while_loop(lambda state: state[0], step, (*condition(*carried), *carried))[1:]
