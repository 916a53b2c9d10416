"""What a run of a pipeline that fails leaves behind, and what it says.

An executable of a stage has a name of ours and no line of the user's code, so that its error is given the instruction
and the lines that the executable was made from. Errors of the user's callbacks name their place themselves
(`callbacks`). Work that was dispatched before goes on in either case, and is waited for: its errors would otherwise
come up later, where nobody expects them. Of several processes, none waits: what another sends may never come, for it
may wait for this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError
from alpa_lite.program import Instruction, Program, describe
from alpa_lite.runtime import callbacks


def named(error: Exception, program: Program, item: Instruction, made_from: Iterable[Any]) -> Exception:
    """The error with the stage, the micro-batch and the source line in front.

    Args:
      error: of a step of the dispatch loop.
      program: what runs.
      item: the instruction that met the error.
      made_from: the operations of its executable; none if it is no run.
    """
    text = str(error)
    if callbacks.MARKER in text:  # a callback said it, in the last line of the trace that JAX made of it
        return ExecutionError(text.rsplit(callbacks.MARKER, 1)[1].strip())
    found = list(dict.fromkeys(filter(None, map(_line_of, made_from))))
    lines = f" (made from {' to '.join(dict.fromkeys((found[0], found[-1])))})" if found else ""
    return ExecutionError(f"{describe(program, item)}{lines} failed: {type(error).__name__}: {text}")


def drain(env: Sequence[Any]) -> None:
    """Waits for what is under way, whether it fails or not."""
    for array in env:
        if array is not None and not array.is_deleted():
            with contextlib.suppress(Exception):
                array.block_until_ready()


def _line_of(item: Any) -> str:
    op = getattr(item, "op", None) or getattr(item, "used_by", None)
    return _jax.source_line(op.source) if op is not None else ""
