"""Programs as data: what `check` finds, what `order` promises, and how bytes are counted."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.ir import program as programs
from alpa_lite.ir import schedules
from alpa_lite.ir.program import Free, Instruction, Program, Receive, Run, Send
from tests import scheduling
from tests.pipelines import every, toy


@pytest.fixture
def small() -> Program:
    return toy(schedules.schedule("1f1b", 2, 3))


def edited(program: Program, mesh: int, edit: Callable[[list[Instruction]], object]) -> Program:
    items = list(program.lists[mesh])
    edit(items)
    return dataclasses.replace(program, lists=(*program.lists[:mesh], tuple(items), *program.lists[mesh + 1 :]))


def without(program: Program, dropped: Instruction) -> Program:
    (mesh,) = (mesh for mesh, items in enumerate(program.lists) if dropped in items)
    return edited(program, mesh, lambda items: items.remove(dropped))


def inserted(program: Program, mesh: int, position: int, item: Instruction) -> Program:
    return edited(program, mesh, lambda items: items.insert(position, item))


def place(program: Program, mesh: int, kind: type) -> int:
    return next(n for n, item in enumerate(program.lists[mesh]) if isinstance(item, kind))


def end(program: Program) -> int:
    return len(program.lists[0])


@pytest.mark.parametrize("made", every(), ids=lambda s: f"{s.name}-{s.num_meshes}x{s.virtual}-{s.num_microbatches}")
def test_every_schedule_checks_and_holds_what_it_should(made: schedules.Schedule) -> None:
    program = toy(made)
    programs.check(program)
    assert programs.peak_bytes(program) == scheduling.in_flight(made)


def test_order_keeps_lists_and_sends_in_turn(small: Program) -> None:
    order = small.order
    for mesh, items in enumerate(small.lists):
        assert [position for m, position in order if m == mesh] == list(range(len(items)))
    issued = [small.lists[mesh][position] for mesh, position in order]
    sends = [item.transfer for item in issued if isinstance(item, Send)]
    assert sends == list(range(len(small.transfers)))
    for number in sends:
        assert issued.index(Send(number)) < issued.index(Receive(number))


def test_order_waits_for_the_turn_of_a_transfer(small: Program) -> None:
    """Numbers swapped between independent transfers of two submeshes: the second to be ready now has to wait."""
    there = [n for n, t in enumerate(small.transfers) if t.source == 0]
    back = [n for n, t in enumerate(small.transfers) if t.source == 1]
    first, second = next((a, b) for a in there for b in back if abs(a - b) == 1)
    names = {first: second, second: first}
    transfers = list(small.transfers)
    transfers[first], transfers[second] = transfers[second], transfers[first]

    def renamed(item: Instruction) -> Instruction:
        if isinstance(item, Send | Receive):
            return type(item)(names.get(item.transfer, item.transfer))
        return item

    lists = tuple(tuple(map(renamed, items)) for items in small.lists)
    swapped = dataclasses.replace(small, transfers=tuple(transfers), lists=lists)
    sends = [i.transfer for m, p in swapped.order if isinstance(i := swapped.lists[m][p], Send)]
    assert sends == list(range(len(transfers)))


def test_a_send_that_is_lost_raises_and_does_not_hang(small: Program) -> None:
    for number in range(len(small.transfers)):
        lost = without(small, Send(number))
        with pytest.raises(PlanError, match=r"wait for each other: .*submesh \d at "):
            assert lost.order
        with pytest.raises(PlanError, match=f"transfer {number}, .* is never sent"):
            programs.check(lost)
        with pytest.raises(PlanError, match=f"transfer {number}, .* is never received"):
            programs.check(without(small, Receive(number)))


def receives_before_sends(program: Program) -> Program:
    for mesh in (0, 1):
        at = place(program, mesh, Receive)
        program = edited(program, mesh, lambda items, at=at: items.insert(0, items.pop(at)))
    return program


def received_as(**fields: object) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        buffers, (number,) = list(program.buffers), program.transfers[0].received_buffers
        buffers[number] = buffers[number]._replace(**fields)
        return dataclasses.replace(program, buffers=tuple(buffers))

    return change


def received_nowhere(program: Program) -> Program:
    transfers = (dataclasses.replace(program.transfers[0], received_buffers=()), *program.transfers[1:])
    return dataclasses.replace(program, transfers=transfers)


def free_of(program: Program) -> Instruction:
    return program.lists[0][place(program, 0, Free)]


def update_that_donates_twice(program: Program) -> Program:
    update = program.lists[0][-1]
    assert isinstance(update, Run)
    twice = dataclasses.replace(update, inputs=(update.inputs[0], update.inputs[0]))
    return inserted(without(program, update), 0, end(program) - 1, twice)


def run_elsewhere(program: Program) -> Program:
    run = program.lists[0][place(program, 0, Run)]
    return inserted(without(program, run), 1, 0, run)


def run_again(program: Program) -> Program:
    run = next(i for i in program.lists[0] if isinstance(i, Run) and i.microbatch == 0)
    return inserted(program, 0, place(program, 0, Send), dataclasses.replace(run, inputs=run.inputs))


def constant_that_ends(program: Program) -> Program:
    return dataclasses.replace(program, constants=(program.inputs[0],), inputs=((), *program.inputs[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (receives_before_sends, r"submesh 0 at receive 1 buffers of micro-batch 0 \(transfer \d+\) from submesh 1"),
        (lambda p: inserted(p, 0, place(p, 0, Send), Send(0)), "occurs twice"),
        (lambda p: inserted(without(p, Receive(0)), 0, end(p), Receive(0)), "of submesh 0, not of submesh 1"),
        (lambda p: inserted(p, 0, 0, Receive(0)), "of submesh 0, not of submesh 1"),
        (received_nowhere, "0 are received"),
        (received_as(shape=(5,)), "value to of stage 0 changes its shape or dtype"),
        (received_as(dtype=np.dtype("int32")), "value to of stage 0 changes its shape or dtype"),
        (lambda p: without(p, free_of(p)), r"1 buffers are never freed: \d+ \(value to of stage 0\)"),
        (lambda p: inserted(p, 0, end(p), free_of(p)), r"uses buffer .* after its end"),
        (lambda p: inserted(p, 0, 0, free_of(p)), r"uses buffer .* before its definition"),
        (run_again, r"defines buffer .* a second time"),
        (lambda p: inserted(p, 0, end(p), Free((p.outputs[0],))), "outputs of the step are freed before its end"),
        (lambda p: inserted(p, 0, 0, Free((p.inputs[1][0],))), r"uses buffer .* of submesh 1"),
        (run_elsewhere, "on submesh 1 is an executable of submesh 0"),
        (update_that_donates_twice, "run stage 0 update donates buffer 0, which it reads twice"),
        (constant_that_ends, "ends buffer 0, a constant of the step"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_named(small: Program, change: Callable[[Program], Program], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        programs.check(change(small))


def test_shared_arguments_count_once(small: Program) -> None:
    buffers = tuple(b._replace(bytes=0 if n else 10) for n, b in enumerate(small.buffers))
    shared = dataclasses.replace(small, buffers=buffers, inputs=(*small.inputs, small.inputs[0]))
    programs.check(shared)
    assert programs.peak_bytes(shared)[0] == 10
