"""What the scripts of this folder share: joining the processes, and comparing with one device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HEARTBEAT = 20
"""Seconds after which a process that is gone is missed."""


def start(*, joined: bool = True) -> list[str]:
    """Joins the processes that `driver.run` has started; returns the script's own arguments."""
    process, processes, devices, port, *rest = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.config.update("jax_disable_most_optimizations", True)
    if joined and int(processes) > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", int(processes), int(process), heartbeat_timeout_seconds=HEARTBEAT,
            initialization_timeout=240,
        )  # fmt: skip
    return rest


def say(*words: Any) -> None:
    """A line that a test looks for."""
    print(*words, flush=True)


def plain(leaf: Any) -> Any:
    """Of random keys their numbers, of other leaves themselves."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf) if leaf.sharding.addressable_devices else np.zeros(0)
    return leaf


def host(tree: Any) -> Any:
    """A tree of local arrays on the host, random keys as their numbers."""
    return jax.tree.map(lambda leaf: np.asarray(plain(leaf)), tree)


def compare(got: Any, want: Any) -> int:
    """Raises AssertionError unless the blocks that this process has of `got` are those of `want`; returns their number.

    As `tests.comparing`, block by block: ||a - b|| <= 1e-5 * max(||b||, 1e-3 * ||all gradients||), where of steps with
    Adam the first moment is compared in place of what Adam makes of it. Without gradients among the results, all floats
    stand for them. A block is held to its own norm, not to that of its leaf, which is stricter.

    Args:
      got: arrays of all processes.
      want: arrays that this process has whole.
    """
    pairs = [
        (jax.tree_util.keystr(path), a, b)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    ]
    gradients = next((key for key in ("mu", "grads") if any(key in path for path, _, _ in pairs)), "")
    if gradients == "mu":
        pairs = [(path, a, b) for path, a, b in pairs if "mu" in path or not np.ndim(b) or not _is_float(b)]
    floats = [np.asarray(b, np.float64).ravel() for path, _, b in pairs if gradients in path and _is_float(b)]
    total = float(np.linalg.norm(np.concatenate(floats))) if floats else 0.0
    count = 0
    for path, a, b in pairs:
        if not isinstance(a, jax.Array):
            assert np.array_equal(a, b), path
            continue
        whole, data = np.asarray(plain(b)), plain(a)
        for shard in data.addressable_shards if isinstance(data, jax.Array) else ():
            count += 1
            have, wanted = np.asarray(shard.data), whole[shard.index]
            assert have.shape == wanted.shape and have.dtype == wanted.dtype, path
            if not _is_float(b):
                assert np.array_equal(have, wanted), path
                continue
            error = float(np.linalg.norm((have.astype(np.float64) - wanted.astype(np.float64)).ravel()))
            allowed = 1e-5 * max(float(np.linalg.norm(wanted.astype(np.float64).ravel())), 1e-3 * total)
            assert error <= allowed, (path, error, allowed)
    return count


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, np.inexact)


def train(
    step: Callable[..., Any], plain_step: Callable[..., Any], args: tuple[Any, ...], style: str = "", steps: int = 3
) -> int:
    """Runs some steps beside the step on one device of this process; returns how many blocks were compared.

    Args:
      style: "nnx" where the first two arguments are updated in place; else the leading results of a step are its next
        leading arguments, and the last result is its loss, or has it.
    """
    single = (nnx.jit if style == "nnx" else jax.jit)(plain_step)
    ours, theirs = (jax.tree.map(jnp.copy, args), args) if style != "nnx" else (_cloned(args), _cloned(args))
    count = 0
    for _ in range(steps):
        out, want = step(*ours), single(*theirs)
        if style == "nnx":
            assert np.isfinite(float(out))
            count += compare((out, *map(_state, ours[:2])), host((want, *map(_state, theirs[:2]))))
            continue
        last = out[-1]["loss"] if isinstance(out[-1], dict) else out[-1]
        assert np.isfinite(float(last))  # every process can read the loss
        count += compare(out, host(want))
        kept = len(out) - 1
        ours, theirs = (*out[:-1], *ours[kept:]), (*want[:-1], *theirs[kept:])
    return count


def _state(module: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(module))


def _cloned(args: tuple[Any, ...]) -> tuple[Any, ...]:
    definition, state = nnx.split(args)
    return nnx.merge(definition, jax.tree.map(jnp.copy, state))
