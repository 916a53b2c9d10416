"""The bytes that one run of a segment needs in addition to its inputs and outputs.

Registers live from where they are written to where they are last read. Those that the compiled program holds in memory
(`costs.fusion`) take it: operands of products, collectives and loops, results of reductions and products, and values
that several kernels read. A loop kernel writes its result over an operand of equal size that nobody needs after it. The
buffer of an output holds one other value at a time until it is written, but for those that are given as inputs and
added to.

An output pack is joined when all its members are there. On CPUs that is the end of the program, and a library call, to
which each member is given. On GPUs it is a loop, which takes in the loops that make the members; where the pack is
given, it is joined apart from it and copied. A GPU's product adds to a sum where that is. TPUs are taken to be like
GPUs, which was not measured.

On CPUs reductions are library calls, too; products copy operands whose dims they want in another order; values copied
out of a pack are copied first; and the gradient of a maximum over windows finds its place by an index for each dim.
The CPU compiler of JAX 0.10 also computes half-precision values in float32, and converts them back at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.passes.costs import fusion
from alpa_lite.passes.costs.items import Item, item_of
from alpa_lite.passes.ir.primitives import ADDS, PRODUCTS
from alpa_lite.passes.ir.remembered import Memo, memoise_by_identity
from alpa_lite.passes.lowering.program import Body, Compute, Instruction, Loop, Reshard
from alpa_lite.passes.sharding.space import block_count
from alpa_lite.passes.stages.segments import Segment, Segments

_HALVES = (np.dtype("float16"), jnp.dtype("bfloat16"))


def temporary_bytes(
    segments: Segments, segment: Segment, platform: str, *, of: Container[int] | None = None,
    again: Sequence[Instruction] = (),
) -> int:  # fmt: skip
    """Predicted bytes per device that a run needs beyond its inputs and outputs, at the fullest point.

    Args:
      platform: of the devices, as `Cluster.platform`.
      of: the values whose bytes are counted; None for all.
      again: instructions that are done first, whose results are no inputs then.
    """
    outputs = {w: tuple(o for o in some if not isinstance(o, Lit)) for w, some in segment.outputs.items()}
    packs = [(some, wire in segment.inputs) for wire, some in outputs.items() if some and wire in segments.packs]
    members = {register for pack, _ in packs for register in pack}
    ends = {register for some in outputs.values() for register in some} - members
    kept = {register for wire, some in outputs.items() if wire in segment.inputs for register in some} - members
    # Inputs that are part of a pack or of the whole batch: some readers want them copied out.
    parts = [some for wire, some in segment.inputs.items() if wire in segments.packs or wire.kind == "slice"]
    apart = {register for some in parts for register in some}
    return int(_Sizes(segments, platform, of).peak((*again, *segment.instructions), ends, kept, packs, apart))


def _turned(op: Op, ranks: Sequence[int]) -> set[int]:
    """Returns the operands and the result (2) of a product whose dims a library call on CPUs wants in another order."""
    numbers = op.params["dimension_numbers"]
    if op.name == "dot_general":
        found = set()
        for n, (contracted, batch) in enumerate(zip(*numbers, strict=True)):
            first, last = len(batch), ranks[n] - len(contracted)
            places = [tuple(range(at, at + len(contracted))) for at in ((last,), (first, last))[n]]
            if tuple(batch) != tuple(range(first)) or tuple(contracted) not in places:
                found.add(n)
        return found
    last = ranks[0] - 1
    images, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    asked = zip(numbers, (images, kernel, images), strict=True)
    return {n for n, (given, wanted) in enumerate(asked) if tuple(given) != wanted}


def _slots(
    items: Sequence[Item], lives: Mapping[int, tuple[float, float]], sizes: Mapping[int, int], free: Collection[int],
    *, in_place: bool,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Returns the slots in which buffers are in use, two for each item, of which kernels that run early have the first.

    Args:
      free: registers whose buffers are not counted.
      in_place: whether updates write over their operand, as loops do.

    Returns:
      Rows (first slot, last slot, bytes): of temporaries, and of outputs, which are written in their first.
    """
    ending: dict[float, list[int]] = {}
    for register, (start, end) in lives.items():
        if start < end < len(items):
            ending.setdefault(end, []).append(sizes[register])
    temporaries, outputs = [(0, 0, 0)], [(0, 0, 0)]
    for register, (start, end) in lives.items():
        if register in free:
            continue
        first, last, size = int(2 * start) + 1, int(2 * end) + 1, sizes[register]
        over = ending.get(start, ())
        kind = items[math.ceil(start)].kind
        if (start % 1 or kind == "loop" or (in_place and kind == "update")) and size in over:
            ending[start].remove(size)
            first += 1
        if end == len(items):
            outputs.append((first, last, size))
        elif first <= last:
            temporaries.append((first, last, size))
    return np.array(temporaries), np.array(outputs)


def _fullest(temporaries: np.ndarray, outputs: np.ndarray, inner: np.ndarray) -> float:
    """Returns the most bytes of temporaries that are in use at once, beyond the buffers of outputs.

    The buffer of an output holds one other value at a time until it is written: compilers do not divide it.

    Args:
      temporaries, outputs: as `_slots` returns them.
      inner: bytes that are needed in each slot besides.
    """
    change = np.zeros(len(inner) + 1)
    np.add.at(change, temporaries[:, 0], temporaries[:, 2])
    np.add.at(change, temporaries[:, 1] + 1, -temporaries[:, 2])
    full = np.cumsum(change)[:-1] + inner
    found = 0.0
    for slot in np.argsort(-full, kind="stable"):
        if full[slot] <= found:
            break
        here = (temporaries[:, 0] <= slot) & (slot <= temporaries[:, 1])
        own = sorted(temporaries[here, 2].tolist(), reverse=True)
        rooms = sorted(outputs[outputs[:, 0] > slot, 2].tolist(), reverse=True)
        found = max(found, float(full[slot]) - _placed(own, rooms))
    return found


def _placed(values: Sequence[int], rooms: Sequence[int]) -> int:
    """Returns the bytes of values that find a room of their own, the largest first; both are given from the largest."""
    placed = n = 0
    for size in values:
        if n < len(rooms) and size <= rooms[n]:
            placed, n = placed + size, n + 1
    return placed


_known_items: Callable[[Segments], Memo] = memoise_by_identity(lambda _: Memo())
"""Items by instruction: a run is weighed with several contents and for several values."""


class _Sizes:
    """Bytes of registers."""

    def __init__(self, segments: Segments, platform: str, of: Container[int] | None) -> None:
        self.of = of
        self.known = _known_items(segments)
        self.values: Sequence[Value] = segments.stage.traced.graph.values
        self.value_of = segments.value_of
        self.registers = segments.program.registers
        self.mesh = segments.program.mesh
        self.on_cpu = platform == "cpu"
        self.widens = self.on_cpu and _jax.WIDENS_HALVES

    def value(self, register: int) -> Value:
        """Returns the whole value that a register holds a block of."""
        return self.values[self.value_of[register]]

    def bytes(self, register: int) -> int:
        """That are counted."""
        if self.of is not None and self.value_of[register] not in self.of:
            return 0
        size = self.value(register).nbytes // block_count(self.registers[register], self.mesh)
        return 2 * size if self.widens and self.value(register).dtype in _HALVES else size

    def elements(self, register: int) -> int:
        value = self.value(register)
        return value.nbytes // block_count(self.registers[register], self.mesh) // max(1, value.itemsize)

    def peak(
        self,
        instructions: Sequence[Instruction],
        outputs: set[int],
        kept: set[int],
        packs: Sequence[tuple[tuple[int, ...], bool]],
        apart: Collection[int],
    ) -> float:
        """Returns the most bytes of registers that are written here and in memory, beyond the buffers of the outputs.

        Args:
          outputs: registers that are needed afterwards.
          kept: those of them whose buffers are given, with what is added to.
          packs: what is joined, and whether the buffer that it is joined in is given.
          apart: registers that are given as a part of something, and are copied out of it where more than loops read
            them: from the first such instruction, or on CPUs from the start, to the last.
        """
        items = [self.known.get_or_make((one, self.on_cpu), partial(self.item, one)) for one in instructions]
        made = {r for instruction in instructions for r in instruction.results}
        sizes = {r: self.bytes(r) for r in {r for i in instructions for r in i.reads} | made | outputs}
        if not self.on_cpu:
            items = self.merge_additions(items, instructions, kept)
        joined = self.join_packs(items, sizes, packs)
        given = {buffer for buffer, (_, is_given) in zip(joined, packs, strict=True) if is_given}
        outputs = outputs | set(joined)
        if self.widens:
            first = dict(zip(joined, (registers[0] for registers, _ in packs), strict=True))
            wide = {r for r in outputs - kept - given if self.value(first.get(r, r)).dtype in _HALVES}
            outputs = outputs - wide | self.narrow_outputs(items, sizes, wide)
        lives = fusion.lifetimes(items, sizes, outputs)
        for buffer in given & lives.keys():  # what is joined is copied there
            lives[buffer] = lives[buffer][0], lives[buffer][0]
        for n, item in enumerate(items if apart else ()):
            for register in item.operands:
                if register in apart and item.kind in ("library", "control"):
                    lives[register] = (0 if self.on_cpu else lives.get(register, (n, n))[0]), n
        free = kept | (given if self.on_cpu else set())
        inner = np.zeros(2 * len(items) + 2)
        inner[1 : 2 * len(instructions) : 2] = [self.inner_bytes(instruction, made) for instruction in instructions]
        return _fullest(*_slots(items, lives, sizes, free, in_place=not self.on_cpu), inner)

    def join_packs(
        self, items: list[Item], sizes: dict[int, int], packs: Sequence[tuple[tuple[int, ...], bool]]
    ) -> list[int]:
        """Returns the buffers that packs are joined in, numbered below all registers; adds the items that join them."""
        buffers = [-1 - n for n in range(len(packs))]
        for buffer, (registers, _) in zip(buffers, packs, strict=True):
            sizes.update((r, self.bytes(r)) for r in registers if r not in sizes)
            sizes[buffer] = sum(sizes[r] for r in registers)
            elements = sum(self.elements(r) for r in registers)
            items.append(Item("library" if self.on_cpu else "loop", registers, (buffer,), elements))
        return buffers

    def narrow_outputs(self, items: list[Item], sizes: dict[int, int], wide: set[int]) -> set[int]:
        """Returns the half-precision buffers of outputs in float32; adds the items that convert them at the end."""
        least = min([0, *sizes])
        numbers = range(least - len(wide), least)
        for number, register in zip(numbers, sorted(wide), strict=True):
            items.append(Item("loop", (register,), (number,), 0))
            sizes[number] = sizes[register] // 2
        return set(numbers)

    def merge_additions(self, items: Sequence[Item], instructions: Sequence[Instruction], kept: set[int]) -> list[Item]:
        """Returns the items, those products that are added to a sum whose buffer is given with the addition in them.

        Products of GPUs write alpha a b + beta c over c, converted or turned on the way.
        """
        users: dict[int, list[int]] = {}
        for n, item in enumerate(items):
            for register in dict.fromkeys(item.operands):
                users.setdefault(register, []).append(n)
        out = list(items)
        for n, (item, instruction) in enumerate(zip(items, instructions, strict=True)):
            if item.kind != "library" or not isinstance(instruction, Compute) or instruction.op.name != "dot_general":
                continue
            register, end = item.results[0], n
            while len(users.get(register, ())) == 1:
                (end,) = users[register]
                one = len(items[end].operands) == len(items[end].results) == 1
                if not one or items[end].kind not in ("loop", "view"):
                    break
                (register,) = items[end].results
            last = instructions[end]
            whole = self.elements(item.results[0]) == items[end].elements
            if whole and isinstance(last, Compute) and last.op.name in ADDS and not kept.isdisjoint(items[end].results):
                more = [r for r in items[end].operands if r != register]
                out[n] = Item("library", (*item.operands, *more), items[end].results, item.elements)
                out[end] = Item("view", (), (), 0)
        return out

    def inner_bytes(self, instruction: Instruction, made: Collection[int]) -> float:
        """Returns the bytes that an instruction needs for itself while it runs.

        Args:
          made: the registers that are written here; what is given in half precision is brought to float32.
        """
        if isinstance(instruction, Loop):
            return max((self.body(body) for body in instruction.bodies), default=0.0)
        if not self.on_cpu or not isinstance(instruction, Compute):
            return 0.0
        op = instruction.op
        if op.name == "select_and_scatter_add":
            source, operand = (0 if isinstance(o, Lit) else self.elements(o) for o in instruction.operands[:2])
            rank = len(self.value(instruction.results[0]).shape)
            return 4.0 * ((rank + 1) * operand + 2 * rank * source)  # indices, and the operand with its border
        if op.name in PRODUCTS:
            atoms = (*instruction.operands, *instruction.results)
            ranks = [len(o.aval.shape if isinstance(o, Lit) else self.value(o).shape) for o in atoms]
            turned = [atoms[n] for n in _turned(op, ranks)]
            wide = [o for o in instruction.reads if self.widens and o not in made and self.value(o).dtype in _HALVES]
            return float(sum(self.bytes(atom) for atom in (*turned, *wide) if not isinstance(atom, Lit)))
        return 0.0

    def body(self, body: Body) -> float:
        """The bytes of one trip of a loop: what it makes for the next one is in memory beside what it was given."""
        outputs = {o for o in body.outputs if not isinstance(o, Lit)}
        own = sum(self.bytes(r) for r in outputs & {r for i in body.instructions for r in i.results})
        return own + self.peak(body.instructions, outputs, set(), (), ())

    def item(self, instruction: Instruction) -> Item:
        """Returns an instruction, for the rule of fusion: blocks in place of whole values."""
        operands, results = instruction.reads, instruction.results
        if isinstance(instruction, Loop):
            return Item("control", operands, results, 0)
        if isinstance(instruction, Reshard):
            moves = any(step.kind != "slice" for step in instruction.steps)
            return Item(
                "library" if moves else "loop", operands, results, self.elements(results[0]), reads_part=not moves
            )
        if not isinstance(instruction, Compute):
            return Item("library", operands, results, 0)
        found = item_of(instruction.op, self.values)
        # What products accumulate in place is said by `merge_additions`.
        kind = "library" if found.kind == "product" or (found.kind == "reduce" and self.on_cpu) else found.kind
        through = operands if kind == "reduce" else results
        update = found.update
        if update[1]:
            place = instruction.op.operands.index(update[0])
            written = instruction.operands[place]
            update = (-1, 0) if isinstance(written, Lit) else (written, update[1])
        elements = max([self.elements(r) for r in through], default=0)
        return Item(kind, operands, results, elements, found.reads_part, found.row, update, found.is_expensive)
