"""Rules that users register for operations that are opaque to plans: functions, primitives, and FFI targets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from alpa_lite import _jax
from alpa_lite.errors import RuleError
from alpa_lite.ir import notation
from alpa_lite.ir.kernels import KERNEL, Kernel, Types, call, specs_of, types_of
from alpa_lite.ir.notation import Notation


@dataclass(frozen=True)
class _Flattened:
    """A user's function on flat arrays."""

    fun: Callable[..., Any]
    tree: Any
    static: tuple[tuple[str, Hashable], ...] = ()

    def result(self, *leaves: Any) -> Any:
        """Returns the result as the function returns it."""
        return self.fun(*jax.tree.unflatten(self.tree, leaves), **dict(self.static))

    def __call__(self, *leaves: Any) -> Sequence[Any]:
        return jax.tree.leaves(self.result(*leaves))


class RegisteredFunction:
    """A function that `register_rule` has marked. It is called like the function; each call is one operation."""

    def __init__(self, fun: Callable[..., Any], rule: Notation):
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._rule = rule
        self._name = getattr(fun, "__name__", type(fun).__name__)

    @property
    def rule(self) -> str:
        """The rule as it was given."""
        return self._rule.text

    def __repr__(self) -> str:
        return f"<{self._name}: {self._rule.text}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as one operation. Keyword arguments are no operands: they must be hashable."""
        for name, value in kwargs.items():
            if any(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(value)):
                raise RuleError(
                    f"{self._name}: the keyword argument {name!r} is an array; give arrays by position, so that "
                    f"the rule {self._rule.text!r} has a place for them"
                )
        leaves, tree = jax.tree.flatten(args)
        leaves = [jnp.asarray(x) for x in leaves]
        fun = _Flattened(self._fun, tree, tuple(sorted(kwargs.items())))
        types = types_of(leaves)
        out_tree = self._checked(fun, types)
        shapes = [shape for shape, _ in types]
        made = [tuple(x.shape) for x in jax.tree.leaves(out_tree)]
        rule = notation.expand_rule(self._rule, shapes, made, self._name)
        results = call(Kernel(fun, rule, self._name), leaves)
        return jax.tree.unflatten(jax.tree.structure(out_tree), results)

    def _checked(self, fun: _Flattened, types: Types) -> Any:
        """Returns the shapes of the result as the function returns it."""
        jaxpr, shapes = jax.make_jaxpr(fun.result, return_shape=True)(*specs_of(types))
        _, consts = _jax.open_jaxpr(jaxpr)
        held = next((x for x in consts if isinstance(x, Tracer)), None)
        if held is not None:
            raise RuleError(
                f"{self._name} uses an array of shape {held.shape} that is computed outside of it; make it an operand, "
                f"with a place in the rule {self._rule.text!r}"
            )
        return shapes


_PRIMITIVES: dict[Any, Notation] = {}
_TARGETS: dict[str, Notation] = {}


def register_rule(
    target: Any,
    rule: str,
    *,
    reduce: str | Mapping[str, str] = MappingProxyType({}),
    replicate: str | Sequence[str] = (),
) -> Any:
    """Registers a sharding rule of an operation: which of its dims belong together, for operations opaque to plans.

    Args:
      target: a function (one that calls a Pallas kernel, say), a JAX primitive, or the name of an FFI target.
      rule: the dims of every operand and every result, such as `"b s h d, b t h d, b t h d -> b s h d"`. A name in
        several places is one factor, and may be sharded if every result has it. `(h g)` is a dim of two factors, `_`
        one that is whole, `...` any number of leading dims.
      reduce: for a name that a result lacks, how the results of blocks make up that of the whole: "sum" (the result is
        a partial sum), "max" or "min"; one word for all, or name -> word. Without it, the name is whole.
      replicate: names that must be whole, such as `"s t"`.

    Returns:
      For a function, a function to call in its place: each call is one operation with this rule, and so are its
      derivatives. Positional arguments are pytrees of arrays, keyword arguments are static. For a primitive or a
      target, `target` itself, whose equations have the rule from now on; their parameters must not hold sizes.

    Raises:
      RuleError: the rule cannot be read, or names in `reduce` or `replicate` are not in it. Ranks and sizes are checked
        when the function is called.

    Example:
      >>> import jax.numpy as jnp
      >>> from alpa_lite import register_rule
      >>> scores = register_rule(lambda q, k: jnp.einsum("bsd,btd->bst", q, k), "b s d, b t d -> b s t", replicate="d")
      >>> scores(jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4))).shape
      (2, 3, 5)
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", getattr(target, "name", str(target)))
    found = notation.parse(rule, reduce, replicate, who=name)
    if isinstance(target, str):
        _TARGETS[target] = found
    elif isinstance(target, jex.Primitive):
        _PRIMITIVES[target] = found
    elif callable(target):
        return RegisteredFunction(target, found)
    else:
        raise RuleError(f"register_rule: {target!r} is not a function, a primitive or the name of an FFI target")
    return target


def find_registered_rule(primitive: Any, params: Mapping[str, Any]) -> Notation | None:
    """Returns the rule of an equation, if it is a kernel or was registered; `...` may be in it."""
    if primitive is KERNEL:
        return params["kernel"].notation
    if primitive.name == "ffi_call":
        return _TARGETS.get(params["target_name"])
    return _PRIMITIVES.get(primitive)


def label(primitive: Any, params: Mapping[str, Any]) -> str:
    """Returns the name of an equation in messages and plans."""
    if primitive is KERNEL:
        return params["kernel"].name
    return params["target_name"] if primitive.name == "ffi_call" else primitive.name
