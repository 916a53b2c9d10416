"""Every private JAX import, and every place where JAX versions differ, each with its reason.

Supported: JAX 0.10.2 (Python 3.11) to 0.12 (Python 3.12+). Nothing else in the project imports from `jax._src`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as _extend_core
import jax.numpy as jnp
from jax._src import array as _array
from jax._src import callback as _callback
from jax._src import clusters as _clusters
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import effects as _effects
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info_util
from jax._src.compute_on import extend_compute_type as _extend_compute_type
from jax._src.cudnn import fused_attention_stablehlo as _cudnn_attention
from jax._src.custom_partitioning_sharding_rule import str_to_sdy_sharding_rule as _str_to_sdy_sharding_rule
from jax._src.interpreters import mlir as _mlir_tables
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lib import cuda_versions as _cuda_versions
from jax._src.nn import functions as _nn
from jax._src.random import prng as _prng
from jax._src.state import discharge as _discharge
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir as _mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from alpa_lite.errors import OptionError

# --- settings: when JAX traces again ----------------------------------------------------------------------------------

trace_context: Callable[[], tuple[Any, ...]] = _config.trace_context
"""The settings under which a function is traced: x64, promotion, precision, random streams, the mesh of the context.

JAX's own notion: it is part of the key of every trace that `jit` keeps. Takes 0.4 us (0.10.2) to 1.1 us (0.12). The
default PRNG and the checks for NaN are not in it: `jit` does not trace again when they change.
"""


def named_settings(context: tuple[Any, ...]) -> dict[str, Any]:
    """The values of a `trace_context` by the names that JAX has for them."""
    return dict(zip(_config.trace_context_names(), context, strict=True))


def settings_text(context: tuple[Any, ...]) -> dict[str, str]:
    """The options of `jax.config` in a `trace_context`, as text that is equal in every process: no devices."""
    values = {name: getattr(value, "value", value) for name, value in named_settings(context).items()}
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float | None)}
    return {name: str(value) for name, value in plain.items() if name.startswith("jax_")}


def carry_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under the settings that this thread has now, for another thread.

    JAX's context managers, such as `jax.enable_x64`, set values of one thread. Nothing public hands them on.
    """
    unset = _config.config_ext.unset
    known = [one for one in vars(_config).values() if isinstance(one, _config.config_ext.Config)]
    own = [(one, value) for one in known if (value := one.get_local()) is not unset]

    @functools.wraps(function)
    def carried(*args: Any, **kwargs: Any) -> Any:
        before = [(one, one.swap_local(value)) for one, value in own]
        try:
            return function(*args, **kwargs)
        finally:
            for one, value in before:
                one.set_local(value)

    return carried


def x64_in_all_threads() -> bool:
    """Returns whether threads without a setting of their own have 64 bits. JAX publishes that of the caller alone."""
    return bool(_config.enable_x64.get_global())


# --- tracing: reading jaxprs, and emitting their equations again -----------------------------------------------------

# Up to 0.10 closed jaxprs are a class of their own.
_JAXPRS = (_extend_core.Jaxpr, getattr(_extend_core, "ClosedJaxpr", _extend_core.Jaxpr))


def is_jaxpr(value: Any) -> bool:
    """Whether `value` is a jaxpr, closed or open (0.11 made the two classes one)."""
    return isinstance(value, _JAXPRS)


def open_jaxpr(value: Any) -> tuple[Any, list[Any]]:
    """A jaxpr with `constvars`, `invars`, `outvars`, `eqns`, and the values of its constvars.

    Up to 0.10 a closed jaxpr wraps an open one and holds the constants; from 0.11 one class does both, and its `jaxpr`
    attribute is itself.
    """
    consts = list(getattr(value, "consts", ()))
    return getattr(value, "jaxpr", value), consts


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """The open jaxprs among an equation's parameters, one level deep: a call, a linear solve, a kernel."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield open_jaxpr(item)[0]


def creates_references(jaxpr: Any) -> bool:
    """Whether a program creates mutable references (`jax.new_ref`), which is a private effect."""
    return _core.internal_mutable_array_effect in jaxpr.effects


def without_references(jaxpr: Any) -> Any:
    """A closed jaxpr whose mutable references are values, threaded through its control flow. The pass is private."""
    return _discharge.discharge_state(jaxpr)


def places_result(eqn: Any) -> bool:
    """Whether an equation says where its result is placed. Under an empty mesh JAX says so of all results in vain."""
    sharding = eqn.params.get("sharding")
    return sharding is not None and not getattr(getattr(sharding, "mesh", None), "empty", False)


def unbound_axis(error: NameError) -> str | None:
    """The axis that a collective names and nothing around it defines, of which JAX says so in a `NameError` alone."""
    match = re.match(r"Found an unbound axis name: (.+?)\.(?: |$)", str(error))
    return match[1] if match else None


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr operand is a literal."""
    return type(atom) is _extend_core.Literal


def observable_effects(eqn: Any) -> bool:
    """Whether the equation must run even if nobody reads its results. A named axis is an effect only for typing."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in eqn.effects)


def has_ordered_effects(eqn: Any) -> bool:
    """Whether JAX runs the effects of an equation in program order. Which effects are ordered is private."""
    return any(map(_effects.ordered_effects.contains, eqn.effects))


@dataclasses.dataclass(frozen=True, eq=False)
class _InOrder:
    """A callback that takes the token of the callback before it, and returns that of its own."""

    call: Callable[..., Any]

    def __call__(self, token: Any, *operands: Any) -> list[Any]:
        return [token, *self.call(*operands)]

    @property
    def callback_func(self) -> Any:
        """The user's function, as JAX's own callbacks have it."""
        return getattr(self.call, "callback_func", None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Selected:
    """A callback that returns some of its results."""

    call: Callable[..., Any]
    kept: tuple[int, ...]

    def __call__(self, *operands: Any) -> list[Any]:
        results = jax.tree.leaves(self.call(*operands))
        return [results[i] for i in self.kept]

    @property
    def callback_func(self) -> Any:
        """The user's function, as JAX's own callbacks have it."""
        return getattr(self.call, "callback_func", None)


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
        return traced(eqn, functools.partial(eqn.primitive.to_lojax, **eqn.params))
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return traced(eqn, functools.partial(_one_condition, eqn.params))
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return traced(eqn, functools.partial(_transposed_first, eqn.params))
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].effects:
        return traced(eqn, functools.partial(_condition_in_body, eqn.params))
    if eqn.primitive.name == "custom_linear_solve":
        return traced(eqn, functools.partial(_solved, eqn.params))
    return None


def manual_axes(params: Mapping[str, Any]) -> frozenset[str]:
    """The axes of a user's `shard_map` over which its body sees one device's block."""
    return params["newly_manual_axes"]


def traced(eqn: Any, function: Callable[..., Any]) -> Any:
    """The jaxpr of a function of an equation's operands, under its source line."""

    def sourced(*xs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), under(eqn.source_info):
            return function(*xs)

    return jax.make_jaxpr(sourced)(*(spec_of(v.aval) for v in eqn.invars))


_attention: contextvars.ContextVar[Callable[..., Any] | None] = contextvars.ContextVar("attention", default=None)
_planned_platform: contextvars.ContextVar[str] = contextvars.ContextVar("planned_platform", default="")
_SOME_CUDNN = 91300
"""A version of cuDNN that has every form of attention; JAX compares with it and writes it nowhere."""


@contextlib.contextmanager
def attention_given_to(handler: Callable[..., Any], platform: str = "") -> Iterator[None]:
    """Routes the unfused implementation of `jax.nn.dot_product_attention` to `handler(function, *args, **kwargs)`.

    The function is private, and public names of it may have been imported long ago; so it is replaced once, where JAX
    looks it up at each call, by one that checks whether the caller is within this context. For the platform "cuda" the
    version of cuDNN is taken as given in the same way where none is installed; for others cuDNN is refused.
    """
    if not hasattr(_nn._dot_product_attention_xla, "__wrapped__"):
        _nn._dot_product_attention_xla = _asking(_nn._dot_product_attention_xla)
        _cudnn_attention.check_cudnn_version = _version_of(_cudnn_attention.check_cudnn_version)
    tokens = _attention.set(handler), _planned_platform.set(platform)
    try:
        yield
    finally:
        _attention.reset(tokens[0])
        _planned_platform.reset(tokens[1])


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asked(*args: Any, **kwargs: Any) -> Any:
        handler = _attention.get()
        return function(*args, **kwargs) if handler is None else handler(function, *args, **kwargs)

    return asked


def _version_of(function: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(function)
    def version() -> int:
        platform = _planned_platform.get()
        if platform not in ("", "cuda", "gpu"):
            raise OptionError(
                'jax.nn.dot_product_attention(implementation="cudnn") runs on NVIDIA GPUs alone, and the plan is for '
                f'the platform {platform!r}: use implementation="xla", or None, which lets JAX choose'
            )
        return _SOME_CUDNN if platform and _cuda_versions is None else function()

    return version


@dataclasses.dataclass(frozen=True)
class PallasGrid:
    """The grid of a Pallas kernel, and how arrays are cut into its blocks.

    Attributes:
      grid: its sizes; 0 for one that is known at run time alone.
      first: the number of operands that are no arrays in blocks: sizes of the grid, and indices.
      blocks: for each of the other operands and each result, for each dim, (the grid dim whose number is that of the
        block, or None, elements of a block).
      independent: the grid dims of known size whose number is used for blocks alone.
    """

    grid: tuple[int, ...]
    first: int
    blocks: tuple[tuple[tuple[int | None, int], ...], ...]
    independent: tuple[int, ...]


def pallas_grid(params: Mapping[str, Any]) -> PallasGrid | None:
    """Returns the grid of a `pallas_call` from its parameters; None for a kernel with effects or a grid of its own.

    There is no public name for a grid mapping; its fields are those of JAX 0.10.2 to 0.12.
    """
    mapping = params["grid_mapping"]
    body = open_jaxpr(params["jaxpr"])[0]
    compiler = params.get("compiler_params")
    if getattr(compiler, "has_side_effects", False) or getattr(compiler, "collective_id", None) is not None:
        return None
    if getattr(mapping, "local_grid_env", None) is not None or params.get("mesh") is not None:
        return None
    grid = tuple(size if isinstance(size, int) else 0 for size in mapping.grid)
    numbered = [g for g in range(len(grid)) if g not in tuple(mapping.vmapped_dims)]
    used = {numbered[axis] for axis in _program_axes(body) if axis < len(numbered)}
    blocks = []
    for block in mapping.block_mappings:
        index = open_jaxpr(block.index_map_jaxpr)[0]
        numbers = {id(v): g for g, v in enumerate(index.invars[: len(grid)])}
        used.update(numbers[id(v)] for eqn in index.eqns for v in eqn.invars if id(v) in numbers)
        steps = [numbers.get(id(v)) for v in index.outvars]
        used.update(g for g in steps if g is not None and steps.count(g) > 1)
        sizes = [_block_size(one) for one in block.block_shape]
        used.update(g for g, size in zip(steps, sizes, strict=True) if g is not None and size is None)
        blocks.append(tuple((g, size or 0) for g, size in zip(steps, sizes, strict=True)))
    first = sum(size == 0 for size in grid) + mapping.num_index_operands
    free = tuple(g for g, size in enumerate(grid) if size and g not in used)
    return PallasGrid(grid, first, tuple(blocks), free)


def pallas_on_blocks(
    params: Mapping[str, Any], operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The parameters of a `pallas_call` on arrays of other shapes, that differ in how many blocks they have."""
    found, mapping = pallas_grid(params), params["grid_mapping"]
    assert found is not None
    grid, cut = list(mapping.grid), []
    for block, steps, shape in zip(
        mapping.block_mappings, found.blocks, (*operands[found.first :], *results), strict=True
    ):
        for (g, size), extent, whole in zip(steps, shape, block.array_aval.shape, strict=True):
            if g is not None and extent != whole:
                grid[g] = extent // size
        cut.append(dataclasses.replace(block, array_aval=block.array_aval.update(shape=tuple(shape))))
    made = dataclasses.replace(mapping, grid=tuple(grid), block_mappings=tuple(cut))
    out = tuple(aval.update(shape=tuple(shape)) for aval, shape in zip(params["out_avals"], results, strict=True))
    estimate = params.get("cost_estimate")
    if estimate is not None:
        share = math.prod(n / m for n, m in zip(grid, mapping.grid, strict=True) if isinstance(m, int))
        scaled = {f.name: int(getattr(estimate, f.name) * share) for f in dataclasses.fields(estimate)}
        estimate = dataclasses.replace(estimate, **scaled)
    return {"grid_mapping": made, "out_avals": out, "cost_estimate": estimate}


def pallas_name(params: Mapping[str, Any]) -> str:
    """The name of a Pallas kernel: that which its caller gave, or that of its function."""
    info = getattr(open_jaxpr(params["jaxpr"])[0], "debug_info", None)
    return str(params.get("name") or getattr(info, "func_name", "") or "")


def _program_axes(jaxpr: Any) -> Iterator[int]:
    """The axes of the grid whose number or size a kernel asks for."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for inner in inner_jaxprs(eqn.params):
            yield from _program_axes(open_jaxpr(inner)[0])


def _block_size(block: Any) -> int | None:
    """Elements of a block along a dim; None for one that is not cut into blocks."""
    if block is None or type(block).__name__ == "Squeezed":
        return 1
    size = block if isinstance(block, int) else getattr(block, "block_size", None)
    return size if type(block).__name__ in ("int", "Blocked") else None


def sdy_rule(given: Any, static: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Returns the `SdyShardingRule` of a `custom_partitioning` call, given as a rule, a string, or a function of types.

    JAX's parser of such strings is private.
    """
    options: dict[str, Any] = {}
    if callable(given):
        given = given(*static, jax.sharding.AbstractMesh((1,), ("x",)), list(operands), list(results))
        if isinstance(given, list | tuple):
            given, options = given
    return _str_to_sdy_sharding_rule(given, **options) if isinstance(given, str) else given


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


def _one_condition(params: Mapping[str, Any], *operands: Any) -> Any:
    """A loop with an array of conditions, its dims the first ones of all that is carried, as a loop with one."""
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    conditions, body = (_extend_core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    read, held, carried = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]

    def step(state: Sequence[Any]) -> Sequence[Any]:
        (going,) = conditions(*read, *state)

        def chosen(new: Any, old: Any) -> Any:
            return jax.lax.select(jax.lax.broadcast_in_dim(going, new.shape, range(going.ndim)), new, old)

        return tuple(map(chosen, body(*held, *state), state))

    def going_on(state: Sequence[Any]) -> Any:
        (going,) = conditions(*read, *state)
        return jax.lax.reduce_or(going, axes=tuple(range(going.ndim)))

    return jax.lax.while_loop(going_on, step, tuple(carried))


def _condition_in_body(params: Mapping[str, Any], *operands: Any) -> Any:
    """A loop that carries whether it goes on, which is evaluated before it and at the end of each iteration."""
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    condition, body = (_extend_core.jaxpr_as_fun(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    read, held, carried = operands[: split[0]], operands[split[0] : split[1]], operands[split[1] :]

    def step(state: Sequence[Any]) -> Sequence[Any]:
        new = body(*held, *state[1:])
        return (*condition(*read, *new), *new)

    return jax.lax.while_loop(lambda state: state[0], step, (*condition(*read, *carried), *carried))[1:]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """`num_consts` and `num_carry` of a scan equation; 0.12 replaced them by trees of the inputs (`ft_in`)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def optimization_barrier_primitive() -> Any:
    """The primitive behind `jax.lax.optimization_barrier`, which is not exported."""
    return _lax.optimization_barrier_p


def joined_stack(outer: Any, inner: Any, scope: str | None = None) -> Any:
    """The name stack inside a call that stands at `inner` in a jaxpr that itself was inlined at `outer`.

    Private type.
    """
    stack = outer + inner if outer.stack else inner
    return stack if scope is None else stack.extend(scope)


def empty_stack() -> Any:
    """The empty name stack."""
    return _source_info_util.NameStack()


# Models of this package are written as a user's would be; the rest of it is no user's code.
_PACKAGE = re.escape(os.path.dirname(os.path.abspath(__file__)))
_OURS = re.compile(rf"{_PACKAGE}[/\\](?!models[/\\])")
_INSTALLED = re.compile(rf"(?!{_PACKAGE}).*[/\\](site|dist)-packages[/\\]")
_FRAMEWORK = re.compile(
    rf"(?!{_PACKAGE}).*[/\\](site|dist)-packages[/\\](jax|jaxlib|flax|haiku|equinox|optax|chex)[/\\]"
)


def source_line(source: Any) -> str:
    """The user's source line of an equation, `folder/file:line (function)`, or "" where JAX knows none.

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


def emit(primitive: Any, params: Mapping[str, Any], source: Any, ctx: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds a primitive under its recorded name stack, source line and context; `bind` alone loses them.

    Of the context, what the user chose by `compute_on`, `set_xla_metadata` and `threefry_partitionable` is restored;
    the mesh
    is not: an equation that was traced outside any mesh may now be emitted inside `shard_map`. The public `compute_on`
    is a context manager in 0.10 and a decorator in 0.12; the context that both set is private.
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
CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback"})  # names of primitives
Held = Callable[[Any, Mapping[str, Any], Sequence[Any]], bool]
"""Primitive, parameters and operands of an equation -> whether something else is to stand in for it."""
_held: contextvars.ContextVar[Held | None] = contextvars.ContextVar("held", default=None)


@contextlib.contextmanager
def replacing_callbacks(replace: ReplaceCallback) -> Iterator[None]:
    """Gives every callback that its body binds to `replace`, which may wrap the function and add operands.

    Callbacks may take any number of operands, and their primitives pass them all to the parameter `callback`.
    """
    token = _replace_callback.set(replace)
    try:
        yield
    finally:
        _replace_callback.reset(token)


@contextlib.contextmanager
def standing_in(is_held: Held) -> Iterator[None]:
    """Replaces equations in its body that `is_held` selects by opaque operations with the same operands and results.

    JAX lowers some operations only for devices that are present.
    """
    token = _held.set(is_held)
    try:
        yield
    finally:
        _held.reset(token)


def lowers_for(primitive: Any, platform: str) -> bool:
    """Whether JAX lowers a primitive for a platform whose devices are not there. Its tables of that are private."""
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
    """The same array, on CPUs in row-major order.

    XLA's CPU compiler lets a collective's order of dims reach a Fourier transform, and refuses to run it then. Measured
    in 0.10.2 and 0.12: a transform, sliced and gathered along another dim than the first, in plain `shard_map`.
    """
    rows = Layout(tuple(range(x.ndim)))
    return jax.lax.platform_dependent(x, cpu=lambda x: with_layout_constraint(x, rows), default=lambda x: x)


@contextlib.contextmanager
def under(source: Any) -> Iterator[None]:
    """Runs its body under an equation's name stack and source line."""
    stack = _source_info_util.current_name_stack() + source.name_stack
    with _source_info_util.user_context(source.traceback, name_stack=stack):
        yield


# --- what users say of shardings --------------------------------------------------------------------------------------

CONSTRAINT = _extend_core.Primitive("user_constraint")
"""The identity, where the user has said how a value lies: parameters `dims` (axes of each dim, None where it is free),
`mesh` ((shape, names) of the user's mesh, or None), and `why` (in words)."""
CONSTRAINT.def_impl(lambda x, **_: x)
CONSTRAINT.def_abstract_eval(lambda x, **_: x)
_mlir.register_lowering(CONSTRAINT, lambda _, x, **__: [x])


def is_empty_constraint(eqn: Any) -> bool:
    """Whether an equation that places its operands constrains none: it does not request replication.

    These are constraints over a mesh of one device, which libraries with logical axes write on one device, and the
    `reshard` over `Auto` axes that JAX inserts where a value with the mesh of the context meets one without. (A user's
    `reshard` can name no `Auto` axis.)
    """
    shardings = _shardings_of(eqn)
    inserted = eqn.primitive.name == "reshard"
    return bool(shardings) and all(
        _is_constraint(one) and (one.mesh.size == 1 or (inserted and set(one.mesh.axis_types) == {AxisType.Auto}))
        for one in shardings
    )


def is_constraint(eqn: Any) -> bool:
    """Whether an equation places all its operands on the mesh of a sharding, and does nothing else."""
    shardings = _shardings_of(eqn)
    return bool(shardings) and all(map(_is_constraint, shardings))


def constraints_of(eqn: Any) -> list[dict[str, Any] | None]:
    """For each operand of an equation the parameters of the `CONSTRAINT` that it means; None where it means none.

    These are `with_sharding_constraint`, and `device_put` and `reshard` to a sharding of named axes. An address of
    memory other than the device's own is no matter of sharding.
    """
    found: list[dict[str, Any] | None] = []
    for sharding, var in zip(_shardings_of(eqn), eqn.invars, strict=False):
        if not _is_constraint(sharding):
            found.append(None)
            continue
        mesh = sharding.mesh
        dims = spec_dims(sharding.spec, len(var.aval.shape))
        mesh = tuple(mesh.axis_sizes), tuple(mesh.axis_names)
        found.append({"dims": dims, "mesh": mesh, "why": eqn.primitive.name})
    return found


def _shardings_of(eqn: Any) -> list[Any]:
    """The shardings that an equation gives its operands."""
    match eqn.primitive.name:
        case "sharding_constraint":
            return [eqn.params["sharding"]]
        case "device_put":
            return list(eqn.params["devices"])
        case "reshard":
            return [eqn.params["dst_sharding"]]
    return []


def _is_constraint(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.memory_kind in (None, "device")


def spec_dims(spec: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """The axes of each of `rank` dims under a spec; None where it leaves the dim unconstrained."""
    entries = (
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in spec
    )
    dims = tuple(entries)
    return (*dims, *((),) * (rank - len(dims)))


def context_mesh() -> Any:
    """The mesh of `jax.set_mesh`, `use_abstract_mesh` or `with mesh:` around the caller; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = _mesh.thread_resources.env.physical_mesh  # that of `with mesh:`, which no public function returns
    return None if mesh.empty else mesh


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Runs its body as if no `jax.set_mesh` were around it: `shard_map` takes no mesh but that of the context."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    with jax.set_mesh(None):
        yield


@contextlib.contextmanager
def tracing_under(mesh: Any) -> Iterator[None]:
    """Traces its body under a mesh of a context (None: without one), all its axes `Auto`, whatever types they have."""
    if not isinstance(mesh, AbstractMesh):  # that of `with mesh:` is still around
        yield
        return
    with jax.sharding.use_abstract_mesh(mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))):
        yield


# --- lowering: emitting a local program -------------------------------------------------------------------------------


def where(source: Any) -> str:
    """Where an equation comes from: the user's source line, then the name stack, its unnamed derivatives in words."""
    stack = str(source.name_stack).replace("transpose(jvp())", "backward").replace("jvp()", "forward")
    line = source_line(source)
    return f"{line} {stack}".strip() if stack else line


def strong(block: Any) -> Any:
    """`block` without a weak type, which carries and branch results must agree in. Random keys have none."""
    dtype = getattr(block, "dtype", None)
    if dtype is None:
        return jnp.asarray(block)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return block
    return jax.lax.convert_element_type(block, dtype)


def with_weak_type(block: Any, weak: bool) -> Any:
    """`block` with or without a weak type. JAX has a public way to drop one alone."""
    if bool(getattr(jax.typeof(block), "weak_type", False)) == weak:
        return block
    return _lax._convert_element_type(block, weak_type=True) if weak else strong(block)


def constant_of(op: Any) -> Any:
    """Returns the value of a constant operation of MLIR: its attribute, or for complex numbers the text of it.

    The bindings of jaxlib (0.10 to 0.12) have no class for dense complex attributes, and raise where one is read.
    """
    try:
        return op.attributes["value"]
    except TypeError:
        return op.get_asm(large_elements_limit=4).partition("dense<")[2]


def is_splat(op: Any) -> bool:
    """Whether all elements of a constant are equal by its form: one is written for all."""
    held = constant_of(op)
    return not held.startswith(("[", "dense_resource")) if isinstance(held, str) else held.is_splat


def attributes_of(op: Any) -> tuple[tuple[str, Any], ...]:
    """The names and attributes of an operation; equal if and only if the attributes are.

    The context keeps attributes unique, so that comparing them is comparing pointers. For those that the bindings
    cannot read (see `constant_of`) the operation's whole text stands, without the name of its result.
    """
    try:
        return tuple((name, op.attributes[name]) for name in op.attributes)
    except TypeError:
        return (("text", op.get_asm().partition("=")[2]),)


# --- planning: what compilers do ------------------------------------------------------------------------------------

WIDENS_HALVES = jax.__version_info__ < (0, 12)
"""Whether XLA's CPU compiler keeps all values of half precision that a program makes in float32 until its end.

Measured by its temporaries (`benchmarks/stage_memory.py`): that of 0.10.2 does, and that of 0.12 does not.
"""

# --- running: arrays that were donated -------------------------------------------------------------------------------

PlainArray = _array.ArrayImpl
"""The class of arrays but random keys. `isinstance(x, jax.Array)` takes microseconds, comparing classes does not."""

is_deleted: Callable[[Any], bool] = PlainArray.is_deleted
"""Of a `jax.Array`, as an unbound method: `map` with it takes a third of the time of `operator.methodcaller`."""


def accept_default_layouts(compiled: Any) -> Any:
    """Has a compiled program take arrays in the layouts that arrays of their types have by default. Returns it.

    Up to 0.10, programs compiled ahead of time compare layouts with their number of bits per item, which differs for
    types of fewer than eight, and refuse what `jax.jit` takes. The list for dispatch holds None for default layouts.
    """
    executable = compiled._executable
    executable._xla_in_layouts = executable._dispatch_in_layouts
    return compiled


# --- running: arrays that are made when somebody reads them -----------------------------------------------------------


class LazyArray(jax.Array):
    """A `jax.Array` that is made, once, when somebody reads it; its type and its sharding are known before.

    JAX finds what an array of a class is, and what it is on devices, in tables by class; users may give such an array
    to all that takes one. Dispatch in C++ does not know it, and asks Python.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, weak: bool, sharding: Any) -> None:
        self._known_aval = _core.ShapedArray(tuple(shape), dtype, weak_type=weak)
        self._known_sharding = sharding
        self.made: Any = None

    def make_array(self) -> Any:
        """The array. Called once."""
        raise NotImplementedError

    @property
    def array(self) -> Any:
        """The array itself."""
        if self.made is None:
            self.made = array_with_weak_type(self.make_array(), self.weak_type)
        return self.made

    aval: Any = property(lambda self: self._known_aval)
    shape: Any = property(lambda self: self._known_aval.shape)
    dtype: Any = property(lambda self: self._known_aval.dtype)
    ndim: Any = property(lambda self: self._known_aval.ndim)
    size: Any = property(lambda self: self._known_aval.size)
    itemsize: Any = property(lambda self: self._known_aval.dtype.itemsize)
    nbytes: Any = property(lambda self: self._known_aval.size * self._known_aval.dtype.itemsize)
    weak_type: Any = property(lambda self: self._known_aval.weak_type)
    sharding: Any = property(lambda self: self._known_sharding)
    format: Any = property(lambda self: Format(None, self._known_sharding))
    committed: Any = property(lambda self: True)
    _committed: Any = property(lambda self: True)
    is_fully_addressable: Any = property(lambda self: self._known_sharding.is_fully_addressable)
    is_fully_replicated: Any = property(lambda self: self._known_sharding.is_fully_replicated)
    __array_priority__ = 100

    def __len__(self) -> int:
        return self._known_aval.shape[0]

    def devices(self) -> set[Any]:
        """As of an array."""
        return set(self._known_sharding.device_set)

    def __init_subclass__(cls) -> None:
        _core.pytype_aval_mappings[cls] = lambda lazy: lazy.aval
        _pxla.shard_arg_handlers[cls] = _shard_lazy
        _mlir.register_constant_handler(cls, _lazy_constant)  # pyright: ignore[reportArgumentType]
        if hasattr(_dtypes, "canonicalize_value_handlers"):  # up to 0.10 values are canonicalised before
            _dtypes.canonicalize_value_handlers[cls] = lambda lazy: lazy


def _shard_lazy(arrays: Sequence[Any], *where: Any) -> Any:
    return _pxla.shard_arg_handlers[PlainArray]([lazy.array for lazy in arrays], *where)


def _lazy_constant(lazy: LazyArray, _: Any) -> Any:
    return _mlir_tables.ir_constant(lazy.array)


def _forward(name: str) -> Any:
    """A method or a property of arrays, of the array that a lazy one makes."""
    if not callable(getattr(PlainArray, name)):
        return property(lambda self: getattr(self.array, name))

    def method(self: LazyArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.array, name)(*args, **kwargs)

    method.__name__ = name
    return method


_OBJECTS = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__str__",
                                     "__format__", "__reduce__"}  # fmt: skip
for _name in dir(PlainArray):
    _is_own = _name in vars(LazyArray) or _name in _OBJECTS or _name in ("__del__", "__weakref__", "__numpy_dtype__")
    if not _is_own and getattr(PlainArray, _name) is not None:  # arrays have no hash
        setattr(LazyArray, _name, _forward(_name))


# --- several processes: blocks of arrays ------------------------------------------------------------------------------


def blocks_of(array: Any) -> list[Any]:
    """The blocks of an array that are here, each an array on one device, in the order of the sharding's devices.

    `addressable_shards` makes an object for each block, in 10 us where it is not cached; this list is there.
    """
    return array._arrays


def array_with_weak_type(array: Any, weak: bool) -> Any:
    """The same buffers as an array with or without a weak type. Runs no program."""
    if type(array) is not PlainArray or array.weak_type == weak:  # random keys have no weak types
        return array
    return _array.ArrayImpl(
        array.aval.update(weak_type=weak), array.sharding, array._arrays, committed=array.committed, _skip_checks=True
    )


# --- several processes: who writes compiled programs to disk ----------------------------------------------------------

_writing = threading.RLock()


@contextlib.contextmanager
def writing_executables() -> Iterator[None]:
    """Writes executables compiled in its body to JAX's compilation cache, whichever number this process has.

    JAX leaves writing to process 0, which has no program for the devices of others alone; and on CPUs, where the key of
    a program depends on the process, no other process can use the entries of process 0. There is no option for it.
    """
    with _writing:
        original = _compiler._cache_write
        _compiler._cache_write = _write_executable
        try:
            yield
        finally:
            _compiler._cache_write = original


def _write_executable(
    key: str, seconds: float, name: str, backend: Any, executable: Any, host_callbacks: Sequence[Any] = ()
) -> None:
    """JAX's own `_cache_write` but for the number of the process. Up to 0.10 it is given the callbacks of the host."""
    if host_callbacks or seconds < jax.config.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        _compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))
    except Exception as error:  # a full or read-only disk must not end a job that can go on
        warnings.warn(f"the compiled program {name!r} cannot be kept: {type(error).__name__}: {error}", stacklevel=2)


# --- layering: what derivatives leave in name stacks ------------------------------------------------------------------


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
    """Whether an operation is one of a reverse pass, be it within other derivatives."""
    stack = source.name_stack.stack
    return any(isinstance(e, _source_info_util.Transform) and e.name == "transpose" for e in stack)


def scopes(source: Any) -> tuple[str, ...]:
    """The named scopes of an operation, outermost first, without transforms."""
    return tuple(e.name for e in source.name_stack.stack if isinstance(e, _source_info_util.Scope))


_COMPUTED_AGAIN = "rematted_computation"  # the scope in which JAX puts what the backward pass computes again


def is_computed_again(source: Any) -> bool:
    """Whether the backward pass computes an operation of the forward pass again."""
    return _COMPUTED_AGAIN in scopes(source)


def rematted(source: Any) -> Any:
    """The source of a forward operation's copy in the reverse pass, marked as JAX marks those of `jax.checkpoint`."""
    stack = source.name_stack.stack
    marked = (_source_info_util.Transform("transpose"), *stack, _source_info_util.Scope(_COMPUTED_AGAIN))
    return source.replace(name_stack=_source_info_util.NameStack(marked))


def materialised(x: jax.Array) -> jax.Array:
    """The array behind an `optimization_barrier`, which every reader sees with the same bits.

    Before 0.12 the CPU compiler drops barriers before it fuses, and duplicates what was behind them. It does not see
    through a condition that comes out of a barrier.
    """
    if jax.__version_info__ >= (0, 12):
        return jax.lax.optimization_barrier(x)
    return jax.lax.platform_dependent(x, cpu=_behind_condition, default=jax.lax.optimization_barrier)


def _behind_condition(x: jax.Array) -> jax.Array:
    return jax.lax.cond(jax.lax.optimization_barrier(jnp.bool_(True)), lambda y: y, lambda y: -y, x)


# --- invalid values --------------------------------------------------------------------------------------------------


def checked_values() -> tuple[str, ...]:
    """The kinds of values that JAX raises for: "nan" with `jax_debug_nans`, "inf" with `jax_debug_infs`."""
    return ("nan",) * bool(jax.config.jax_debug_nans) + ("inf",) * bool(jax.config.jax_debug_infs)


def checks_values() -> bool:
    """Whether JAX looks for invalid values in results."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


@contextlib.contextmanager
def values_unchecked() -> Iterator[None]:
    """Within it, JAX does not look at results."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


# --- several processes -----------------------------------------------------------------------------------------------


def job_of(
    address: str | None, count: int | None, number: int | None, timeout: float
) -> tuple[str | None, int | None, int | None]:
    """Returns the coordinator, the process count and this process's number, as `jax.distributed.initialize` finds them.

    Given values are kept; one neither given nor found is None. JAX's detection is private, and `initialize` starts at
    once.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    detect = _clusters.ClusterEnv.auto_detect_unset_distributed_params
    return detect(address, count, number, None, None, int(timeout))[:3]


def coordination_client() -> Any:
    """The client of the coordinator's key-value store; None in a process that is alone. No public name leads to it."""
    return _distributed.global_state.client


def key_kind(dtype: Any) -> tuple[str, tuple[int, ...]]:
    """The name of the implementation of random keys of a typed dtype, and the shape of the integers behind one key."""
    return dtype._impl.name, tuple(dtype._impl.key_shape)


def data_of_keys(keys: Any) -> jax.Array:
    """The integers behind typed random keys.

    `jax.random.key_data` runs a program on their devices, which a process that has none of them cannot.
    """
    return keys._base_array


def keys_of_data(data: jax.Array, dtype: Any) -> Any:
    """The typed random keys that these integers are, likewise without a program."""
    return _prng.PRNGKeyArray(dtype._impl, data)
