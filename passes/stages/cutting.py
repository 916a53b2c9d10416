"""Cuts the local program of one stage into the functions that a schedule runs.

Problem. A stage is planned and lowered as one step (`staging`): [prologue] [loop over micro-batches] [update]. A
pipeline runs its parts at different times: the prologue once; the loop's body forward, backward, and, if gradients of
parameters are computed apart, weight, each once for every micro-batch; the update once, or in rounds where stages
exchange values between (a global norm).

Answer. Instructions are sorted into segments by the op that they belong to; a resharding belongs to its first reader.
A value that one segment makes and a later one reads becomes an output of the one and an input of the other, a `Wire`,
in the layout that its register has. Values that a later segment can make again from state and the micro-batch's number
alone, without a matrix product or a gather, are made again: holding a gathered parameter or a mask for each micro-batch
in flight would cost memory for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence, Set

from alpa_lite.errors import PlanError
from alpa_lite.ir.graph import Lit
from alpa_lite.ir.program import Kind
from alpa_lite.passes.ir.flow import before_readers, find_computable, label_by_operands, label_by_readers, reach
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.primitives import CHEAP_TO_REPEAT
from alpa_lite.passes.lowering.program import (
    Body,
    Compute,
    GlobalOp,
    Instruction,
    LocalProgram,
    Loop,
    Operand,
    Reshard,
    read_before,
)
from alpa_lite.passes.stages.segments import Segment, Segments, Wire, WireKind
from alpa_lite.passes.stages.stage_graph import StageGraph


def cut(stage: StageGraph, program: LocalProgram, *, split_weights: bool) -> Segments:
    """Cuts a stage's local program into segments.

    Args:
      split_weights: whether gradients of parameters are computed in a segment of their own.

    Raises:
      PlanError: an operation that cannot run inside a region stands in the stage.
    """
    outside = [item for item in program.body.instructions if isinstance(item, GlobalOp)]
    if outside:
        raise PlanError(f"{outside[0].op.name} cannot run inside a pipeline stage; use one mesh for this step")
    return _Cut(stage, program, split_weights).segments()


def cut_whole_step(stage: StageGraph, program: LocalProgram) -> Segments:
    """Returns a stage as one segment that runs once, its micro-batches inside: what one mesh runs."""
    body = program.body
    outputs = [(Wire("literal", i) if isinstance(o, Lit) else Wire("top", o), o) for i, o in enumerate(body.outputs)]
    inputs = {Wire("top", register): (register,) for register in body.inputs}
    segment = _segment_of("step", 0, inputs, outputs, body.instructions)
    return Segments(stage, program, (segment,), body.outputs)


def _segment_of(
    kind: Kind,
    number: int,
    inputs: Mapping[Wire, Sequence[int]],
    outputs: Iterable[tuple[Wire, Operand]],
    instructions: Sequence[Instruction],
    preset: Sequence[tuple[int, Lit]] = (),
) -> Segment:
    """A segment by its wires: each input with the registers that it sets, each output with the operand on it."""
    taken, given = {wire: tuple(some) for wire, some in inputs.items()}, {wire: (operand,) for wire, operand in outputs}
    return Segment(kind, number, taken, given, tuple(instructions), tuple(preset))


def _registers(operands: Iterable[Operand]) -> set[int]:
    """Returns the operands that are no literals."""
    return {operand for operand in operands if not isinstance(operand, Lit)}


class _Cut:
    """The tables of one cut."""

    view: ScanView
    body: Body

    def __init__(self, stage: StageGraph, program: LocalProgram, split_weights: bool) -> None:
        self.stage, self.program, self.split = stage, program, split_weights
        items = program.body.instructions
        place = [i for i, item in enumerate(items) if isinstance(item, Loop) and item.op.index == stage.scan]
        self.loop: Loop | None = items[place[0]] if place else None  # type: ignore[assignment]
        self.early = items[: place[0]] if place else ()
        self.late = items[place[0] + 1 :] if place else items
        if self.loop is not None:
            self.view, (self.body,) = ScanView(self.loop.op), self.loop.bodies

    def segments(self) -> Segments:
        loop = self.loop
        items = [*([] if loop is None else self._body(loop)), *self._update()]
        prologue = [] if loop is None else self._prologue(loop, items)
        pairs = zip(self.stage.outputs, self.program.body.outputs, strict=True)
        finals = tuple(None if port.kind == "crossing" else operand for port, operand in pairs)
        return Segments(self.stage, self.program, (*prologue, *items), finals)

    # -- the loop's body ------------------------------------------------------------------------------------------

    def _body(self, loop: Loop) -> list[Segment]:
        items = self.body.instructions
        slices = self.stage.phases.num_slices
        count = 2 * slices if slices > 1 else 3 if self.split else 2
        phases = self._phases(items, count - 1)
        ends = self._ends({r: min(some) for item, some in zip(items, phases, strict=True) for r in item.results})
        segments: list[Segment] = []
        for phase, (own, wanted) in enumerate(_parts(items, phases, ends, count)):
            outputs = [(wire, operand) for wire, operand, p in ends if p == phase]
            outputs += [(Wire("saved", r), r) for r in wanted]
            if outputs or own:
                segments.append(self._segment(loop, *_named(phase, slices), own, outputs))
        return segments

    def _phases(self, items: Sequence[Instruction], last: int) -> list[Set[int]]:
        """0 forward, 1 backward, 2 weight for each instruction: not later than the first that reads its results.

        In slices of the sequence: 0 to `last`. An instruction whose results are made again has several.
        """
        stage, again, most = self.stage, self._remade(items), max(2, last)
        crossing = sum(port.kind == "crossing" for port in stage.outputs)
        sent = set(self.body.outputs[len(self.body.outputs) - crossing :])

        def choose(item: Instruction, readers: Set[int]) -> Set[int]:
            resharded = isinstance(item, Reshard)
            if resharded and (not readers or item.result in sent):
                return set()  # an output reads it, and other stages may wait for that: as early as its source
            own = most if resharded else stage.phases.phase_of(item.op.index, split_weights=True)
            return (readers if again.issuperset(item.results) else set()) | {min([own, *readers])}

        phases, _ = label_by_readers(items, choose)
        made: dict[int, int] = {}
        for n, item in enumerate(items):
            phases[n] = {min(phase, last) for phase in phases[n] or {made.get(item.reads[0], 0)}}
            made |= dict.fromkeys(item.results, min(phases[n]))
        return phases

    def _ends(self, made_in: Mapping[int, int]) -> list[tuple[Wire, Operand, int]]:
        """Returns the outputs of the body: wire, register or literal, and the phase that gives it out.

        A carry is given out where its new value is made, but not before the last read of the old.
        """
        last_read: dict[int, int] = {}
        for item in self.body.instructions:
            phase = max((made_in[r] for r in item.results), default=0)
            for register in item.reads:
                last_read[register] = max(phase, last_read.get(register, 0))

        def made(operand: Operand) -> int:
            return 0 if isinstance(operand, Lit) else made_in.get(operand, 0)

        after, ys = self.view.split_results(self.body.outputs)
        before = self.view.split_operands(self.body.inputs).carry
        crossing = [Wire("crossing", port.number) for port in self.stage.outputs if port.kind == "crossing"]
        last = len(self.body.outputs) - len(crossing)
        wires = [*(Wire("piece", i) for i in range(len(after), last)), *crossing]
        outputs: list[tuple[Wire, Operand, int]] = [
            (Wire("carry", i), operand, max(made(operand), last_read.get(register, 0)))
            for i, (register, operand) in enumerate(zip(before, after, strict=True))
            if operand != register
        ]
        return outputs + [(wire, operand, made(operand)) for wire, operand in zip(wires, ys, strict=True)]

    def _remade(self, items: Sequence[Instruction]) -> set[int]:
        """Returns the registers that any segment can make from state and the micro-batch's number, cheaply."""
        parts = self.view.split_operands(self.body.inputs)
        given = {*parts.consts, *parts.xs} - self._crossing_registers().keys()

        def is_cheap(item: Instruction) -> bool:
            return isinstance(item, Reshard) or (isinstance(item, Compute) and item.op.name in CHEAP_TO_REPEAT)

        return find_computable(items, given, is_cheap) - given

    def _crossing_registers(self) -> dict[int, int]:
        """Returns the body's registers for values from other stages, with the values' numbers."""
        ports = [port.number for port in self.stage.inputs if port.kind == "crossing"]
        return dict(zip(self.body.inputs[len(self.body.inputs) - len(ports) :], ports, strict=True))

    def _segment(
        self, loop: Loop, kind: Kind, number: int, items: Sequence[Instruction], outputs: Sequence[tuple[Wire, Operand]]
    ) -> Segment:
        """Returns a segment of the loop's body."""
        parts, operands = self.view.split_operands(self.body.inputs), self.view.split_operands(loop.operands)
        wire_of: dict[int, Wire | Lit] = {register: Wire("carry", i) for i, register in enumerate(parts.carry)}
        for register, operand in zip((*parts.consts, *parts.xs), (*operands.consts, *operands.xs), strict=True):
            name: WireKind = "slice" if register in parts.xs else "top"
            wire_of[register] = operand if isinstance(operand, Lit) else Wire(name, operand)
        wire_of |= {register: Wire("crossing", value) for register, value in self._crossing_registers().items()}
        inputs: dict[Wire, list[int]] = {}
        preset: list[tuple[int, Lit]] = []
        for register in _taken(items, outputs):
            wire = wire_of.get(register, Wire("saved", register))
            if isinstance(wire, Lit):
                preset.append((register, wire))
            else:
                inputs.setdefault(wire, []).append(register)
        if any(wire.kind == "slice" for wire in inputs):
            inputs[Wire("number", 0)] = []
        return _segment_of(kind, number, inputs, outputs, items, preset)

    # -- before and after -----------------------------------------------------------------------------------------

    def _needed(self, registers: Iterable[int]) -> list[Instruction]:
        """Returns the instructions before the loop that some registers need."""
        maker = {r: item for item in self.early for r in item.results}
        found = reach(registers, lambda r: maker[r].reads if r in maker else ())
        return [item for item in self.early if not found.keys().isdisjoint(item.results)]

    def _prologue(self, loop: Loop, later: Sequence[Segment]) -> list[Segment]:
        """Returns the segment before the loop, if any: made registers, and the first values of the carries."""
        used = {w.number for s in later if s.kind != "update" for w in s.inputs if w.kind in ("top", "slice")}
        carried = {w.number for s in later for w in (*s.inputs, *s.outputs) if w.kind == "carry"}
        start = self.view.split_operands(loop.operands).carry
        first: list[tuple[Wire, Operand]] = [(Wire("carry", i), start[i]) for i in sorted(carried)]
        items = self._needed(used | _registers(o for _, o in first))
        made = {r for item in items for r in item.results}
        updates = {w.number for s in later if s.kind == "update" for w in s.inputs if w.kind == "top"}
        outputs = [*((Wire("top", r), r) for r in sorted((used | updates) & made)), *first]
        inputs = {Wire("top", r): (r,) for r in _taken(items, outputs)}
        return [_segment_of("prologue", 0, inputs, outputs, items)] if outputs else []

    def _update(self) -> list[Segment]:
        """Returns the rounds of the update, with the instructions before the loop that only it needs.

        New state comes first among the results, and the old state in the same order first among the inputs: JAX gives
        the buffers of donated arguments to the results of their type as they come. Where a leaf's new value is written
        over another leaf, XLA copies old values that are still to be read: of Adam's state two thirds, measured.
        """
        stage = self.stage
        pairs = enumerate(zip(stage.outputs, self.program.body.outputs, strict=True))
        results = [(n, port, operand) for n, (port, operand) in pairs if port.kind != "crossing"]
        ends = _registers(operand for _, _, operand in results)
        items = self._wanted(ends)
        rounds = self._rounds(items)
        made_in = {r: rounds[n] for n, item in enumerate(items) for r in item.results}
        arriving = {r: made for r, made in self._arriving().items() if r in ends}  # returned as they come
        last = max([0, *rounds, *stage.late_rounds.values(), *arriving.values()])
        due: list[tuple[Wire, Operand, int]] = []
        for n, port, operand in results:
            given = stage.late_rounds[port.number] if port.kind == "late" else last
            if isinstance(operand, Lit):
                due.append((Wire("literal", n), operand, given))
            else:
                due.append((Wire("top", operand), operand, made_in.get(operand, given)))
        segments = []
        for current, (own, wanted) in enumerate(_parts(items, [{n} for n in rounds], due, last + 1)):
            outputs: dict[Wire, Operand] = {Wire("top", r): r for r in wanted}
            outputs |= {wire: operand for wire, operand, when in due if when == current}
            new = {wire: self._replaced[o] for wire, o in outputs.items() if o in self._replaced}
            outputs = {wire: outputs[wire] for wire in (*new, *outputs)}
            taken = _taken(own, outputs.items())
            old = [r for r in new.values() if r in taken]
            inputs = {self._top_wire(r): (r,) for r in dict.fromkeys([*old, *taken])}
            if outputs or own:
                segments.append(_segment_of("update", current, inputs, outputs.items(), own))
        return segments

    @functools.cached_property
    def _replaced(self) -> Mapping[Operand, int]:
        """The register of each new value of state: that of the old."""
        old, new = self.program.body.inputs, self.program.body.outputs
        pairs = ((new[output], old[argument]) for output, argument in self.stage.traced.state)
        return {register: replaced for register, replaced in pairs if not isinstance(register, Lit)}

    def _wanted(self, ends: set[int]) -> list[Instruction]:
        """The instructions after the loop that some results need, and those before it that the prologue leaves out.

        Instructions that lay out whole stacks of crossings are not among them.
        """
        operands = _registers(self.loop.operands) if self.loop is not None else ()
        prologue, wanted = set(self._needed(operands)), set(ends)
        found: list[Instruction] = []
        for item in reversed([*(item for item in self.early if item not in prologue), *self.late]):
            effects = not isinstance(item, Reshard) and item.op.has_effects
            if effects or not wanted.isdisjoint(item.results):
                found.append(item)
                wanted.update(item.reads)
        return found[::-1]

    def _top_wire(self, register: int) -> Wire:
        """Returns the wire of a register that the update reads."""
        results = self.loop.results if self.loop is not None else ()
        if register not in results:
            return Wire("top", register)
        i = results.index(register)
        return Wire("carry" if i < self.view.num_carry else "pieces", i)

    def _rounds(self, items: Sequence[Instruction]) -> list[int]:
        """Returns the round of each instruction: its op's, and not before what it reads."""

        def choose(item: Instruction, known: list[int]) -> int:
            return max([0 if isinstance(item, Reshard) else self.stage.rounds.get(item.op.index, 0), *known])

        return label_by_operands(items, choose, self._arriving())

    def _arriving(self) -> dict[int, int]:
        """Returns the first round that can read each register of a value that another stage makes late."""
        ports = zip(self.program.body.inputs, self.stage.inputs, strict=False)
        return {register: 1 + self.stage.late_rounds[port.number] for register, port in ports if port.kind == "late"}


def _parts(
    items: Sequence[Instruction],
    numbers: Sequence[Set[int]],
    ends: Sequence[tuple[Wire, Operand, int]],
    count: int,
) -> list[tuple[list[Instruction], list[int]]]:
    """Returns the instructions of each part of a straight line, and the registers that it makes for later parts.

    Args:
      numbers: the parts that run each instruction: the first, and others that make its results for themselves.
      ends: what is given out, by which part.
    """
    pairs = list(zip(items, numbers, strict=True))
    made_in = {r: min(some) for item, some in pairs for r in item.results}
    wanted: list[set[int]] = [set() for _ in range(count)]
    chosen: list[list[Instruction]] = []
    for part in range(count):
        own = [item for item, some in pairs if part in some]
        read = read_before(own) | _registers(operand for _, operand, end in ends if end == part)
        for register in made_in.keys() & read - {r for item in own for r in item.results}:
            wanted[made_in[register]].add(register)
        again = {item for item, some in pairs if part in some - {min(some)}}
        chosen.append(before_readers(own, again))  # gathered weights, which need memory until they are read
    return list(zip(chosen, map(sorted, wanted), strict=True))


def _taken(items: Sequence[Instruction], outputs: Iterable[tuple[Wire, Operand]]) -> list[int]:
    """Returns the registers that some instructions and outputs read and that the instructions do not make."""
    made = {r for item in items for r in item.results}
    return sorted((read_before(items) | _registers(operand for _, operand in outputs)) - made)


def _named(phase: int, slices: int) -> tuple[Kind, int]:
    """Returns the kind of a segment, and the slice of the sequence that it is of."""
    if phase < slices:
        return "forward", phase
    return ("backward", 2 * slices - 1 - phase) if phase < 2 * slices else ("weight", 0)
