"""The step as JAX runs it by itself: `method="off"`, to compare a plan with, behind the same interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from alpa_lite.passes.tracing import nnx_modules


def plain(fun: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """The step under `jax.jit`, or `nnx.jit` where an argument is an NNX object: `method="off"`.

    Args:
      fun: the user's step.
      options: `Options`; of them static_argnums, static_argnames and donate_argnums count. "auto" donates nothing.
    """
    settings: dict[str, Any] = {
        "static_argnums": options.static_argnums or None,
        "static_argnames": options.static_argnames or None,
        "donate_argnums": None if options.donate_argnums == "auto" else options.donate_argnums or None,
    }
    jitted: list[Callable[..., Any]] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        if not jitted:
            if nnx_modules.present((args, kwargs)):
                from flax import nnx

                jitted.append(nnx.jit(fun, **settings))
            else:
                jitted.append(jax.jit(fun, **settings))
        return jitted[0](*args, **kwargs)

    return step
