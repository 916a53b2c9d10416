"""Keeps a process from running ahead of its CPU devices by more programs than XLA can hold, in a multi-process run.

On CPUs, XLA admits 32 programs to a device that are not done. The launch of one more waits, on a thread of the pool
that also runs the programs of all devices, and in JAX 0.10 that pool has no more threads than the process has devices
or cores (stacks of a hung job: two devices' parts of a permutation wait for the other two, whose parts wait for the
threads that wait for a place). If one process computes what another sends, such a wait never ends. So every few
launches wait for their results (`throttle`). No process can then wait for ever: each issues its programs in one order
of all, so that of the programs which are not done the first has been launched wherever it has to be.

Programs of several devices of a process start one after the other, each with a thread for every device. One of a single
device starts beside them, and if it waits for another process, it holds a thread that an earlier one may need (stacks
of a hung job of JAX 0.10: a process broadcasts its loss while its backward pass, which comes before, lacks a thread for
its second device; the other waits for that pass, and has not come to the broadcast). It waits until those are done
(`drain`).

Accelerators queue programs on streams and need none of this; in one process, all devices go on together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax

MAX_LAUNCHES_AHEAD = 8
"""Launches of programs with several devices of this process, and of those of one device, between two waits."""

_launched: Counter[Any] = Counter()
_unread: dict[Any, Any] = {}  # by queue, the results of the last program of which nobody else may hold one


def throttle(call: Callable[..., Any], devices: Iterable[Any], *, unread: bool = False) -> Callable[..., Any]:
    """Returns a compiled program that waits for its results at each `MAX_LAUNCHES_AHEAD`th launch on these devices.

    Programs of several devices of a process run one after the other, whichever devices these are; so do programs that
    have one device here, for each device.

    Args:
      devices: of the program, of all processes.
      unread: whether the results may be dropped at once, as those of a transfer are by its sender.

    Returns:
      `call` itself, except on CPU devices in a multi-process run.
    """
    here = [one for one in devices if one.platform == "cpu" and one.process_index == jax.process_index()]
    if jax.process_count() == 1 or not here:
        return call
    queue = here[0] if len(here) == 1 else None

    def launch(*arrays: Any) -> Any:
        results = call(*arrays)
        _launched[queue] += 1
        if unread:
            _unread[queue] = results
        if _launched[queue] % MAX_LAUNCHES_AHEAD == 0:
            jax.block_until_ready(results)
        return results

    return launch


def drain(results: Iterable[Any]) -> None:
    """Waits on CPU devices, if there are several here, until the programs that a step has launched are done."""
    if _has_to_drain():
        unread = [one for last in _unread.values() for one in last if not one.is_deleted()]  # else a later run has it
        jax.block_until_ready([*results, *unread])
        _unread.clear()


@functools.cache
def _has_to_drain() -> bool:
    """Returns whether this is a process of several, with several CPU devices; each question costs microseconds."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu" and jax.local_device_count() > 1
