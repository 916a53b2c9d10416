"""Memory for the frames of Python functions, in one piece.

Since 3.11 CPython keeps the frames of a thread in chunks of 16 KiB, asks the operating system for a chunk where the
next frame does not fit the last one, and gives it back when that frame is left (`push_chunk`, `_PyThreadState_PopFrame`
in its `Python/pystate.c`). A function that is called at the end of a chunk, again and again, pays 12 us a call for that
instead of 0.1; which function this is depends on how deep the caller is. Tracing of BigBird within a plan took 24.7 s
so, and 18.5 without, on the same machine.

A chunk is as large as its first frame needs, rounded up to a power of two. What is called through a function whose
frame needs just more than half of that has the other half for all its own frames.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

WORDS = 2**16 + 1
"""Words of the frame, just over half of a chunk of 1 MiB. The pages are not touched, so that they take no memory.

The half MiB that is left is enough for frames as deep as Python's own limit of 1,000 calls, with 60 words each.
"""


def in_one_piece(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, with half a MiB in one piece for its frame and those of all that it calls.

    For what takes milliseconds: a call takes some 10 us longer.
    """

    def wide(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    made = types.FunctionType(
        wide.__code__.replace(co_stacksize=WORDS), wide.__globals__, wide.__name__, None, wide.__closure__
    )
    return functools.wraps(function)(made)
