"""The program of a pipelined step: stage executables, and one list of instructions for each submesh.

A `Program` is data: it holds no devices, and it is printed, checked, simulated and executed from the same lists. Each
submesh walks its own list in order. The lists meet only in transfers: `Send` in the source's list starts one, `Receive`
in the destination's waits for it. Transfers are numbered in the one order in which every process must issue them.

Values between instructions are *buffers*: one array on one submesh, at one time. A buffer is defined once (as an input
of the step, by a run, or by a receive), read any number of times, and ends once: freed, donated to a run, or returned.

`check` proves what a list must have: every buffer defined before its use, ended once, nothing leaked, no deadlock.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from alpa_lite.errors import PlanError
from alpa_lite.ir.layout import Layout, LogicalMesh, local_shape

Kind = Literal["prologue", "forward", "backward", "weight", "update", "step"]
"""prologue: once, before the micro-batches. forward, backward, weight: once for each micro-batch; with `weight`, the
gradients of parameters are computed apart from those of activations. update: once, after them. step: all of it, once,
with its micro-batches inside."""


@dataclass(frozen=True)
class Submesh:
    """Consecutive devices of the cluster, as a logical mesh. `first` is the number of its first device."""

    mesh: LogicalMesh
    first: int

    @property
    def devices(self) -> range:
        """The numbers of its devices, in mesh order (last axis fastest)."""
        return range(self.first, self.first + self.mesh.size)


class Buffer(NamedTuple):
    """One array on one submesh. A named tuple, since a pipeline of many micro-batches has a million of them.

    Attributes:
      mesh: the number of the submesh.
      layout: of the global array; a partial sum has been given a leading dim for its summands, so nothing is partial.
      shape, dtype: of the global array. A random key has its logical shape and its key dtype.
      bytes: of one device's block.
      microbatch: the micro-batch that it belongs to, or -1.
      name: for messages: the path of an argument, or the operation that makes it.
    """

    mesh: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    microbatch: int = -1
    name: str = ""


def buffer(mesh: int, submesh: Submesh, layout: Layout, shape: tuple[int, ...], dtype: Any, **rest: Any) -> Buffer:
    """Returns a buffer with its bytes counted. Raises ValueError where the shape does not divide."""
    size = math.prod(local_shape(shape, layout, submesh.mesh)) * int(getattr(dtype, "itemsize", 4))
    return Buffer(mesh, layout, tuple(shape), dtype, size, **rest)


@dataclass(frozen=True)
class Executable:
    """A compiled function of one submesh.

    Attributes:
      name: such as "stage 1 forward".
      mesh, stage: the submesh, and the stage (several stages may share a submesh).
      kind: see `Kind`.
      donated_inputs: the positions of the inputs whose buffers it consumes.
      seconds: predicted time of one run.
      slice: the slice of the sequence that it is of; -1 for whole sequences.
    """

    name: str
    mesh: int
    stage: int
    kind: Kind
    donated_inputs: tuple[int, ...]
    seconds: float
    slice: int = -1


@dataclass(frozen=True)
class Transfer:
    """Buffers that go together from one submesh to another.

    Attributes:
      source, destination: numbers of submeshes.
      sent_buffers, received_buffers: buffers, one by one: the same global array there and here, each in its own layout.
      seconds: predicted.
      microbatch: or -1.
    """

    source: int
    destination: int
    sent_buffers: tuple[int, ...]
    received_buffers: tuple[int, ...]
    seconds: float = 0.0
    microbatch: int = -1


@dataclass(frozen=True)
class Run:
    """Runs an executable. Its donated inputs end here."""

    executable: int
    microbatch: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Send:
    """Starts a transfer; the sent buffers stay defined until they are freed."""

    transfer: int


@dataclass(frozen=True)
class Receive:
    """Waits for a transfer and defines the received buffers."""

    transfer: int


@dataclass(frozen=True)
class Free:
    """Drops buffers."""

    buffers: tuple[int, ...]


Instruction = Run | Send | Receive | Free


@dataclass(frozen=True, eq=False)
class Program:
    """A pipelined step.

    Attributes:
      submeshes, executables, buffers, transfers: what instructions refer to by number. Transfers are in their global
        order.
      lists: the instructions of each submesh.
      inputs: for each flat argument of the step, the buffers that it is placed in: one for each submesh that reads it.
      constants: likewise for each closed-over constant. These are never freed.
      numbers: for each submesh, the buffers that hold the numbers of the micro-batches (int32 scalars), or none.
      outputs: the buffer of each flat result.
      schedule: its name.
      num_microbatches: how often stages run.
    """

    submeshes: tuple[Submesh, ...]
    executables: tuple[Executable, ...]
    buffers: tuple[Buffer, ...]
    transfers: tuple[Transfer, ...]
    lists: tuple[tuple[Instruction, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    constants: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...] = ()
    schedule: str = ""
    num_microbatches: int = 1

    def consumed_buffers(self, run: Run) -> tuple[int, ...]:
        """Returns the buffers that a run consumes."""
        return tuple(run.inputs[i] for i in self.executables[run.executable].donated_inputs)

    @functools.cached_property
    def order(self) -> tuple[tuple[int, int], ...]:
        """One order of all instructions, (submesh, position), that keeps every list's own: what one controller issues.

        Transfers are sent in their global order, and what waits for one goes on as soon as it is sent. Lists take
        turns, so that no submesh is left far behind. Takes time linear in the number of instructions, once.

        Raises:
          PlanError: the lists wait for each other.
        """
        positions = [0] * len(self.lists)
        out: list[tuple[int, int]] = []
        receivers: dict[int, int] = {}  # transfer that is not sent yet: the submesh that waits for it
        senders: dict[int, int] = {}  # transfer whose turn has not come: the submesh that waits to send it
        turns = deque(range(len(self.lists)))
        turn = 0
        while turns:
            mesh = turns.popleft()
            position = positions[mesh]
            if position == len(self.lists[mesh]):
                continue
            match self.lists[mesh][position]:
                case Receive(transfer=number) if number >= turn:
                    receivers[number] = mesh
                    continue
                case Send(transfer=number) if number != turn:
                    senders[number] = mesh
                    continue
                case Send(transfer=number):
                    turn += 1
                    turns.extend(w.pop(n) for w, n in ((receivers, number), (senders, turn)) if n in w)
            out.append((mesh, position))
            positions[mesh] += 1
            turns.append(mesh)
        stuck = [m for m, items in enumerate(self.lists) if positions[m] < len(items)]
        if stuck:
            waiting = ", ".join(f"submesh {m} at {describe(self, self.lists[m][positions[m]])}" for m in stuck)
            raise PlanError(f"the lists of the program wait for each other: {waiting}")
        return tuple(out)


def check(program: Program) -> None:
    """Raises PlanError unless every buffer is defined before use, ended exactly once, and nothing waits forever.

    Also: every transfer is sent once and received once, by the submeshes that it names and of equal arrays; and a run
    is on the submesh of its executable and donates no buffer that it also reads under another argument.
    """
    _check_transfers(program)
    kept = {b for group in (*program.constants, *program.numbers) for b in group}
    where = [buffer.mesh for buffer in program.buffers]
    live: list[set[int]] = [set() for _ in program.submeshes]  # of each submesh
    for number in _given(program):
        live[where[number]].add(number)
    defined = set().union(*live)

    def need(buffers: Sequence[int], mesh: int, item: Instruction) -> None:
        if live[mesh].issuperset(buffers):
            return
        number = next(b for b in buffers if b not in live[mesh])
        if number in live[where[number]]:
            raise PlanError(f"{describe(program, item)} uses buffer {number} of submesh {where[number]}")
        why = "after its end" if number in defined else "before its definition"
        raise PlanError(f"{describe(program, item)} uses buffer {number} ({program.buffers[number].name}) {why}")

    def define(buffers: Sequence[int], mesh: int, item: Instruction) -> None:
        for number in buffers:
            if number in defined:
                raise PlanError(f"{describe(program, item)} defines buffer {number} a second time")
            if where[number] != mesh:
                raise PlanError(f"{describe(program, item)} defines buffer {number} of submesh {where[number]}")
            defined.add(number)
        live[mesh].update(buffers)

    def end(buffers: Sequence[int], mesh: int, item: Instruction) -> None:
        if not kept.isdisjoint(buffers):
            number = next(b for b in buffers if b in kept)
            raise PlanError(f"{describe(program, item)} ends buffer {number}, a constant of the step")
        live[mesh].difference_update(buffers)

    for mesh, position in program.order:
        item = program.lists[mesh][position]
        match item:
            case Run(inputs=inputs, outputs=outputs):
                if (there := program.executables[item.executable].mesh) != mesh:
                    raise PlanError(f"{describe(program, item)} on submesh {mesh} is an executable of submesh {there}")
                need(inputs, mesh, item)
                consumed = program.consumed_buffers(item)
                if repeated := [number for number in consumed if inputs.count(number) > 1]:
                    raise PlanError(f"{describe(program, item)} donates buffer {repeated[0]}, which it reads twice")
                end(consumed, mesh, item)
                define(outputs, mesh, item)
            case Send(transfer=number):
                need(program.transfers[number].sent_buffers, mesh, item)
            case Receive(transfer=number):
                define(program.transfers[number].received_buffers, mesh, item)
            case Free(buffers=buffers):
                need(buffers, mesh, item)
                if len(set(buffers)) < len(buffers):
                    raise PlanError(f"{describe(program, item)} names one of them twice")
                end(buffers, mesh, item)
    _check_end(program, set().union(*live), kept)


def _check_end(program: Program, remaining: Set[int], kept: Set[int]) -> None:
    """Raises PlanError unless all outputs remain at the end of a step, and of other buffers the constants alone."""
    leaked = remaining - kept - set(program.outputs)
    if leaked:
        names = ", ".join(f"{b} ({program.buffers[b].name})" for b in sorted(leaked)[:5])
        raise PlanError(f"{len(leaked)} buffers are never freed: {names}")
    missing = set(program.outputs) - remaining
    if missing:
        raise PlanError(f"outputs of the step are freed before its end: {sorted(missing)}")


def _check_transfers(program: Program) -> None:
    sends: set[int] = set()
    receives: set[int] = set()
    for mesh, items in enumerate(program.lists):
        for item in items:
            if not isinstance(item, Send | Receive):
                continue
            transfer = program.transfers[item.transfer]
            seen, end = (sends, transfer.source) if isinstance(item, Send) else (receives, transfer.destination)
            if mesh != end:
                raise PlanError(f"{describe(program, item)} is in the list of submesh {mesh}, not of submesh {end}")
            if item.transfer in seen:
                raise PlanError(f"{describe(program, item)} occurs twice")
            seen.add(item.transfer)
    for number, transfer in enumerate(program.transfers):
        for verb, seen in (("sent", sends), ("received", receives)):
            if number not in seen:
                raise PlanError(f"transfer {number}, {_what(program, number)}, is never {verb}")
        ends = ([program.buffers[b] for b in side] for side in (transfer.sent_buffers, transfer.received_buffers))
        wrong = next((a for a, b in zip(*ends, strict=False) if (a.shape, a.dtype) != (b.shape, b.dtype)), None)
        received = len(transfer.received_buffers)
        if len(transfer.sent_buffers) != received or wrong:
            what = f"{wrong.name} changes its shape or dtype" if wrong else f"{received} are received"
            raise PlanError(f"{_what(program, number)} from submesh {transfer.source}: {what}")


def keep_owned_buffers(program: Program, owned: Collection[int]) -> Program:
    """Returns the program that consumes none of the `owned` buffers, such as arguments that the caller keeps.

    A run that consumed them is followed by a `Free`, so that each buffer still ends once, in the same place.
    """
    spared: dict[int, set[int]] = {}  # executable -> positions
    lists = []
    for items in program.lists:
        new: list[Instruction] = []
        for item in items:
            new.append(item)
            if isinstance(item, Run) and not set(owned).isdisjoint(program.consumed_buffers(item)):
                new.append(Free(tuple(b for b in program.consumed_buffers(item) if b in owned)))
                donated = program.executables[item.executable].donated_inputs
                spared.setdefault(item.executable, set()).update(i for i in donated if item.inputs[i] in owned)
        lists.append(tuple(new))
    executables = list(program.executables)
    for number, positions in spared.items():
        kept = tuple(i for i in executables[number].donated_inputs if i not in positions)
        executables[number] = replace(executables[number], donated_inputs=kept)
    return replace(program, executables=tuple(executables), lists=tuple(lists))


def peak_bytes(program: Program) -> tuple[int, ...]:
    """Returns the most bytes per device of buffers on each submesh, between two instructions of `Program.order`.

    The result of a transfer takes memory from its send on: it may arrive at any time from then, wanted or not.
    """
    held = [0] * len(program.submeshes)
    for number in _given(program):
        held[program.buffers[number].mesh] += program.buffers[number].bytes
    peaks = held.copy()
    for mesh, position in program.order:
        begun, ended = tuple[int, ...](), tuple[int, ...]()
        match program.lists[mesh][position]:
            case Run() as run:
                begun, ended = run.outputs, program.consumed_buffers(run)
            case Send(transfer=number):
                begun = program.transfers[number].received_buffers
            case Free(buffers=buffers):
                ended = buffers
        for numbers, sign in ((begun, 1), (ended, -1)):
            for number in numbers:
                held[program.buffers[number].mesh] += sign * program.buffers[number].bytes
        for number in begun:
            where = program.buffers[number].mesh
            peaks[where] = max(peaks[where], held[where])
    return tuple(peaks)


def _given(program: Program) -> set[int]:
    """Returns the buffers that exist before the step. Arguments may share one."""
    return {number for group in (*program.inputs, *program.constants, *program.numbers) for number in group}


def describe(program: Program, item: Instruction) -> str:
    """Returns one line about an instruction."""
    match item:
        case Run(executable=number, microbatch=microbatch):
            part = f", micro-batch {microbatch}" if microbatch >= 0 else ""
            return f"run {program.executables[number].name}{part}"
        case Send(transfer=number):
            return f"send {_what(program, number)} to submesh {program.transfers[number].destination}"
        case Receive(transfer=number):
            return f"receive {_what(program, number)} from submesh {program.transfers[number].source}"
        case Free(buffers=buffers):
            return f"free {len(buffers)} buffers"


def _what(program: Program, number: int) -> str:
    transfer = program.transfers[number]
    part = f" of micro-batch {transfer.microbatch}" if transfer.microbatch >= 0 else ""
    return f"{len(transfer.sent_buffers)} buffers{part} (transfer {number})"


def text(program: Program) -> str:
    """Returns the whole program, a line an instruction."""
    lines = []
    for mesh, (submesh, items) in enumerate(zip(program.submeshes, program.lists, strict=True)):
        shape = " x ".join(map(str, submesh.mesh.shape))
        lines.append(f"submesh {mesh}: {shape}, devices {submesh.first} to {submesh.first + submesh.mesh.size - 1}")
        lines += [f"  {describe(program, item)}" for item in items]
    return "\n".join(lines)
