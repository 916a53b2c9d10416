"""The form of a call of a step, and its signature, which a plan is made for.

A call f(*args, **kwargs) has a *form*: how many arguments are positional, the names of the keywords, and each static
argument with its value. Its other arguments are flattened, NNX objects split (`pytrees`), into a *structure* and
leaves, each of which has a *type*: shape, dtype, and whether the dtype is weak. Form, structure, types and JAX's
*settings* (x64, promotion, precision, random streams, the mesh of the context) are the signature. It is all that
tracing reads of a call, so calls with equal signatures share a plan and an executable; calls whose signatures differ in
weak dtypes alone do so if tracing makes the same program of both (`alpa_lite.planned_calls`).

Static arguments are equal if their types are the same and their values are equal, as in `jax.jit`: 1, 1.0 and True are
three signatures. A Python number that is not static has a weak type and no value: all floats share a plan, and with
float32 arrays where the program is the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import SignatureError
from alpa_lite.ir.calling import CallingForm, Form
from alpa_lite.ir.paths import format_path
from alpa_lite.passes.tracing import pytrees

LeafType = tuple[tuple[int, ...], Any, bool]
"""(shape, dtype, weak) of a leaf."""


@dataclass(frozen=True)
class Signature:
    """The key of a plan.

    Attributes:
      form: the form of the call.
      tree: the structure of the arguments that are not static.
      types: for each leaf its type; for what is not an array, which cannot be planned for, its Python type.
      settings: of JAX (`_jax.trace_context`).
    """

    form: Form
    tree: Any
    types: tuple[LeafType | type, ...]
    settings: tuple[Any, ...]


def signature(calling: CallingForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Returns the signature of a call that has this form."""
    leaves, tree = flatten_call(calling, args, kwargs)
    return Signature(calling.form, tree, tuple(map(_type_or_class, leaves)), calling.settings)


def flatten_call(calling: CallingForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Returns the flat arguments of a call, NNX objects split, and their structure."""
    pure: Any = calling.drop_static(args, kwargs)
    return jax.tree_util.tree_flatten(pytrees.split(pure) if calling.modules else pure)


def leaves_with_paths(calling: CallingForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the stored path and the leaf of each flat argument of a call, NNX objects split."""
    found = pytrees.walk_leaves(calling.drop_static(args, kwargs))
    return [(path_of(calling, path.keys, path.inner), leaf) for path, leaf, _ in found]


def key_text(key: Any) -> str:
    """Returns a key of one of JAX's paths, without its brackets."""
    return str(next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key))


def paths(calling: CallingForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the path of each leaf of a call."""
    return tuple(path for path, _ in leaves_with_paths(calling, args, kwargs))


def path_of(calling: CallingForm, keys: Sequence[Any], inner: str = "") -> str:
    """Returns the path of a leaf of the traced (args, kwargs), which begins with the parameter's name."""
    group, first, *rest = keys
    root = calling.roots()[first.idx] if group.idx == 0 else first.key
    return f"{root}{jax.tree_util.keystr(tuple(rest))}{inner}"


def describe_calling(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> CallingForm:
    """Returns how `fun(*args, **kwargs)` is called, with `jax.jit`'s meaning of static arguments.

    A parameter that `static_argnums` counts may also come by keyword, or be left to its default.

    Raises:
      SignatureError: a static argument does not exist, or is not hashable.
    """
    try:
        parameters = dict(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        parameters = {}
    is_open = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())
    positional = [name for name, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), "args")
    names = (*positional[: len(args)], *(f"{others}[{i}]" for i in range(len(args) - len(positional))))
    keywords = set(as_tuple(static_argnames))
    for number in as_tuple(static_argnums):
        is_left_out = len(args) <= number < len(positional)
        named = positional if is_left_out else names
        keywords.add(named[number if is_left_out else position_of(number, len(args), "static_argnums")])
    numbers = {i for i, name in enumerate(names) if name in keywords}
    known = {*parameters, *kwargs, *names}
    for name in keywords if parameters and not is_open else ():
        if name not in known:
            raise SignatureError(
                f"static_argnames names {name!r}, but the step has the parameters {', '.join(parameters)}; "
                "name some of these"
            )
    static_positions = {i: args[i] for i in sorted(numbers)}
    static_keywords = {name: kwargs[name] for name in sorted(kwargs) if name in keywords}
    named = [*((names[i], value) for i, value in static_positions.items()), *static_keywords.items()]
    _check_hashable(named, "the static argument {} is not hashable ({}); pass a hashable value, or make it dynamic")
    found = CallingForm(
        names=names,
        dynamic=tuple(i for i in range(len(args)) if i not in numbers),
        keywords=tuple(name for name in sorted(kwargs) if name not in keywords),
        static_positions=static_positions,
        static_keywords=static_keywords,
        settings=_jax.trace_context(),
    )
    return _hide_constants(found, found.drop_static(args, kwargs), pytrees.has_static_numbers(fun))


def _hide_constants(calling: CallingForm, traced: Any, numbers: bool) -> CallingForm:
    """Returns the form of a call with some traced arguments, leaves that are no arrays, and perhaps numbers, constants.

    Raises:
      SignatureError: a constant is not hashable.
    """
    hidden = pytrees.hide(traced, numbers)
    if hidden is not traced:
        leaves, _ = jax.tree_util.tree_flatten_with_path(traced, is_leaf=pytrees.is_nnx_object)
        constants = [
            (format_path(path_of(calling, path)), leaf)
            for path, leaf in leaves
            if not pytrees.is_nnx_object(leaf) and pytrees.is_constant(leaf, numbers)
        ]
        text = "{} is a {}, neither an array nor hashable; convert it to arrays, or leave it out of the arguments"
        _check_hashable(constants, text)
        calling = replace(calling, hide=functools.partial(pytrees.hide, numbers=numbers))
    return replace(calling, modules=pytrees.has_nnx_object(hidden))


def _check_hashable(named: Iterable[tuple[str, Any]], text: str) -> None:
    """Raises SignatureError for a value that is not hashable; `text` has places for its name and its type."""
    for name, value in named:
        try:
            hash(value)
        except TypeError as error:
            raise SignatureError(text.format(name, type(value).__name__)) from error


def leaf_type(leaf: Any) -> LeafType:
    """Returns the type of an array, a number or a `jax.ShapeDtypeStruct`.

    Raises:
      TypeError: the leaf is none of these.
    """
    aval = jax.typeof(leaf)
    if not isinstance(aval, jax.core.ShapedArray):
        raise TypeError(f"a {type(leaf).__name__} is not an array")
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def is_weak(leaf: Any) -> bool:
    """Returns the last part of the type of an array or number, in less time."""
    weak = getattr(leaf, "weak_type", None)
    if weak is None:
        return isinstance(leaf, int | float | complex) and not isinstance(leaf, bool | np.generic)
    return weak


def _type_or_class(leaf: Any) -> LeafType | type:
    try:
        return leaf_type(leaf)
    except (TypeError, OverflowError):  # not an array; or an integer with more bits than its dtype
        return type(leaf)


def position_of(number: int, count: int, option: str) -> int:
    """Returns the position, from 0, of a positional argument that an option counts from either end.

    Raises:
      SignatureError: there is no such argument.
    """
    if not -count <= number < count:
        raise SignatureError(
            f"{option} names argument {number}, but the step was called with {count} positional arguments; count these "
            "from 0, or name a parameter"
        )
    return number % count


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Returns the numbers or names of an option that also takes one alone."""
    return (value,) if isinstance(value, int | str) else tuple(value)
