"""What the scripts of this folder share: joining the processes, and comparing with one device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

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
            initialization_timeout=60,
        )  # fmt: skip
    return rest


def say(*words: Any) -> None:
    """A line that a test looks for."""
    print(*words, flush=True)


def plain(leaf: Any) -> Any:
    """Of random keys their numbers, of other leaves themselves."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf) if leaf.addressable_shards else np.zeros(0)
    return leaf


def host(tree: Any) -> Any:
    """A tree of local arrays on the host, random keys as their numbers."""
    return jax.tree.map(lambda leaf: np.asarray(plain(leaf)), tree)


def compare(got: Any, want: Any, bound: float = 1e-5) -> int:
    """Raises AssertionError unless the blocks that this process has of `got` are those of `want`; returns their number.

    Floats: ||a - b|| <= bound * max(||b||, 1e-3 * ||all||), for each block, the norm of all leaves but integers.

    Args:
      got: arrays of all processes.
      want: arrays that this process has whole.
    """
    pairs = list(zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True))
    floats = [np.asarray(plain(b), np.float64).ravel() for _, b in pairs if _is_float(b)]
    total = float(np.linalg.norm(np.concatenate(floats))) if floats else 0.0
    count = 0
    for (path, a), b in pairs:
        if not isinstance(a, jax.Array):
            assert np.array_equal(a, b), path
            continue
        assert a.shape == np.shape(b), path
        whole, exact = np.asarray(plain(b)), not _is_float(b)
        for shard in plain(a).addressable_shards if a.addressable_shards else ():
            count += 1
            have, wanted = np.asarray(shard.data), whole[shard.index]
            if exact:
                assert np.array_equal(have, wanted), jax.tree_util.keystr(path)
                continue
            error = float(np.linalg.norm((have.astype(np.float64) - wanted.astype(np.float64)).ravel()))
            allowed = bound * max(float(np.linalg.norm(wanted.ravel())), 1e-3 * total)
            assert error <= allowed, (jax.tree_util.keystr(path), error, allowed)
    return count


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, np.inexact)


def train(step: Callable[..., Any], plain_step: Callable[..., Any], args: tuple[Any, ...], steps: int = 3) -> int:
    """Runs some steps beside the step on one device of this process; returns how many blocks were compared.

    The leading results of a step are its next leading arguments, the last result is its loss.
    """
    count = 0
    single = jax.jit(plain_step)
    ours, theirs = args, jax.tree.map(lambda x: x, args)
    for _ in range(steps):
        out, want = step(*ours), single(*theirs)
        assert float(out[-1]) is not None  # every process can read the loss
        count += compare(out, host(want))
        kept = len(out) - 1
        ours, theirs = (*out[:-1], *ours[kept:]), (*want[:-1], *theirs[kept:])
    return count
