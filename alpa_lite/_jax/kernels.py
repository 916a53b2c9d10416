"""Kernels: cuDNN's attention, Pallas kernels on blocks, and sharding rules of custom partitioning."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as _cudnn_attention
from jax._src.custom_partitioning_sharding_rule import str_to_sdy_sharding_rule as _str_to_sdy_sharding_rule
from jax._src.lib import cuda_versions as _cuda_versions
from jax._src.nn import functions as _nn

from alpa_lite._jax.jaxprs import open_jaxpr, walk_equations
from alpa_lite.errors import OptionError

_attention: contextvars.ContextVar[tuple[Callable[..., Any] | None, str]] = contextvars.ContextVar(
    "attention", default=(None, "")
)
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
    token = _attention.set((handler, platform))
    try:
        yield
    finally:
        _attention.reset(token)


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        handler, _ = _attention.get()
        return function(*args, **kwargs) if handler is None else handler(function, *args, **kwargs)

    return wrapper


def _version_of(function: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(function)
    def version() -> int:
        _, platform = _attention.get()
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
    asking = (eqn for eqn in walk_equations(body) if eqn.primitive.name in ("program_id", "num_programs"))
    used = {numbered[eqn.params["axis"]] for eqn in asking if eqn.params["axis"] < len(numbered)}
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
    """Returns the parameters of a `pallas_call` on arrays of other shapes, that differ in how many blocks they have."""
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
    """Returns the name of a Pallas kernel: that which its caller gave, or that of its function."""
    info = getattr(open_jaxpr(params["jaxpr"])[0], "debug_info", None)
    return str(params.get("name") or getattr(info, "func_name", "") or "")


def _block_size(block: Any) -> int | None:
    """Returns elements of a block along a dim; None for one that is not cut into blocks."""
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


WIDENS_HALVES = jax.__version_info__ < (0, 12)
"""Whether XLA's CPU compiler keeps all values of half precision that a program makes in float32 until its end.

Measured by its temporaries (`python -m benchmarks run stage_memory`): that of 0.10.2 does, and that of 0.12 does not.
"""
