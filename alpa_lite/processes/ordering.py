"""In which order each process enters what it does together with others, and a proof that none waits for ever.

A *meeting* is a task of a pipeline that devices of several processes take part in: a run on a submesh that spans
processes, or a transfer between submeshes of different processes. Every device works on its tasks in the order in which
its process issues them, and at a meeting it waits for all others that take part. So a step ends if and only if there is
one total order of all meetings that every process keeps. All processes issue by `issued`, which is a function of the
program and of who owns its devices; `check` proves what follows from that for whatever sequences it is given.

At a transfer both ends wait. Early in the order, the receiver waits for the sender with work at hand; late, the sender
waits. `issued` lets a transfer take place when its receiver wants it, and sooner where all would wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from alpa_lite.errors import PlanError
from alpa_lite.program import Instruction, Program, Receive, Run, Send, describe

Task = tuple[int, int]
"""An instruction of a program: its submesh, and its position in that submesh's list."""

K = TypeVar("K")


def owners(program: Program, process_of: Sequence[int]) -> tuple[frozenset[int], ...]:
    """The processes of each submesh.

    Args:
      process_of: the process of each device, by number.
    """
    return tuple(frozenset(process_of[device] for device in one.devices) for one in program.submeshes)


def issued(program: Program, process_of: Sequence[int]) -> tuple[Task, ...]:
    """One order of all instructions that keeps every list's own: what all processes issue, each its part.

    Walks the lists with a clock each, by predicted seconds, the list that is behind first. A transfer between processes
    takes place when its receiver has come to its `Receive`; where no list can go on, that with the lowest number does.

    Raises:
      PlanError: the lists wait for each other.
    """
    where = owners(program, process_of)
    together = [len(where[one.source] | where[one.destination]) > 1 for one in program.transfers]
    positions, clocks = [0] * len(program.lists), [0.0] * len(program.lists)
    sent: dict[int, float] = {}  # transfers that have taken place, and when they end
    out: list[Task] = []

    def head(mesh: int) -> Instruction | None:
        items = program.lists[mesh]
        return items[positions[mesh]] if positions[mesh] < len(items) else None

    def goes_on(mesh: int) -> bool:
        match head(mesh):
            case None:
                return False
            case Receive(transfer=number):
                return number in sent
            case Send(transfer=number) if together[number]:
                return head(program.transfers[number].destination) == Receive(number)
            case _:
                return True

    def issue(mesh: int) -> None:
        out.append((mesh, positions[mesh]))
        match head(mesh):
            case Run(executable=number):
                clocks[mesh] += program.executables[number].seconds
            case Send(transfer=number):
                transfer = program.transfers[number]
                start = max(clocks[mesh], clocks[transfer.destination]) if together[number] else clocks[mesh]
                clocks[mesh] = start
                sent[number] = start + transfer.seconds
            case Receive(transfer=number):
                clocks[mesh] = max(clocks[mesh], sent[number])
        positions[mesh] += 1

    meshes = range(len(program.lists))
    candidates = [(0.0, mesh) for mesh in meshes]  # a heap; who cannot go on leaves it, and comes back when it may
    while True:
        if candidates:
            clock, mesh = heapq.heappop(candidates)
            if clock < clocks[mesh] or not goes_on(mesh):
                continue
        else:
            waiting = {mesh: item.transfer for mesh in meshes if isinstance(item := head(mesh), Send)}
            if not waiting:
                break
            mesh = min(waiting, key=lambda one: waiting[one])
        item = head(mesh)
        issue(mesh)
        may = {mesh}
        if isinstance(item, Send):
            may.add(program.transfers[item.transfer].destination)
        if isinstance(wanted := head(mesh), Receive):
            may.add(program.transfers[wanted.transfer].source)
        for one in may:
            heapq.heappush(candidates, (clocks[one], one))
    stuck = [mesh for mesh in meshes if head(mesh) is not None]
    if stuck:
        places = ", ".join(f"submesh {m} at {describe(program, program.lists[m][positions[m]])}" for m in stuck)
        raise PlanError(f"the lists of the program wait for each other: {places}")
    return tuple(out)


def participants(program: Program, process_of: Sequence[int]) -> dict[Task, frozenset[int]]:
    """The processes of each meeting, in the order in which they are issued."""
    where = owners(program, process_of)
    out = {}
    for mesh, position in issued(program, process_of):
        item = program.lists[mesh][position]
        who = where[mesh] if isinstance(item, Run | Send) else frozenset()
        if isinstance(item, Send):
            who |= where[program.transfers[item.transfer].destination]
        if len(who) > 1:
            out[mesh, position] = who
    return out


def sequences(meetings: Mapping[Task, frozenset[int]]) -> dict[int, list[Task]]:
    """For each process the meetings that it enters, in the order in which it issues them; see `participants`."""
    out: dict[int, list[Task]] = {process: [] for process in sorted({p for who in meetings.values() for p in who})}
    for task, processes in meetings.items():
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
        expected = {one for one, processes in participants.items() if process in processes}
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
    meetings = participants(program, process_of)
    check(sequences(meetings), meetings, lambda task: describe(program, program.lists[task[0]][task[1]]))
