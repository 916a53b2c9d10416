"""The step as JAX runs it by itself: `method="off"`, to compare a plan with, behind the same interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from alpa_lite.errors import OptionError
from alpa_lite.passes.tracing import calls, nnx_modules, static_leaves


def jitted(fun: Callable[..., Any], options: Any) -> Any:
    """The step under `jax.jit`, with those of the `Options` that it knows. "auto" donates nothing."""
    return jax.jit(fun, **_of_both(options), compiler_options=dict(options.compiler_options) or None)


def _of_both(options: Any) -> dict[str, Any]:
    """The options that `jax.jit` and `nnx.jit` share."""
    donate = () if options.donate == "auto" else options.donate
    return {
        "static_argnums": options.static_argnums or None,
        "static_argnames": options.static_argnames or None,
        "donate_argnums": [one for one in donate if isinstance(one, int)] or None,
        "donate_argnames": [one for one in donate if isinstance(one, str)] or None,
        "in_shardings": options.in_shardings,
        "out_shardings": options.out_shardings,
        "keep_unused": options.keep_unused,
        "inline": options.inline,
    }


def plain(fun: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """The step under `jax.jit`, under `nnx.jit` where an argument is an NNX object: `method="off"`.

    Args:
      fun: the user's step.
      options: `Options`.
    """
    made: list[Callable[..., Any]] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(_made(fun, options, args, kwargs))
        return made[0](*args, **kwargs)

    return step


def _made(fun: Callable[..., Any], options: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    if nnx_modules.present((args, kwargs)):
        from flax import nnx

        if options.compiler_options:
            raise OptionError(
                'compiler_options with method="off" and an NNX object as an argument: nnx.jit takes none; leave them '
                "out, or pass nnx.split(...) of the object and merge it in the step"
            )
        return nnx.jit(fun, **_of_both(options))

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return calls.calling(fun, args, kwargs, options.static_argnums, options.static_argnames)

    if bind(args, kwargs).hide is None:
        return jitted(fun, options)
    numbers = static_leaves.has_static_numbers(fun)

    @functools.wraps(fun)
    def hiding(*args: Any, **kwargs: Any) -> Any:
        return static_leaves.hide(fun(*args, **kwargs), numbers)

    hidden = jitted(hiding, options)

    def run(*args: Any, **kwargs: Any) -> Any:
        calling = bind(args, kwargs)
        return calling.call(hidden, *calling.traced(args, kwargs))

    return run
