"""Functions that are one operation: kernels whose factors their user gives, and what their derivatives are.

A Pallas kernel has its block shapes and its grid in its parameters, so a device that has a block of the operands must
call the function that makes the kernel again, on that block. `register_rule` (`registration`) therefore marks a
*function*: a call of it is one equation of the primitive `KERNEL`, whose parameter is the function with its rule in
names (`notation`), and nothing in it depends on sizes. The local form is the same equation on local blocks.

Derivatives. Let y = f(x), t a tangent of x, c a cotangent of y. Differentiation makes three kernels of one:

    forward   y, s = f'(x)       s: what `jax.vjp` of f keeps, as far as it has every name that may be sharded
    tangent   dy = J(x) t        linear; transposed into
    backward  dx = J(x)^T c      from x, y, s and c; it makes again what is not among these

The rule of each follows from that of f. If f does the same on blocks of a factor, then so do f' and J^T, and an
operand that does not have the factor has as its gradient the sum of what the blocks give: exactly the partial sum that
a plan reduces. A factor that f reduces by max or min is whole in derivatives. Which dim of s is which name is found by
shapes: the names' sizes are doubled one by one, and f' is traced (not run) to see which dims follow.

Under `jax.vmap` a kernel is the kernel of the vectorised function, with one more name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from alpa_lite import _jax
from alpa_lite.ir import flops, notation
from alpa_lite.ir.notation import Names, Notation, Reduction, Tensor

Flat = Callable[..., Sequence[Any]]
"""A function from flat arrays to flat arrays."""

KERNEL = jex.Primitive("kernel")
KERNEL.multiple_results = True


@dataclass(frozen=True)
class Kernel:
    """A function that is treated as one operation.

    Attributes:
      fun: the function on flat arrays; takes every size from its operands.
      notation: its rule, one tensor for each flat array, without `...`.
      name: what it is called.
      trusted: whether it is known to run on any block, so that this need not be tried.
    """

    fun: Flat
    notation: Notation
    name: str
    trusted: bool = False


Types = tuple[tuple[tuple[int, ...], Any], ...]
"""Shape and dtype of each operand."""


def types_of(arrays: Sequence[Any]) -> Types:
    """Returns the types of arrays, tracers or abstract values."""
    return tuple((tuple(x.shape), x.dtype) for x in arrays)


@functools.lru_cache(maxsize=512)
def results_of(kernel: Kernel, types: Types) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes and dtypes of a kernel's results for operands of these types. The function is traced, not run.

    Raises:
      RuleError: they do not fit the rule. Errors of the function itself are passed on.
    """
    found = jax.eval_shape(kernel.fun, *specs_of(types))
    shapes = [shape for shape, _ in types]
    notation.rule_of(kernel.notation, shapes, [tuple(s.shape) for s in found], kernel.name)
    return tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in found)


@functools.lru_cache(maxsize=512)
def flops_of(kernel: Kernel, types: Types) -> float:
    """The floating-point operations of one call of a kernel; if it cannot be traced here, those of an einsum."""
    try:
        return flops.jaxpr_flops(jax.make_jaxpr(kernel.fun)(*specs_of(types)))
    except Exception:  # whatever a user's function raises
        sizes = notation.sizes_of(kernel.notation, [shape for shape, _ in types], (), kernel.name)
        return 2.0 * math.prod(sizes.values())


@functools.lru_cache(maxsize=512)
def inner_bytes(kernel: Kernel, types: Types) -> float:
    """Bytes that one call of a kernel moves between products that are ordinary operations, such as scores of attention.

    Zero for a function that cannot be traced here.
    """
    try:
        return flops.bytes_between_products(jax.make_jaxpr(kernel.fun)(*specs_of(types)))
    except Exception:  # whatever a user's function raises
        return 0.0


def call(kernel: Kernel, operands: Sequence[Any]) -> list[Any]:
    """Calls a kernel as one operation."""
    return KERNEL.bind(*operands, kernel=kernel)


def specs_of(types: Types) -> list[jax.ShapeDtypeStruct]:
    """Arrays of these types, for tracing."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in types]


# --- what JAX does with the primitive ---------------------------------------------------------------------------------


def _run(*operands: Any, kernel: Kernel) -> list[Any]:
    with jax.named_scope(kernel.name):
        return list(kernel.fun(*operands))


def _avals(*operands: Any, kernel: Kernel) -> list[Any]:
    return [jax.typeof(s) for s in results_of(kernel, types_of(operands))]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, kernel: Kernel) -> tuple[list[Any], list[Any]]:
    wrt = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    forward, tangent = derivative(kernel, wrt, types_of(primals))
    made = call(forward, primals)
    outs = made[: len(kernel.notation.results)]
    dense = iter(call(tangent, [*primals, *made, *(tangents[i] for i in wrt)]))
    return outs, [next(dense) if _is_real(x) else ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]


def _transpose(cotangents: Sequence[Any], *operands: Any, kernel: Kernel) -> list[Any]:
    assert isinstance(kernel.fun, _Tangent), "only tangents of kernels are linear"
    wrt = kernel.fun.wrt
    given = operands[: len(operands) - len(wrt)]
    dense = [ad.instantiate_zeros(c) for c in cotangents]
    return [*[None] * len(given), *call(kernel.fun.backward(kernel.notation), [*given, *dense])]


def _vectorised(operands: Sequence[Any], dims: Sequence[Any], *, kernel: Kernel) -> tuple[list[Any], list[int]]:
    mapped = tuple(d is not None for d in dims)
    moved = [jnp.moveaxis(x, d, 0) if m else x for x, d, m in zip(operands, dims, mapped, strict=True)]
    rule = kernel.notation
    new = next(n for i in range(len(rule.names()) + 1) if (n := f"vmap{i}") not in rule.names())
    tensors = tuple(((new,), *t) if m else t for t, m in zip(rule.operands, mapped, strict=True))
    results = tuple(((new,), *t) for t in rule.results)
    made = replace(
        kernel, fun=_Vectorised(kernel.fun, mapped), notation=replace(rule, operands=tensors, results=results)
    )
    outs = call(made, moved)
    return outs, [0] * len(outs)


KERNEL.def_impl(lambda *operands, kernel: jax.jit(functools.partial(_run, kernel=kernel))(*operands))
KERNEL.def_abstract_eval(_avals)
ad.primitive_jvps[KERNEL] = _jvp
ad.primitive_transposes[KERNEL] = _transpose
batching.primitive_batchers[KERNEL] = _vectorised
mlir.register_lowering(KERNEL, mlir.lower_fun(_run, multiple_results=True))


@dataclass(frozen=True)
class _Vectorised:
    """A function of arrays of which some have a further leading dim."""

    fun: Flat
    mapped: tuple[bool, ...]

    def __call__(self, *operands: Any) -> Sequence[Any]:
        return jax.vmap(lambda *xs: list(self.fun(*xs)), in_axes=tuple(0 if m else None for m in self.mapped))(
            *operands
        )


# --- derivatives ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Linearised:
    """A function, with the residuals that its reverse pass needs.

    Attributes:
      fun: the function.
      wrt: the operands that it is differentiated in.
      kept: (leaf of the closure of `jax.vjp`, where it comes from): a number of the results of `forward`.
    """

    fun: Flat
    wrt: tuple[int, ...]
    kept: tuple[tuple[int, int], ...] = ()

    def bind_others(self, operands: Sequence[Any]) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
        """Returns the function of the operands `wrt` alone, and these."""

        def of(*some: Any) -> tuple[Any, ...]:
            own = list(operands)
            for i, x in zip(self.wrt, some, strict=True):
                own[i] = x
            return tuple(self.fun(*own))

        return of, tuple(operands[i] for i in self.wrt)

    def vjp(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        """Returns the results, and the function from cotangents to those of the operands `wrt`."""
        of, some = self.bind_others(operands)
        return jax.vjp(of, *some)


@dataclass(frozen=True)
class _Forward(_Linearised):
    """x -> y, s."""

    saved: tuple[int, ...] = ()

    def __call__(self, *operands: Any) -> Sequence[Any]:
        outs, pull = self.vjp(operands)
        leaves = jax.tree.leaves(pull)
        return [*outs, *(leaves[i] for i in self.saved)]


@dataclass(frozen=True)
class _Tangent(_Linearised):
    """x, y, s, t -> dy."""

    arity: int = 0
    name: str = ""
    trusted: bool = False

    def __call__(self, *operands: Any) -> Sequence[Any]:
        of, primals = self.bind_others(operands[: self.arity])
        outs, found = jax.jvp(of, primals, operands[len(operands) - len(self.wrt) :])
        return [t for x, t in zip(outs, found, strict=True) if _is_real(x)]

    def backward(self, rule: Notation) -> Kernel:
        """Returns the kernel of the transposed function; `rule` is that of this one."""
        given = rule.operands[: len(rule.operands) - len(self.wrt)]
        results = tuple(rule.operands[i] for i in self.wrt)
        lost = {n for n in rule.names() if any(all(n not in dim for dim in tensor) for tensor in results)}
        reduce: tuple[tuple[str, Reduction], ...] = tuple((n, "sum") for n in sorted(lost - set(rule.whole)))
        made = Notation((*given, *rule.results), results, reduce, rule.whole, rule.text)
        fun = _Backward(self.fun, self.wrt, self.kept, self.arity, len(given))
        return Kernel(fun, made, f"backward of {self.name}", self.trusted)


@dataclass(frozen=True)
class _Backward(_Linearised):
    """x, y, s, c -> dx."""

    arity: int = 0
    given: int = 0

    def __call__(self, *operands: Any) -> Sequence[Any]:
        outs, pull = self.vjp(operands[: self.arity])
        leaves, tree = jax.tree.flatten(pull)
        made = operands[self.arity : self.given]
        for leaf, number in self.kept:
            leaves[leaf] = made[number]
        rest = iter(operands[self.given :])
        cotangents = [next(rest) if _is_real(x) else np.zeros(x.shape, jax.dtypes.float0) for x in outs]
        return jax.tree.unflatten(tree, leaves)(tuple(cotangents))


@functools.lru_cache(maxsize=256)
def derivative(kernel: Kernel, wrt: tuple[int, ...], types: Types) -> tuple[Kernel, Kernel]:
    """The forward kernel of a kernel's derivative in the operands `wrt`, and the tangent one, which is linear in t."""
    rule = kernel.notation
    extrema = {n for n, how in rule.reduce if how != "sum"}
    sums = tuple(pair for pair in rule.reduce if pair[1] == "sum")
    rule = replace(rule, reduce=sums, whole=tuple(sorted({*rule.whole, *extrema})))
    kept, saved = _kept(kernel, rule, wrt, types)
    results = (*rule.results, *(dims for _, dims in saved))
    forward = kernel
    if saved:
        fun = _Forward(kernel.fun, wrt, saved=tuple(leaf for leaf, _ in saved))
        forward = replace(kernel, fun=fun, notation=replace(rule, results=results))
    outs = results_of(kernel, types)
    real = tuple(dims for dims, x in zip(rule.results, outs, strict=True) if _is_real(x))
    tangents = tuple(rule.operands[i] for i in wrt)
    tangent = Kernel(
        _Tangent(kernel.fun, wrt, kept, len(types), kernel.name, kernel.trusted),
        replace(rule, operands=(*rule.operands, *results, *tangents), results=real),
        f"tangent of {kernel.name}",
        kernel.trusted,
    )
    return forward, tangent


def _kept(
    kernel: Kernel, rule: Notation, wrt: tuple[int, ...], types: Types
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, Tensor], ...]]:
    """Returns the residuals of `jax.vjp` given to the reverse pass, and which of them the forward pass returns after y.

    Not kept are operands, and residuals that lack a name that may be sharded, or have it in an unknown place: the
    reverse pass computes these again from the operands.
    """
    shapes = [shape for shape, _ in types]
    outs = results_of(kernel, types)
    sizes = notation.sizes_of(rule, shapes, [tuple(x.shape) for x in outs], kernel.name)
    free = [n for n in rule.names() if rule.kind(n) != "replicate" and sizes[n] > 1]
    split = _Linearised(kernel.fun, wrt)

    def closure(*operands: Any) -> tuple[list[Any], list[Any]]:
        made, pull = split.vjp(operands)
        return list(made), jax.tree.leaves(pull)

    jaxpr, (_, leaves) = jax.make_jaxpr(closure, return_shape=True)(*specs_of(types))
    opened, _ = _jax.open_jaxpr(jaxpr)
    variables = opened.outvars[len(outs) :]
    made = {id(v): k for k, v in reversed(list(enumerate(opened.outvars[: len(outs)])))}
    operands = {id(v) for v in opened.invars}
    known = {id(v) for eqn in opened.eqns for v in eqn.outvars}
    dims = _followed([tuple(x.shape) for x in leaves], closure, rule, free, types)
    kept: list[tuple[int, int]] = []
    saved: list[tuple[int, Tensor]] = []
    for leaf, variable in enumerate(variables):
        if id(variable) in operands or id(variable) not in known:
            continue
        if id(variable) in made and all(any(n in d for d in rule.results[made[id(variable)]]) for n in free):
            kept.append((leaf, made[id(variable)]))
        elif dims is not None and _has_all(dims[leaf], free):
            made[id(variable)] = len(outs) + len(saved)
            kept.append((leaf, made[id(variable)]))
            saved.append((leaf, dims[leaf]))
    return tuple(kept), tuple(saved)


def _has_all(tensor: Tensor, names: Sequence[str]) -> bool:
    """Returns whether each name is one dim."""
    return sorted(n for dim in tensor for n in dim) == sorted(names) and all(len(dim) <= 1 for dim in tensor)


def _followed(
    shapes: Sequence[tuple[int, ...]], closure: Callable[..., Any], rule: Notation, names: Sequence[str], types: Types
) -> list[Tensor] | None:
    """Returns the names that the dims of each array of a function follow; None where that is unknown."""
    found: list[list[Names]] = [[()] * len(shape) for shape in shapes]
    for name in names:
        doubled = tuple(
            (tuple(2 * n if name in dim else n for dim, n in zip(tensor, shape, strict=True)), dtype)
            for tensor, (shape, dtype) in zip(rule.operands, types, strict=True)
        )
        try:
            _, leaves = jax.eval_shape(closure, *specs_of(doubled))
        except Exception:  # a user's function may not take twice the size
            return None
        if [len(x.shape) for x in leaves] != [len(shape) for shape in shapes]:
            return None
        for dims, shape, leaf in zip(found, shapes, leaves, strict=True):
            for d, (n, m) in enumerate(zip(shape, leaf.shape, strict=True)):
                if m == 2 * n:
                    dims[d] = (*dims[d], name)
                elif m != n:
                    return None
    return [tuple(dims) for dims in found]


def _is_real(x: Any) -> bool:
    """Returns whether values of this type have derivatives."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
