"""The order in which processes enter joint tasks, and a proof that no process waits for ever.

A *rendezvous* is a task of a pipeline in which devices of several processes take part: a run on a submesh that spans
processes, or a transfer between submeshes of different processes. Every device works on its tasks in the order in which
its process issues them, and at a rendezvous it waits for all others that take part. So a step ends if and only if there
is one total order of all rendezvous that every process keeps. All processes issue by `issue_order`, a function of the
program and of the owners of its devices; `check_order` proves that given sequences end.

At a transfer both ends wait. Early in the order, the receiver waits for the sender with work at hand; late, the sender
waits. `issue_order` starts a transfer when its receiver wants it, and sooner where all would wait.
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


class _Walk:
    """Positions and predicted clocks in the lists of a program.

    Attributes:
      order: the tasks that are issued.
      clocks: seconds at which each submesh has done what is issued.
    """

    def __init__(self, program: Program, processes: Sequence[frozenset[int]]) -> None:
        self._program = program
        self._joint = [len(processes[one.source] | processes[one.destination]) > 1 for one in program.transfers]
        self._positions = [0] * len(program.lists)
        self._sent: dict[int, float] = {}  # transfers that were started, and when they end
        self.clocks = [0.0] * len(program.lists)
        self.order: list[Task] = []

    def head(self, mesh: int) -> Instruction | None:
        """Returns the next instruction of a submesh; None at the end of its list."""
        items, position = self._program.lists[mesh], self._positions[mesh]
        return items[position] if position < len(items) else None

    def can_issue(self, mesh: int) -> bool:
        """Returns whether the next instruction of a submesh can be issued without waiting for another list."""
        match self.head(mesh):
            case None:
                return False
            case Receive(transfer=number):
                return number in self._sent
            case Send(transfer=number) if self._joint[number]:
                return self.head(self._program.transfers[number].destination) == Receive(number)
            case _:
                return True

    def issue(self, mesh: int) -> set[int]:
        """Issues the next instruction of a submesh. Returns the submeshes that may be able to go on by that."""
        program, clocks, item = self._program, self.clocks, self.head(mesh)
        self.order.append((mesh, self._positions[mesh]))
        self._positions[mesh] += 1
        unblocked = {mesh}
        match item:
            case Run(executable=number):
                clocks[mesh] += program.executables[number].seconds
            case Send(transfer=number):
                transfer = program.transfers[number]
                if self._joint[number]:
                    clocks[mesh] = max(clocks[mesh], clocks[transfer.destination])
                self._sent[number] = clocks[mesh] + transfer.seconds
                unblocked.add(transfer.destination)
            case Receive(transfer=number):
                clocks[mesh] = max(clocks[mesh], self._sent[number])
        if isinstance(wanted := self.head(mesh), Receive):
            unblocked.add(program.transfers[wanted.transfer].source)
        return unblocked


def issue_order(program: Program, process_of: Sequence[int]) -> tuple[Task, ...]:
    """Returns one order of all instructions that keeps the order of every list. Each process issues its part of it.

    Walks the lists with a clock each, by predicted seconds, the list that is behind first. A transfer between processes
    starts when its receiver has come to its `Receive`; where no list can go on, that with the lowest number does.

    Args:
      process_of: the process of each device, by number.

    Raises:
      PlanError: the lists wait for each other.
    """
    walk, meshes = _Walk(program, _processes_of_meshes(program, process_of)), range(len(program.lists))
    candidates = [(0.0, mesh) for mesh in meshes]  # a heap; a submesh that is blocked leaves it
    while True:
        if candidates:
            clock, mesh = heapq.heappop(candidates)
            if clock < walk.clocks[mesh] or not walk.can_issue(mesh):
                continue
        else:
            sends = [(item.transfer, mesh) for mesh in meshes if isinstance(item := walk.head(mesh), Send)]
            if not sends:
                break
            mesh = min(sends)[1]
        for one in walk.issue(mesh):
            heapq.heappush(candidates, (walk.clocks[one], one))
    stuck = [f"submesh {m} at {describe(program, item)}" for m in meshes if (item := walk.head(m)) is not None]
    if stuck:
        raise PlanError(f"the lists of the program wait for each other: {', '.join(stuck)}")
    return tuple(walk.order)


def find_rendezvous(program: Program, process_of: Sequence[int]) -> dict[Task, frozenset[int]]:
    """Returns the processes of each rendezvous, in the order in which they are issued."""
    processes = _processes_of_meshes(program, process_of)
    out = {}
    for mesh, position in issue_order(program, process_of):
        item = program.lists[mesh][position]
        who = processes[mesh] if isinstance(item, Run | Send) else frozenset()
        if isinstance(item, Send):
            who |= processes[program.transfers[item.transfer].destination]
        if len(who) > 1:
            out[mesh, position] = who
    return out


def order_by_process(rendezvous: Mapping[K, frozenset[int]]) -> dict[int, list[K]]:
    """Returns for each process the rendezvous that it enters, in the order in which it issues them."""
    processes = sorted(frozenset().union(*rendezvous.values()))
    return {process: [task for task, who in rendezvous.items() if process in who] for process in processes}


def check_order(
    sequences: Mapping[int, Sequence[K]], participants: Mapping[K, frozenset[int]], name: Callable[[K], str] = str
) -> None:
    """Raises PlanError unless every process enters its rendezvous, each once, and no process waits for ever.

    Walks all sequences at once: a rendezvous takes place when all that take part have come to it.

    Args:
      sequences: the rendezvous that each process enters, in its order.
      participants: the processes of each rendezvous.
      name: describes a rendezvous.
    """
    for process, sequence in sequences.items():
        expected = {one for one, who in participants.items() if process in who}
        wrong = expected.symmetric_difference(sequence)
        if wrong or len(sequence) != len(expected):
            example = f", such as {name(next(iter(wrong or sequence)))}"
            raise PlanError(
                f"process {process} enters {len(sequence)} rendezvous, and must enter {len(expected)}{example}"
            )
    positions, arrived = dict.fromkeys(sequences, 0), dict.fromkeys(participants, 0)
    ready = [process for process, sequence in sequences.items() if sequence]
    while ready:
        process = ready.pop()
        task = sequences[process][positions[process]]
        arrived[task] += 1
        if arrived[task] == len(participants[task]):
            for other in participants[task]:
                positions[other] += 1
                if positions[other] < len(sequences[other]):
                    ready.append(other)
    stuck = [process for process, sequence in sequences.items() if positions[process] < len(sequence)]
    if stuck:
        places = ", ".join(f"process {p} at {name(sequences[p][positions[p]])}" for p in stuck[:4])
        raise PlanError(f"{len(stuck)} processes would wait for each other for ever: {places}")


def check_program(program: Program, process_of: Sequence[int]) -> None:
    """Raises PlanError unless the processes that have these devices can run a program to its end.

    Args:
      process_of: the process of each device, by number.
    """
    rendezvous = find_rendezvous(program, process_of)
    sequences = order_by_process(rendezvous)
    check_order(sequences, rendezvous, lambda task: describe(program, program.lists[task[0]][task[1]]))


def _processes_of_meshes(program: Program, process_of: Sequence[int]) -> list[frozenset[int]]:
    """Returns the processes of each submesh."""
    return [frozenset(process_of[device] for device in one.devices) for one in program.submeshes]
