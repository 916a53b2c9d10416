"""In which order each process enters what it does together with others, and a proof that none waits for ever.

A *meeting* is a task of a pipeline that devices of several processes take part in: a run on a submesh that spans
processes, or a transfer between submeshes of different processes. Every device works on its tasks in the order in which
its process issues them, and at a meeting it waits for all others that take part. So a step ends if and only if there is
one total order of all meetings that every process keeps. All processes issue by `program.order`, which is a function of
the program alone; `check` proves what follows from that for whatever sequences it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from alpa_lite.errors import PlanError
from alpa_lite.program import Program, Run, Send, describe, order

Task = tuple[int, int]
"""An instruction of a program: its submesh, and its position in that submesh's list."""

K = TypeVar("K")


def owners(program: Program, process_of: Sequence[int]) -> tuple[frozenset[int], ...]:
    """The processes of each submesh.

    Args:
      process_of: the process of each device, by number.
    """
    return tuple(frozenset(process_of[device] for device in one.devices) for one in program.submeshes)


def participants(program: Program, process_of: Sequence[int]) -> dict[Task, frozenset[int]]:
    """The processes of each task that can be a meeting, in the order in which tasks are issued."""
    where = owners(program, process_of)
    out = {}
    for mesh, position in order(program):
        item = program.lists[mesh][position]
        if isinstance(item, Run):
            out[mesh, position] = where[mesh]
        elif isinstance(item, Send):
            out[mesh, position] = where[mesh] | where[program.transfers[item.transfer].destination]
    return out


def sequences(program: Program, process_of: Sequence[int]) -> dict[int, list[Task]]:
    """For each process the meetings that it enters, in the order in which it issues them."""
    out: dict[int, list[Task]] = {process: [] for process in sorted(set(process_of))}
    for task, processes in participants(program, process_of).items():
        if len(processes) > 1:
            for process in processes:
                out[process].append(task)
    return out


def check(
    sequences: Mapping[int, Sequence[K]], participants: Mapping[K, frozenset[int]], said: Callable[[K], str] = str
) -> None:
    """Raises PlanError unless every process enters its meetings, each once, and no process waits for ever.

    Walks all sequences at once: a meeting takes place when all that take part have come to it.

    Args:
      sequences: of each process.
      participants: the processes of each meeting.
      said: a meeting in words.
    """
    for process, sequence in sequences.items():
        expected = {one for one, processes in participants.items() if process in processes and len(processes) > 1}
        wrong = expected.symmetric_difference(sequence)
        if wrong or len(sequence) != len(expected):
            one = next(iter(wrong), next(iter(sequence), None))
            what = "" if one is None else f", such as {said(one)}"
            raise PlanError(f"process {process} enters {len(sequence)} meetings, and must enter {len(expected)}{what}")
    positions = dict.fromkeys(sequences, 0)
    waiting: dict[K, int] = {}  # how many have come to a meeting
    ready = [process for process, sequence in sequences.items() if sequence]
    while ready:
        process = ready.pop()
        meeting = sequences[process][positions[process]]
        waiting[meeting] = waiting.get(meeting, 0) + 1
        if waiting[meeting] < len(participants[meeting]):
            continue
        del waiting[meeting]
        for other in participants[meeting]:
            positions[other] += 1
            if positions[other] < len(sequences[other]):
                ready.append(other)
    stuck = [process for process, sequence in sequences.items() if positions[process] < len(sequence)]
    if stuck:
        places = ", ".join(f"process {p} at {said(sequences[p][positions[p]])}" for p in stuck[:4])
        raise PlanError(f"{len(stuck)} processes would wait for each other for ever: {places}")


def check_program(program: Program, process_of: Sequence[int]) -> None:
    """Raises PlanError unless the processes that have these devices can run a program to its end.

    Args:
      process_of: the process of each device, by number.
    """
    check(
        sequences(program, process_of),
        {task: who for task, who in participants(program, process_of).items() if len(who) > 1},
        lambda task: describe(program, program.lists[task[0]][task[1]]),
    )
