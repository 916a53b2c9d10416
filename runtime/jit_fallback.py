"""The step as JAX runs it by itself: `method="off"`, to compare a plan with, behind the same interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from alpa_lite.errors import OptionError
from alpa_lite.passes.tracing import calls, pytrees


def jit_fallback(fun: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """Returns the step under `jax.jit`, or under `nnx.jit` where an argument is an NNX object: `method="off"`.

    "auto" donates nothing.
    """
    jitted: list[Callable[..., Any]] = []  # by the first call

    def step(*args: Any, **kwargs: Any) -> Any:
        if not jitted:
            jitted.append(_jit(fun, options, args, kwargs))
        return jitted[0](*args, **kwargs)

    return step


def _jit(fun: Callable[..., Any], options: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The step under `jit` for these arguments; static leaves of arguments and results are hidden from `jax.jit`."""
    shared = {name: getattr(options, name) for name in ("in_shardings", "out_shardings", "keep_unused", "inline")}
    shared |= {name: getattr(options, name) or None for name in ("static_argnums", "static_argnames")}
    donate = () if options.donate == "auto" else options.donate
    shared["donate_argnums"] = [one for one in donate if isinstance(one, int)] or None
    shared["donate_argnames"] = [one for one in donate if isinstance(one, str)] or None
    if pytrees.has_nnx_object((args, kwargs)):
        from flax import nnx

        if options.compiler_options:
            raise OptionError(
                'compiler_options with method="off" and an NNX object as an argument: nnx.jit takes none; leave them '
                "out, or pass nnx.split(...) of the object and merge it in the step"
            )
        return nnx.jit(fun, **shared)
    compile_jit = functools.partial(jax.jit, **shared, compiler_options=dict(options.compiler_options) or None)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return calls.describe_calling(fun, args, kwargs, options.static_argnums, options.static_argnames)

    if bind(args, kwargs).hide is None:
        return compile_jit(fun)
    numbers = pytrees.has_static_numbers(fun)

    @functools.wraps(fun)
    def hiding(*args: Any, **kwargs: Any) -> Any:
        return pytrees.hide(fun(*args, **kwargs), numbers)

    hidden = compile_jit(hiding)

    def run(*args: Any, **kwargs: Any) -> Any:
        calling = bind(args, kwargs)
        return calling.call(hidden, *calling.traced(args, kwargs))

    return run
