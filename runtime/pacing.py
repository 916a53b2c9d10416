"""Keeps a process of several from running ahead of its CPU devices by more programs than XLA can hold.

On CPUs, XLA admits 32 programs to a device that are not done. The launch of one more waits, on a thread of the pool
that also runs the programs of all devices, and in JAX 0.10 that pool has no more threads than the process has devices
or cores (stacks of a hung job: two devices' parts of a permutation wait for the other two, whose parts wait for the
threads that wait for a place). If one process computes what another sends, such a wait never ends. So every few
launches wait for what they launched. No process can then wait for ever: each issues its programs in one order of all,
so that of the programs which are not done the first has been launched wherever it has to be.

Accelerators queue programs on streams and need none of this; in one process, all devices go on together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax

AHEAD = 8
"""Launches of programs with several devices of this process, and of those of one device, between two waits."""

_launched: Counter[Any] = Counter()


def paced(call: Callable[..., Any], devices: Iterable[Any]) -> Callable[..., Any]:
    """A compiled program that waits for its results, each `AHEAD`th time that one is called on these devices.

    Programs of several devices of a process run one after the other, whichever devices these are; so do programs that
    have one device here, for each device.

    Args:
      call: returns arrays.
      devices: of the program, of all processes.

    Returns:
      `call` itself, except on CPU devices of several processes.
    """
    here = [one for one in devices if one.platform == "cpu" and one.process_index == jax.process_index()]
    if jax.process_count() == 1 or not here:
        return call
    queue = here[0] if len(here) == 1 else None

    def launched(*arrays: Any) -> Any:
        results = call(*arrays)
        _launched[queue] += 1
        if _launched[queue] % AHEAD == 0:
            jax.block_until_ready(results)
        return results

    return launched
