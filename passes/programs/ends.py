"""Ends the buffers of a program where nothing reads them any more: consumed by an update, or freed.

A program is written without ends: what its lists define stays. Here every buffer ends after the last instruction of its
submesh that reads it. An update consumes what ends in it if one of its outputs has the same shape, dtype and layout, so
that the new state takes the place of the old; of all else the references are dropped. Buffers that the step returns,
constants and the numbers of micro-batches do not end, nor is consumed what the caller still holds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from alpa_lite.ir.program import Buffer, Free, Instruction, Program, Receive, Run, Send, Transfer


def end_buffers(program: Program, donatable: Collection[int]) -> Program:
    """Returns the program with its frees, and with the inputs that its updates consume.

    Args:
      program: one without frees, whose executables consume accumulators alone.
      donatable: the flat arguments whose buffers the step may consume.
    """
    # For each list, the position of the last instruction that reads or defines each buffer.
    last = [
        {number: position for position, item in enumerate(items) for number in _touched(item, program.transfers)}
        for items in program.lists
    ]
    return _freed(_donating(program, donatable, last), last)


def _donating(program: Program, donatable: Collection[int], last: Sequence[dict[int, int]]) -> Program:
    """Lets updates consume the state, and whatever else ends there, if an output can take its place."""
    mine = {b for i in donatable for b in program.inputs[i]}
    given = {b for group in (*program.inputs, *program.constants) for b in group} - mine
    given |= {b for group in program.numbers for b in group} | set(program.outputs)
    executables = list(program.executables)
    for mesh, items in enumerate(program.lists):
        for position, item in enumerate(items):
            if not isinstance(item, Run) or executables[item.executable].kind != "update":
                continue
            free = Counter(_type(program.buffers[b]) for b in item.outputs)
            times = Counter(item.inputs)
            donated = []
            for i, number in enumerate(item.inputs):
                kind = _type(program.buffers[number])
                ends = last[mesh][number] == position and number not in given and times[number] == 1
                if ends and free[kind]:
                    free[kind] -= 1
                    donated.append(i)
            executables[item.executable] = replace(executables[item.executable], donated_inputs=tuple(donated))
    return replace(program, executables=tuple(executables))


def _freed(program: Program, last: Sequence[dict[int, int]]) -> Program:
    """Puts frees after the last uses."""
    kept = set(program.outputs) | {b for group in (*program.constants, *program.numbers) for b in group}
    lists = []
    for mesh, items in enumerate(program.lists):
        ends: dict[int, list[int]] = defaultdict(list)
        for number, position in last[mesh].items():
            ends[position].append(number)
        unused = {b for group in program.inputs for b in group if program.buffers[b].mesh == mesh} - kept
        unused -= last[mesh].keys()
        new: list[Instruction] = [Free(tuple(sorted(unused)))] if unused else []
        for position, item in enumerate(items):
            new.append(item)
            consumed = set(program.consumed_buffers(item)) if isinstance(item, Run) else set()
            over = [b for b in sorted(ends[position]) if b not in kept and b not in consumed]
            if over:
                new.append(Free(tuple(over)))
        lists.append(tuple(new))
    return replace(program, lists=tuple(lists))


def _touched(item: Instruction, transfers: Sequence[Transfer]) -> tuple[int, ...]:
    match item:
        case Run(inputs=inputs, outputs=outputs):
            return (*inputs, *outputs)
        case Send(transfer=number):
            return transfers[number].sent_buffers
        case Receive(transfer=number):
            return transfers[number].received_buffers
        case Free(buffers=buffers):
            return buffers


def _type(item: Buffer) -> tuple[object, ...]:
    return item.shape, str(item.dtype), item.layout
