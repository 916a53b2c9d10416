"""Memory for the frames of Python functions in one large chunk.

Since 3.11 CPython keeps the frames of a thread in chunks of 16 KiB, asks the operating system for a chunk where the
next frame does not fit the last one, and returns it when that frame is left (`push_chunk`, `_PyThreadState_PopFrame`
in its `Python/pystate.c`). A function that is called at the end of a chunk, again and again, pays 10 us a call for that
instead of 0.1; which function this is depends on how deep the caller is. Tracing of BigBird within a plan took 24.7 s
so, and 18.5 without, on the same machine; planning a GPT of 24 layers has 2,000 to 90,000 page faults less.

A chunk is as large as its first frame needs, rounded up to a power of two. A frame that needs just more than half of a
chunk leaves the other half to all frames that are called through it. `ALPA_LITE_DECLINE=stack` declines it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from alpa_lite.processes import effects

P = ParamSpec("P")
R = TypeVar("R")

FRAME_WORDS = 2**16 + 1
"""Words of the frame, just over half of a chunk of 1 MiB. The pages are not touched, so that they take no memory.

The half MiB that is left is enough for frames as deep as Python's own limit of 1,000 calls, with 60 words each.
"""


def with_large_stack_chunk(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the same function, with half a MiB in one chunk for its frame and those of all that it calls.

    For functions that take milliseconds: a call takes some 10 us longer.
    """

    def wide(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    code = wide.__code__.replace(co_stacksize=FRAME_WORDS)
    patched = types.FunctionType(code, wide.__globals__, wide.__name__, None, wide.__closure__)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (patched if effects.is_allowed("stack") else function)(*args, **kwargs)

    return call
