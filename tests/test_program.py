"""Programs as data: what `check` finds, what `order` promises, and how bytes are counted."""

import dataclasses

import numpy as np
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.ir import program as programs
from alpa_lite.ir import schedules
from alpa_lite.ir.program import Free, Instruction, Program, Receive, Run, Send
from tests.pipelines import every, toy


@pytest.fixture
def small() -> Program:
    return toy(schedules.schedule("1f1b", 2, 3))


def without(program: Program, dropped: Instruction) -> Program:
    lists = tuple(tuple(i for i in items if i != dropped) for items in program.lists)
    assert sum(map(len, lists)) == sum(map(len, program.lists)) - 1
    return dataclasses.replace(program, lists=lists)


def inserted(program: Program, mesh: int, position: int, item: Instruction) -> Program:
    items = list(program.lists[mesh])
    items.insert(position, item)
    return dataclasses.replace(program, lists=(*program.lists[:mesh], tuple(items), *program.lists[mesh + 1 :]))


def moved(program: Program, mesh: int, position: int, target: int) -> Program:
    items = list(program.lists[mesh])
    items.insert(target, items.pop(position))
    return dataclasses.replace(program, lists=(*program.lists[:mesh], tuple(items), *program.lists[mesh + 1 :]))


def changed(program: Program, number: int, **fields: object) -> Program:
    transfers = list(program.transfers)
    transfers[number] = dataclasses.replace(transfers[number], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(program, transfers=tuple(transfers))


def place(program: Program, mesh: int, kind: type) -> int:
    return next(n for n, item in enumerate(program.lists[mesh]) if isinstance(item, kind))


@pytest.mark.parametrize("made", every(), ids=lambda s: f"{s.name}-{s.num_meshes}x{s.virtual}-{s.num_microbatches}")
def test_every_schedule_checks_and_holds_what_it_should(made: schedules.Schedule) -> None:
    program = toy(made)
    programs.check(program)
    assert programs.peak_bytes(program) == schedules.in_flight(made)


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
    try:
        order = swapped.order
    except PlanError as error:
        pytest.fail(f"independent transfers may come in any order: {error}")
    sends = [i.transfer for m, p in order if isinstance(i := swapped.lists[m][p], Send)]
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


def test_lists_that_wait_for_each_other(small: Program) -> None:
    """Each submesh receives before it sends."""
    late = small
    for mesh in (0, 1):
        late = moved(late, mesh, place(late, mesh, Receive), 0)
    with pytest.raises(
        PlanError, match=r"submesh 0 at receive 1 buffers of micro-batch 0 \(transfer \d+\) from submesh 1"
    ):
        programs.check(late)


def test_transfers_belong_to_their_submeshes(small: Program) -> None:
    with pytest.raises(PlanError, match="occurs twice"):
        programs.check(inserted(small, 0, place(small, 0, Send), Send(0)))
    with pytest.raises(PlanError, match="is in the list of submesh 0, not of submesh 1"):
        programs.check(inserted(without(small, Receive(0)), 0, len(small.lists[0]), Receive(0)))
    with pytest.raises(PlanError, match="is in the list of submesh 0, not of submesh 1"):
        programs.check(inserted(small, 0, 0, Receive(0)))
    with pytest.raises(PlanError, match="0 are received"):
        programs.check(changed(small, 0, received=()))
    received = small.transfers[0].received[0]
    for field in ({"shape": (5,)}, {"dtype": np.dtype("int32")}):
        buffers = list(small.buffers)
        buffers[received] = buffers[received]._replace(**field)
        with pytest.raises(PlanError, match="value to of stage 0 changes its shape or dtype"):
            programs.check(dataclasses.replace(small, buffers=tuple(buffers)))


def test_buffers_are_defined_once_before_use_and_ended_once(small: Program) -> None:
    free = small.lists[0][place(small, 0, Free)]
    assert isinstance(free, Free)
    with pytest.raises(PlanError, match=r"1 buffers are never freed: \d+ \(value to of stage 0\)"):
        programs.check(without(small, free))
    with pytest.raises(PlanError, match=r"uses buffer .* after its end"):
        programs.check(inserted(small, 0, len(small.lists[0]), free))
    with pytest.raises(PlanError, match=r"uses buffer .* before its definition"):
        programs.check(inserted(small, 0, 0, free))
    run = next(i for i in small.lists[0] if isinstance(i, Run) and i.microbatch == 0)
    with pytest.raises(PlanError, match=r"defines buffer .* a second time"):
        programs.check(inserted(small, 0, place(small, 0, Send), dataclasses.replace(run, inputs=run.inputs)))
    with pytest.raises(PlanError, match="outputs of the step are freed before its end"):
        programs.check(inserted(small, 0, len(small.lists[0]), Free((small.outputs[0],))))
    with pytest.raises(PlanError, match=r"uses buffer .* of submesh 1"):
        programs.check(inserted(small, 0, 0, Free((small.inputs[1][0],))))


def test_runs_are_on_their_submesh_and_donate_once(small: Program) -> None:
    position = place(small, 0, Run)
    run = small.lists[0][position]
    assert isinstance(run, Run)
    other = moved_to(small, 1, position)
    with pytest.raises(PlanError, match="on submesh 1 is an executable of submesh 0"):
        programs.check(other)
    update = small.lists[0][-1]
    assert isinstance(update, Run)
    twice = dataclasses.replace(update, inputs=(update.inputs[0], update.inputs[0]))
    with pytest.raises(PlanError, match="run stage 0 update donates buffer 0, which it reads twice"):
        programs.check(inserted(without(small, update), 0, len(small.lists[0]) - 1, twice))


def moved_to(program: Program, mesh: int, position: int) -> Program:
    """The instruction of submesh 0 at `position` becomes the first of `mesh`."""
    item = program.lists[0][position]
    return inserted(without(program, item), mesh, 0, item)


def test_constants_are_never_ended(small: Program) -> None:
    constant = dataclasses.replace(small, constants=(small.inputs[0],), inputs=((), *small.inputs[1:]))
    with pytest.raises(PlanError, match="ends buffer 0, a constant of the step"):
        programs.check(constant)


def test_what_is_sent_counts_where_it_goes_from_its_send_on(small: Program) -> None:
    sizes = {"value to of stage 0": 3, "value of stage 1": 7}
    buffers = tuple(b._replace(bytes=sizes.get(b.name, 0)) for b in small.buffers)
    sized = dataclasses.replace(small, buffers=buffers)
    held = {(mesh, position): held for mesh, position, held in programs.live_bytes(sized)}
    assert list(held) == list(sized.order)
    before, there = (0, 0), 0
    for (mesh, position), now in held.items():
        item = sized.lists[mesh][position]
        if isinstance(item, Send) and mesh == 0:
            assert now == (before[0], before[1] + 7)
            there += 1
        elif isinstance(item, Receive):
            assert now == before
        before = now
    assert there == 3
    assert before == (0, 0)
    assert programs.peak_bytes(sized) == tuple(max(now[mesh] for now in held.values()) for mesh in (0, 1))


def test_shared_arguments_count_once(small: Program) -> None:
    buffers = tuple(b._replace(bytes=0) for b in small.buffers)
    buffers = (buffers[0]._replace(bytes=10), *buffers[1:])
    shared = dataclasses.replace(small, buffers=buffers, inputs=(*small.inputs, small.inputs[0]))
    programs.check(shared)
    assert programs.peak_bytes(shared)[0] == 10


class Counted(tuple[Instruction, ...]):
    """A list of instructions that counts how often it is looked at."""

    looks = 0

    def __getitem__(self, key):  # type: ignore[override]
        Counted.looks += 1
        return super().__getitem__(key)

    def __len__(self) -> int:
        Counted.looks += 1
        return super().__len__()


@pytest.mark.parametrize(("meshes", "microbatches"), [(4, 32), (16, 128)])
def test_order_is_linear(meshes: int, microbatches: int) -> None:
    """Looks at the lists a bounded number of times per instruction, however many submeshes there are."""
    program = toy(schedules.schedule("1f1b", meshes, microbatches))
    instructions = sum(map(len, program.lists))
    Counted.looks = 0
    assert dataclasses.replace(program, lists=tuple(map(Counted, program.lists))).order
    assert instructions < Counted.looks < 4 * instructions


def test_text_names_every_instruction(small: Program) -> None:
    text = programs.text(small)
    assert "submesh 1: 1, devices 1 to 1" in text
    assert "  run stage 1 backward, micro-batch 2" in text
    assert "  send 1 buffers of micro-batch 0 (transfer 0) to submesh 1" in text
    assert len(text.splitlines()) == 2 + sum(map(len, small.lists))
