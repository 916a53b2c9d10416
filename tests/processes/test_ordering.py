"""Processes that issue by one order end, and those that swap two rendezvous of it wait for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa_lite.ir.program import Program, Run, Send
from alpa_lite.processes.ordering import Task, issue_order
from gallery.steps import mlp
from tests import pipeline_driver

PROCESS_OF = [0, 0, 1, 1, 2, 2]
"""By device: the second submesh spans two processes."""


def find_rendezvous(program: Program) -> dict[Task, set[int]]:
    """The processes of each rendezvous, in the order in which they are issued."""
    processes = [{PROCESS_OF[device] for device in one.devices} for one in program.submeshes]
    out: dict[Task, set[int]] = {}
    for mesh, position in issue_order(program, PROCESS_OF):
        item = program.lists[mesh][position]
        others = processes[program.transfers[item.transfer].destination] if isinstance(item, Send) else set()
        if isinstance(item, Run | Send) and len(who := processes[mesh] | others) > 1:
            out[mesh, position] = who
    return out


def all_end(sequences: Mapping[int, Sequence[Task]], participants: Mapping[Task, set[int]]) -> bool:
    """Walks all sequences at once: a rendezvous takes place when all that take part have come to it."""
    left = {process: list(sequence) for process, sequence in sequences.items()}
    while any(left.values()):
        heads = {process: sequence[0] for process, sequence in left.items() if sequence}
        ready = [task for task in heads.values() if all(heads.get(one) == task for one in participants[task])]
        if not ready:
            return False
        for process in participants[ready[0]]:
            left[process].pop(0)
    return True


def test_rendezvous_in_another_order_wait_for_ever():
    program = pipeline_driver.drive(*mlp(8, 8, 4), devices=(2, 4)).pipeline.program
    order = issue_order(program, PROCESS_OF)
    for mesh, items in enumerate(program.lists):
        assert [position for one, position in order if one == mesh] == list(range(len(items)))
    who = find_rendezvous(program)
    own = {process: [task for task in who if process in who[task]] for process in range(3)}
    runs = [task for task in own[1] if not isinstance(program.lists[task[0]][task[1]], Send)]
    sends = [task for task in own[1] if task not in runs]
    assert len(sends) >= 4 and len(runs) >= 4 and own[1] == own[2] and set(own[0]) == set(sends)
    assert all_end(own, who)
    for a, b in ((sends[0], sends[1]), (runs[0], sends[-1])):
        swapped = {a: b, b: a}
        assert not all_end({**own, 1: [swapped.get(task, task) for task in own[1]]}, who)
