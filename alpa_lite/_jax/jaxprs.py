"""Jaxprs: their equations, inner jaxprs, effects, name stacks, source lines, and constraints on shardings."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.extend.core as _extend_core
from jax._src import core as _core
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info_util
from jax._src.lax import lax as _lax
from jax.interpreters import mlir as _mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# Up to 0.10 closed jaxprs are a class of their own.
_JAXPRS = (_extend_core.Jaxpr, getattr(_extend_core, "ClosedJaxpr", _extend_core.Jaxpr))


def is_jaxpr(value: Any) -> bool:
    """Returns whether `value` is a jaxpr, closed or open (0.11 made the two classes one)."""
    return isinstance(value, _JAXPRS)


def open_jaxpr(value: Any) -> tuple[Any, list[Any]]:
    """Returns a jaxpr with `constvars`, `invars`, `outvars`, `eqns`, and the values of its constvars.

    Up to 0.10 a closed jaxpr wraps an open one and holds the constants; from 0.11 one class does both, and its `jaxpr`
    attribute is itself.
    """
    consts = list(getattr(value, "consts", ()))
    return getattr(value, "jaxpr", value), consts


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the open jaxprs among an equation's parameters, one level deep: a call, a linear solve, a kernel."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield open_jaxpr(item)[0]


def walk_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr, and those of the jaxprs within it."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from walk_equations(inner)


def places_result(eqn: Any) -> bool:
    """Returns whether an equation says where its result is placed.

    Under an empty mesh JAX says so of all results in vain.
    """
    sharding = eqn.params.get("sharding")
    return sharding is not None and not getattr(getattr(sharding, "mesh", None), "empty", False)


def unbound_axis(error: NameError) -> str | None:
    """The axis that a collective names and nothing around it defines, of which JAX says so in a `NameError` alone."""
    match = re.match(r"Found an unbound axis name: (.+?)\.(?: |$)", str(error))
    return match[1] if match else None


def is_literal(atom: Any) -> bool:
    """Returns whether a jaxpr operand is a literal."""
    return type(atom) is _extend_core.Literal


def observable_effects(eqn: Any) -> bool:
    """Returns whether the equation must run even if nobody reads its results.

    A named axis is an effect only for typing.
    """
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def has_ordered_effects(eqn: Any) -> bool:
    """Returns whether JAX runs the effects of an equation in program order. Which effects are ordered is private."""
    return any(map(_effects.ordered_effects.contains, eqn.effects))


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """`num_consts` and `num_carry` of a scan equation; 0.12 replaced them by trees of the inputs (`ft_in`)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def optimization_barrier_primitive() -> Any:
    """Returns the primitive behind `jax.lax.optimization_barrier`, which is not exported."""
    return _lax.optimization_barrier_p


def join_name_stacks(outer: Any, inner: Any, scope: str | None = None) -> Any:
    """Returns the name stack inside a call that stands at `inner` in a jaxpr that itself was inlined at `outer`.

    Private type.
    """
    stack = outer + inner if outer.stack else inner
    return stack if scope is None else stack.extend(scope)


def empty_stack() -> Any:
    """Returns the empty name stack."""
    return _source_info_util.NameStack()


# Models of this package are written as a user's would be; the rest of it is not user code.
_PACKAGE = re.escape(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = re.compile(rf"{_PACKAGE}[/\\](?!models[/\\])")
_INSTALLED = re.compile(rf"(?!{_PACKAGE}).*[/\\](site|dist)-packages[/\\]")
_FRAMEWORK = re.compile(
    rf"(?!{_PACKAGE}).*[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|haiku|equinox|optax|chex)[/\\]"
)


_STANDARD = re.compile(rf"<|{re.escape(os.path.dirname(os.__file__))}[/\\](?!(site|dist)-packages)")


def is_user_file(name: str) -> bool:
    """Returns whether a file is neither of this package, nor of a framework, nor of the standard library."""
    return not any(known.match(name) for known in (_OURS, _FRAMEWORK, _STANDARD))


def source_line(source: Any) -> str:
    """Returns the user's source line of an equation, `folder/file:line (function)`, or "" where JAX knows none.

    JAX leaves out its own frames and the standard library's. Of what remains, the innermost frame outside of installed
    packages is the user's; where there is none, the innermost one outside of frameworks (Flax, Haiku, Equinox, Optax)
    is that of the program, and else the innermost frame is taken.
    """
    return _line_of(source.traceback)


@functools.lru_cache(maxsize=4096)
def _line_of(traceback: Any) -> str:
    """Of `source_line`; equations of repeated layers have equal tracebacks, and reading one takes long."""
    frames = [f for f in _source_info_util.user_frames(traceback) if f and not _OURS.match(f.file_name)]
    if not frames:
        return ""
    outside = (next((f for f in frames if not known.match(f.file_name)), None) for known in (_INSTALLED, _FRAMEWORK))
    frame = next(filter(None, outside), frames[0])
    file = "/".join(re.split(r"[/\\]", frame.file_name)[-2:])
    return f"{file}:{frame.start_line} ({frame.function_name})"


CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback"})  # names of primitives


def derivative(source: Any) -> str | None:
    """Either "jvp" for an operation of a differentiated function, "transpose" for one of its reverse pass, else None.

    Of nested derivatives the outermost counts. The elements of a name stack are private types; a user's scope may be
    called "jvp" too, so only transforms are looked at.
    """
    for element in source.name_stack.stack:
        if isinstance(element, _source_info_util.Transform) and element.name in ("jvp", "transpose"):
            return element.name
    return None


def is_reverse(source: Any) -> bool:
    """Returns whether an operation is one of a reverse pass, be it within other derivatives."""
    stack = source.name_stack.stack
    return any(isinstance(e, _source_info_util.Transform) and e.name == "transpose" for e in stack)


def scopes(source: Any) -> tuple[str, ...]:
    """Returns the named scopes of an operation, outermost first, without transforms."""
    return tuple(e.name for e in source.name_stack.stack if isinstance(e, _source_info_util.Scope))


_COMPUTED_AGAIN = "rematted_computation"  # the scope in which JAX puts what the backward pass computes again


def is_computed_again(source: Any) -> bool:
    """Returns whether the backward pass computes an operation of the forward pass again."""
    return _COMPUTED_AGAIN in scopes(source)


def mark_rematerialised(source: Any) -> Any:
    """The source of a forward operation's copy in the reverse pass, marked as JAX marks those of `jax.checkpoint`."""
    stack = source.name_stack.stack
    marked = (_source_info_util.Transform("transpose"), *stack, _source_info_util.Scope(_COMPUTED_AGAIN))
    return source.replace(name_stack=_source_info_util.NameStack(marked))


CONSTRAINT = _extend_core.Primitive("user_constraint")
"""The identity, where the user fixes the sharding of a value. Parameters: `dims` (axes of each dim, None where it is
free), `mesh` ((shape, names) of the user's mesh, or None), and `why` (in words)."""
CONSTRAINT.def_impl(lambda x, **_: x)
CONSTRAINT.def_abstract_eval(lambda x, **_: x)
_mlir.register_lowering(CONSTRAINT, lambda _, x, **__: [x])


def constraints_of(eqn: Any, annotations: bool) -> list[dict[str, Any] | None]:
    """Returns the parameters of the `CONSTRAINT` that each operand of an equation means; None where it means none.

    These are `with_sharding_constraint`, and `device_put` and `reshard` to a sharding of named axes. A memory space
    other than the device's own does not constrain the sharding. Nothing is constrained, and there are no parameters, if
    `annotations` are ignored, over a mesh of one device, which libraries with logical axes write on one device, and by
    the `reshard` over `Auto` axes that JAX inserts where a value with the mesh of the context meets one without. (A
    user's `reshard` can name no `Auto` axis.)
    """
    name = eqn.primitive.name
    parameter = {"sharding_constraint": "sharding", "device_put": "devices", "reshard": "dst_sharding"}.get(name)
    shardings = () if parameter is None else eqn.params[parameter]
    found: list[dict[str, Any] | None] = []
    for sharding, var in zip(shardings if name == "device_put" else [shardings], eqn.invars, strict=False):
        if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (None, "device"):
            found.append(None)
            continue
        mesh = sharding.mesh
        is_inserted = name == "reshard" and set(mesh.axis_types) == {AxisType.Auto}
        params = {
            "dims": spec_dims(sharding.spec, len(var.aval.shape)),
            "mesh": (tuple(mesh.axis_sizes), tuple(mesh.axis_names)),
            "why": name,
        }
        found.append(params if annotations and mesh.size > 1 and not is_inserted else {})
    return found


def spec_dims(spec: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """Returns the axes of each of `rank` dims under a spec; None where it leaves the dim unconstrained."""
    entries = (
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in spec
    )
    dims = tuple(entries)
    return (*dims, *((),) * (rank - len(dims)))
