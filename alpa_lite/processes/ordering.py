"""The order in which processes enter joint tasks, so that no process waits for ever (`docs/processes.md`, "One order").

A *rendezvous* is a task of a pipeline in which devices of several processes take part: a run on a submesh that spans
processes, or a transfer between processes. A step ends if and only if there is one total order of all rendezvous that
every process keeps. `issue_order` is such an order: a function of the program, whose digests `plan_broadcast` compares,
and of the owners of its devices. At a transfer both ends wait: early in the order the receiver, with work at hand, late
the sender. `issue_order` starts it when its receiver wants it, and sooner where all would wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from alpa_lite.ir.program import Instruction, Program, Receive, Run, Send

Task = tuple[int, int]
"""An instruction of a program: its submesh, and its position in that submesh's list."""


def issue_order(program: Program, process_of: Sequence[int]) -> tuple[Task, ...]:
    """Returns one order of all instructions that keeps the order of every list. Each process issues its part of it.

    Walks the lists with a clock each, by predicted seconds, the list that is behind first. A transfer between processes
    starts when its receiver has come to its `Receive`; where no list can go on, that with the lowest number does.

    Args:
      program: checked, so that its lists do not wait for each other.
      process_of: the process of each device, by number.
    """
    lists, transfers = program.lists, program.transfers
    is_joint = _joint_transfers(program, process_of)
    positions, clocks = [0] * len(lists), [0.0] * len(lists)
    sent: dict[int, float] = {}  # transfers that were started, and when they end
    order: list[Task] = []
    candidates = [(0.0, mesh) for mesh in range(len(lists))]  # a heap; a submesh that is blocked leaves it

    def head(mesh: int) -> Instruction | None:
        """Returns the next instruction of a submesh; None at the end of its list."""
        return lists[mesh][positions[mesh]] if positions[mesh] < len(lists[mesh]) else None

    def is_blocked(mesh: int) -> bool:
        """Returns whether the next instruction of a submesh has to wait for another list, or there is none."""
        match head(mesh):
            case None:
                return True
            case Receive(transfer=number):
                return number not in sent
            case Send(transfer=number) if is_joint[number]:
                return head(transfers[number].destination) != Receive(number)
            case _:
                return False

    while len(order) < sum(map(len, lists)):
        if candidates:
            clock, mesh = heapq.heappop(candidates)
            if clock < clocks[mesh] or is_blocked(mesh):
                continue
        else:
            mesh = min((item.transfer, m) for m in range(len(lists)) if isinstance(item := head(m), Send))[1]
        order.append((mesh, positions[mesh]))
        item = head(mesh)
        positions[mesh] += 1
        unblocked = {mesh}
        match item:
            case Run(executable=number):
                clocks[mesh] += program.executables[number].seconds
            case Send(transfer=number):
                destination = transfers[number].destination
                if is_joint[number]:
                    clocks[mesh] = max(clocks[mesh], clocks[destination])
                sent[number] = clocks[mesh] + transfers[number].seconds
                unblocked.add(destination)
            case Receive(transfer=number):
                clocks[mesh] = max(clocks[mesh], sent[number])
        if isinstance(wanted := head(mesh), Receive):
            unblocked.add(transfers[wanted.transfer].source)
        for one in unblocked:
            heapq.heappush(candidates, (clocks[one], one))
    return tuple(order)


def _joint_transfers(program: Program, process_of: Sequence[int]) -> list[bool]:
    """Returns for each transfer whether devices of several processes take part in it."""
    processes = [frozenset(process_of[device] for device in one.devices) for one in program.submeshes]
    return [len(processes[one.source] | processes[one.destination]) > 1 for one in program.transfers]
