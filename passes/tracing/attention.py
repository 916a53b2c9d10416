"""`jax.nn.dot_product_attention` as one operation.

Written in ordinary operations, attention is two products, masks and a softmax, and a plan may shard each of them in its
own way. Nobody would run it so: its examples and its heads are independent, everything else belongs together. While a
step is traced, the function that these operations come from is a kernel (`alpa_lite.ir.kernels`) with the rule

    query [b, t, (k g), d], key and value [b, s, k, d], bias and mask [b, (k g), t, s]  ->  [b, t, (k g), d]

where k are heads of keys and g the query heads that share one. Lengths of sequences are [b]. The length t of the
queries may be sharded, too, unless the result depends on where a query stands: causal masks, windows, query lengths.

With `implementation="cudnn"` the traced step holds primitives of JAX for cuDNN, which have a table of their own
(`factors.tables`); JAX makes them where cuDNN is installed only, so its version is taken as given if the plan is for
GPUs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import RuleError
from alpa_lite.ir import kernels, notation
from alpa_lite.ir.kernels import Kernel
from alpa_lite.ir.notation import Notation, Tensor
from alpa_lite.processes import effects

NAME = "dot_product_attention"
_QUERY: Tensor = (("b",), ("t",), ("k", "g"), ("d",))
_KEY: Tensor = (("b",), ("s",), ("k",), ("d",))
_SCORES: Tensor = (("b",), ("k", "g"), ("t",), ("s",))
_OPERANDS: dict[str, Tensor] = {
    "query": _QUERY, "key": _KEY, "value": _KEY, "bias": _SCORES, "mask": _SCORES, "q_seqlen": (("b",),),
    "kv_seqlen": (("b",),), "scale": (),
}  # fmt: skip
_STATIC = {"is_causal", "scale", "local_window_size", "return_residual"}


@dataclass(frozen=True)
class _Attention:
    """JAX's function, on the arrays that it is given by these names."""

    fun: Callable[..., Any]
    names: tuple[str, ...]
    static: tuple[tuple[str, Hashable], ...]

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        given = dict(self.static) | dict(zip(self.names, arrays, strict=True))
        return jax.tree.leaves(self.fun(**given))


def as_one_operation(platform: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which JAX's functions of attention are one operation, unless the program declines that."""
    if not effects.is_allowed("jax"):
        return contextlib.nullcontext()
    return _jax.attention_given_to(call_as_kernel, platform)


def call_as_kernel(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls JAX's function of attention, `fun`, as one operation, or as it is with other arguments than expected."""
    try:
        given = inspect.signature(fun).bind(*args, **kwargs).arguments
        arrays = {n: given[n] for n in _OPERANDS if isinstance(given.get(n), jax.Array | np.ndarray)}
        static = {n: x for n, x in given.items() if n not in arrays}
        placed = static.get("is_causal") or static.get("local_window_size") is not None or "q_seqlen" in arrays
        results = [_QUERY, _QUERY[:-1]] if static.get("return_residual") else [_QUERY]
        shapes, own = [tuple(x.shape) for x in arrays.values()], ("d", "s", "t") if placed else ("d", "s")
        rule = Notation(tuple(_OPERANDS[n] for n in arrays), tuple(results), (), own, NAME)
        is_known = all(n in _STATIC or x is None for n, x in static.items())
        if not is_known or not {"query", "key", "value"} <= arrays.keys():
            return fun(*args, **kwargs)
        rule = notation.expand_rule(rule, shapes, [shapes[0][: len(r)] for r in results], NAME)
    except (TypeError, RuleError):
        return fun(*args, **kwargs)
    function = _Attention(fun, tuple(arrays), tuple(sorted(static.items())))
    outs = kernels.call(Kernel(function, rule, NAME, trusted=True), list(arrays.values()))
    return tuple(outs) if static.get("return_residual") else outs[0]
