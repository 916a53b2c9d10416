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
from collections.abc import Iterable, Mapping, Sequence

from alpa_lite.errors import PlanError
from alpa_lite.graph import Lit
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import reach
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.lowering.program import (
    Body,
    Compute,
    Instruction,
    LocalProgram,
    Loop,
    Operand,
    Outside,
    Reshard,
    read_before,
    reads,
    writes,
)
from alpa_lite.passes.stages.segments import Segment, Segments, Wire, WireKind
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.program import Kind

LATE = primitives.ELEMENTWISE | primitives.RESHAPES
"""Operations that cost nothing more in the round that reads them: a compiler computes them within what reads them."""


def cut(stage: StageGraph, program: LocalProgram, *, split_weights: bool) -> Segments:
    """Cuts a stage's local program into segments.

    Args:
      split_weights: whether gradients of parameters are computed in a segment of their own.

    Raises:
      PlanError: an operation that cannot run inside a region stands in the stage.
    """
    outside = [item for item in program.body.instructions if isinstance(item, Outside)]
    if outside:
        raise PlanError(f"{outside[0].op.name} cannot run inside a pipeline stage; use one mesh for this step")
    return _Cut(stage, program, split_weights).segments()


def _values_of(stage: StageGraph, program: LocalProgram) -> dict[int, int]:
    """For each register the value that it holds."""
    found = dict(zip(program.body.inputs, stage.traced.graph.block.inputs, strict=True))

    def visit(items: Iterable[Instruction]) -> None:
        for item in items:
            if isinstance(item, Reshard):
                found[item.result] = item.value
                continue
            found.update(zip(item.results, item.op.results, strict=True))
            if isinstance(item, Loop):
                for block, body in zip(item.op.bodies, item.bodies, strict=True):
                    found.update(zip(body.inputs, block.inputs, strict=True))
                    visit(body.instructions)

    visit(program.body.instructions)
    return found


def whole(stage: StageGraph, program: LocalProgram) -> Segments:
    """A stage as one segment that runs once, its micro-batches inside: what one mesh runs."""
    body = program.body
    outputs = tuple(
        Wire("literal", i) if isinstance(o, Lit) else Wire("top", o) for i, o in enumerate(body.outputs)
    )  # fmt: skip
    segment = Segment(
        kind="step",
        round=0,
        inputs=tuple(Wire("top", register) for register in body.inputs),
        binds=tuple((register,) for register in body.inputs),
        preset=(),
        outputs=outputs,
        reads=body.outputs,
        instructions=body.instructions,
    )
    return Segments(stage, program, (segment,), body.outputs, _values_of(stage, program))


class _Cut:
    """The tables of one cut."""

    def __init__(self, stage: StageGraph, program: LocalProgram, split_weights: bool) -> None:
        self.stage, self.program, self.split = stage, program, split_weights
        items = program.body.instructions
        place = [i for i, item in enumerate(items) if isinstance(item, Loop) and item.op.index == stage.scan]
        self.loop: Loop | None = items[place[0]] if place else None  # type: ignore[assignment]
        self.early = items[: place[0]] if place else ()
        self.late = items[place[0] + 1 :] if place else items
        self.value_of = _values_of(stage, program)

    def segments(self) -> Segments:
        items: list[Segment] = []
        if self.loop is not None:
            items += self._body()
        items += self._update()
        prologue = self._prologue(items)
        finals: list[Operand | None] = []
        for port, operand in zip(self.stage.outputs, self.program.body.outputs, strict=True):
            finals.append(None if port.kind == "crossing" else operand)
        return Segments(
            self.stage, self.program, (*([prologue] if prologue else []), *items), tuple(finals), self.value_of
        )

    # -- the loop's body ------------------------------------------------------------------------------------------

    def _body(self) -> list[Segment]:
        loop = self.loop
        assert loop is not None
        (body,) = loop.bodies
        items = body.instructions
        slices = self.stage.num_slices
        count = 2 * slices if self.stage.phases else 3 if self.split else 2
        phases = self._phases(items, body, count - 1)
        made_in = {r: phases[n] for n, item in enumerate(items) for r in writes(item)}
        segments: list[Segment] = []
        carried = self._carry_phases(body, made_in)
        wanted: dict[int, set[int]] = {phase: set() for phase in range(count)}
        chosen: dict[int, list[Instruction]] = {}
        maker = {r: item for item in items for r in writes(item)}
        cheap = self._remade(items, body)
        for phase in range(count):
            own = [item for n, item in enumerate(items) if phases[n] == phase]
            ends = [o for _, o, p in self._ends(body, made_in, carried) if p == phase and not isinstance(o, Lit)]
            needed = read_before(own) | {o for o in ends if made_in.get(o, phase) != phase}

            def elsewhere(registers: Iterable[int], phase: int = phase) -> list[int]:
                return [r for r in registers if made_in.get(r, phase) != phase]

            reached = reach(elsewhere(needed), lambda r: elsewhere(reads(maker[r])) if r in cheap else ())
            for register in reached.keys() - cheap:
                wanted[made_in[register]].add(register)
            again = {id(maker[r]) for r in reached if r in cheap}
            chosen[phase] = [item for n, item in enumerate(items) if phases[n] == phase or id(item) in again]
        for phase in range(count):
            kind, number = _named(phase, slices)
            outputs: list[tuple[Wire, Operand]] = [
                (wire, operand) for wire, operand, p in self._ends(body, made_in, carried) if p == phase
            ]
            outputs += [(Wire("saved", r), r) for r in sorted(wanted[phase])]
            finals = {o for _, o in outputs if not isinstance(o, Lit)}
            if not outputs and not chosen[phase]:
                continue
            segments.append(self._segment(kind, number, chosen[phase], outputs, body, finals))
        return segments

    @property
    def _view(self) -> ScanView:
        assert self.loop is not None
        return ScanView(self.loop.op)

    def _phases(self, items: Sequence[Instruction], body: Body, last: int) -> list[int]:
        """0 forward, 1 backward, 2 weight for each instruction: not later than the first that reads its results.

        In slices of the sequence: 0 to `last`.
        """
        stage = self.stage
        of = stage.phases
        crossing = sum(port.kind == "crossing" for port in stage.outputs)
        sent = set(body.outputs[len(body.outputs) - crossing :])
        first: dict[int, int] = {}
        out = [0] * len(items)
        for n in range(len(items) - 1, -1, -1):
            item = items[n]
            readers = [first[r] for r in writes(item) if r in first]
            if isinstance(item, Reshard):
                own = max(2, last)
            else:
                index = item.op.index
                own = of[index] if of else 2 if index in stage.weight else 1 if index in stage.backward else 0
            phase = min([own, *readers])
            if isinstance(item, Reshard) and (not readers or item.result in sent):
                phase = -1  # an output reads it, and other stages may wait for that: as early as its source
            out[n] = phase
            if phase >= 0:
                for register in reads(item):
                    first[register] = min(first.get(register, max(2, last)), phase)
        made: dict[int, int] = {}
        for n, item in enumerate(items):
            if out[n] < 0:
                out[n] = made.get(item.source, 0) if isinstance(item, Reshard) else 0
            out[n] = min(out[n], last)
            made.update(dict.fromkeys(writes(item), out[n]))
        return out

    def _ends(
        self, body: Body, made_in: Mapping[int, int], carried: Mapping[int, int]
    ) -> list[tuple[Wire, Operand, int]]:
        """Returns the outputs of the body: wire, register or literal, and the phase that gives it out."""
        after, ys = self._view.given(body.outputs)
        before = self._view.taken(body.inputs).carry
        crossing = [Wire("crossing", port.number) for port in self.stage.outputs if port.kind == "crossing"]
        wires = [Wire("piece", i) for i in range(len(after), len(body.outputs) - len(crossing))] + crossing
        outputs: list[tuple[Wire, Operand, int]] = [
            (Wire("carry", i), operand, carried[i]) for i, operand in enumerate(after) if operand != before[i]
        ]
        for wire, operand in zip(wires, ys, strict=True):
            outputs.append((wire, operand, 0 if isinstance(operand, Lit) else made_in.get(operand, 0)))
        return outputs

    def _carry_phases(self, body: Body, made_in: Mapping[int, int]) -> dict[int, int]:
        """The phase that updates each carry: where its new value is made, but not before the last read of the old."""
        last_read: dict[int, int] = {}
        for item in body.instructions:
            phase = max((made_in[r] for r in writes(item)), default=0)
            for register in reads(item):
                last_read[register] = max(phase, last_read.get(register, 0))
        out = {}
        pairs = zip(self._view.taken(body.inputs).carry, self._view.given(body.outputs).carry, strict=True)
        for carry, (register, operand) in enumerate(pairs):
            made = 0 if isinstance(operand, Lit) else made_in.get(operand, 0)
            out[carry] = max(made, last_read.get(register, 0))
        return out

    def _remade(self, items: Sequence[Instruction], body: Body) -> frozenset[int]:
        """The registers that any segment can make from state and the micro-batch's number, cheaply."""
        parts = self._view.taken(body.inputs)
        known = {*parts.consts, *parts.xs} - self._crossing_registers(body).keys()
        made: set[int] = set()
        for item in items:
            free = isinstance(item, Reshard) or (
                isinstance(item, Compute) and item.op.name in primitives.CHEAP_TO_REPEAT
            )
            if free and all(r in known for r in reads(item)):
                known.update(writes(item))
                made.update(writes(item))
        return frozenset(made)

    def _crossing_registers(self, body: Body) -> dict[int, int]:
        """The body's registers for values from other stages, with the values' numbers."""
        ports = [port.number for port in self.stage.inputs if port.kind == "crossing"]
        return dict(zip(body.inputs[len(body.inputs) - len(ports) :], ports, strict=True)) if ports else {}

    def _segment(
        self,
        kind: Kind,
        number: int,
        items: Sequence[Instruction],
        outputs: Sequence[tuple[Wire, Operand]],
        body: Body,
        finals: set[int],
    ) -> Segment:
        """A segment of the loop's body."""
        loop = self.loop
        assert loop is not None
        made = {r for item in items for r in writes(item)}
        taken = sorted((read_before(items) | finals) - made)
        parts, operands = self._view.taken(body.inputs), self._view.taken(loop.operands)
        wire_of: dict[int, Wire | Lit] = {register: Wire("carry", i) for i, register in enumerate(parts.carry)}
        for register, operand in zip((*parts.consts, *parts.xs), (*operands.consts, *operands.xs), strict=True):
            name: WireKind = "slice" if register in parts.xs else "top"
            wire_of[register] = operand if isinstance(operand, Lit) else Wire(name, operand)
        wire_of |= {register: Wire("crossing", value) for register, value in self._crossing_registers(body).items()}
        inputs: dict[Wire, list[int]] = {}
        preset: list[tuple[int, Lit]] = []
        for register in taken:
            wire = wire_of.get(register, Wire("saved", register))
            if isinstance(wire, Lit):
                preset.append((register, wire))
            else:
                inputs.setdefault(wire, []).append(register)
        if any(wire.kind == "slice" for wire in inputs):
            inputs[Wire("number", 0)] = []
        return Segment(
            kind=kind, round=number, inputs=tuple(inputs), binds=tuple(map(tuple, inputs.values())),
            preset=tuple(preset), outputs=tuple(w for w, _ in outputs),
            reads=tuple(o for _, o in outputs), instructions=tuple(items),
        )  # fmt: skip

    # -- before and after -----------------------------------------------------------------------------------------

    def _needed(self, registers: Iterable[int]) -> list[Instruction]:
        """The instructions before the loop that some registers need."""
        maker = {r: item for item in self.early for r in writes(item)}
        found = reach(registers, lambda r: reads(maker[r]) if r in maker else ())
        return [item for item in self.early if not found.keys().isdisjoint(writes(item))]

    def _prologue(self, later: Sequence[Segment]) -> Segment | None:
        """Returns the segment before the loop: made registers, and the first values of the carries; None if empty."""
        loop = self.loop
        if loop is None:
            return None
        inputs = set(self.program.body.inputs)
        used = {w.number for s in later if s.kind != "update" for w in s.inputs if w.kind in ("top", "slice")}
        carried = {w.number for s in later for w in (*s.inputs, *s.outputs) if w.kind == "carry"}
        start = self._view.taken(loop.operands).carry
        first = {i: start[i] for i in sorted(carried)}
        items = self._needed([*used, *(o for o in first.values() if not isinstance(o, Lit))])
        made = {r for item in items for r in writes(item)}
        updates = {w.number for s in later if s.kind == "update" for w in s.inputs if w.kind == "top"}
        outputs: list[tuple[Wire, Operand]] = [(Wire("top", r), r) for r in sorted((used | updates) & made)]
        outputs += [(Wire("carry", i), operand) for i, operand in first.items()]
        if not outputs:
            return None
        finals = {o for _, o in outputs if not isinstance(o, Lit)}
        taken = sorted((read_before(items) | finals) - made)
        assert all(r in inputs for r in taken)
        return Segment(
            kind="prologue",
            round=0,
            inputs=tuple(Wire("top", r) for r in taken),
            binds=tuple((r,) for r in taken),
            preset=(),
            outputs=tuple(w for w, _ in outputs),
            reads=tuple(o for _, o in outputs),
            instructions=tuple(items),
        )

    def _update(self) -> list[Segment]:
        """Returns the rounds of the update, with the instructions before the loop that only it needs.

        New state comes first among the results, and the old state in the same order first among the inputs: JAX gives
        the buffers of donated arguments to the results of their type as they come. Where a leaf's new value is written
        over another leaf, XLA copies old values that are still to be read: of Adam's state two thirds, measured.
        """
        stage = self.stage
        results = [
            (n, port, o)
            for n, (port, o) in enumerate(zip(stage.outputs, self.program.body.outputs, strict=True))
            if port.kind != "crossing"
        ]
        ends = {o for _, _, o in results if not isinstance(o, Lit)}
        before_loop = self._prologue_made()
        late = self._wanted(ends)
        needed = self._needed(read_before(late) | ends)
        items = [item for item in needed if not before_loop.issuperset(writes(item))] + late
        rounds = self._rounds(items, ends)
        made_in = {r: rounds[n] for n, item in enumerate(items) for r in writes(item)}
        arriving = {r: made for r, made in self._arriving().items() if r in ends}  # returned as they come
        last = max([0, *rounds, *stage.late_rounds.values(), *arriving.values()])
        due: list[tuple[int, Wire, Operand]] = []
        for n, port, operand in results:
            given = stage.late_rounds[port.number] if port.kind == "late" else last
            if isinstance(operand, Lit):
                due.append((given, Wire("literal", n), operand))
            else:
                due.append((made_in.get(operand, given), Wire("top", operand), operand))
        segments = []
        for current in range(last + 1):
            own = [item for n, item in enumerate(items) if rounds[n] == current]
            made = {r for item in own for r in writes(item)}
            wanted = {r for n, item in enumerate(items) if rounds[n] > current for r in reads(item)} & made
            outputs: dict[Wire, Operand] = {Wire("top", r): r for r in sorted(wanted)}
            outputs |= {wire: operand for when, wire, operand in due if when == current}
            registers = {o for o in outputs.values() if not isinstance(o, Lit)}
            needed = (read_before(own) | registers) - made
            new = {
                wire: self._replaced[o] for wire, o in outputs.items() if not isinstance(o, Lit) and o in self._replaced
            }
            outputs = {wire: outputs[wire] for wire in (*new, *outputs)}
            old = [r for r in new.values() if r in needed]
            inputs = {self._top_wire(r): (r,) for r in dict.fromkeys([*old, *sorted(needed)])}
            if outputs or own:
                segments.append(
                    Segment(
                        kind="update",
                        round=current,
                        inputs=tuple(inputs),
                        binds=tuple(inputs.values()),
                        preset=(),
                        outputs=tuple(outputs),
                        reads=tuple(outputs.values()),
                        instructions=tuple(own),
                    )
                )
        return segments

    @functools.cached_property
    def _replaced(self) -> Mapping[int, int]:
        """The register of each new value of state: that of the old."""
        old, new = self.program.body.inputs, self.program.body.outputs
        pairs = ((new[output], old[argument]) for output, argument in self.stage.traced.state)
        return {register: replaced for register, replaced in pairs if not isinstance(register, Lit)}

    def _wanted(self, ends: set[int]) -> list[Instruction]:
        """The instructions after the loop that some results need: not those that lay out whole stacks of crossings."""
        wanted = set(ends)
        found: list[Instruction] = []
        for item in reversed(self.late):
            effects = not isinstance(item, Reshard) and item.op.has_effects
            if effects or not wanted.isdisjoint(writes(item)):
                found.append(item)
                wanted.update(reads(item))
        return found[::-1]

    def _top_wire(self, register: int) -> Wire:
        """The wire of a register that the update reads."""
        results = self.loop.results if self.loop is not None else ()
        if register not in results:
            return Wire("top", register)
        i = results.index(register)
        return Wire("carry" if i < self._view.num_carry else "pieces", i)

    def _prologue_made(self) -> set[int]:
        """The registers that the prologue makes in any case."""
        if self.loop is None:
            return set()
        loop_reads = [o for o in self.loop.operands if not isinstance(o, Lit)]
        return {r for item in self._needed(loop_reads) for r in writes(item)}

    def _rounds(self, items: Sequence[Instruction], ends: set[int]) -> list[int]:
        """The round of each instruction: its op's, and not before what it reads."""
        made = self._arriving()
        out: list[int] = []
        for item in items:
            own = 0 if isinstance(item, Reshard) else self.stage.rounds.get(item.op.index, 0)
            current = max([own, *(made[r] for r in reads(item) if r in made)])
            out.append(current)
            made.update(dict.fromkeys(writes(item), current))
        return self._late(items, ends, out)

    def _late(self, items: Sequence[Instruction], ends: set[int], rounds: Sequence[int]) -> list[int]:
        """Returns the rounds, with values of state and gradients that only a later round reads made in that round.

        They would be held from one round to the other, in addition to their operands or in place of them.
        """
        out = list(rounds)
        there = {*self.program.body.inputs, *(self.loop.results[: self._view.num_carry] if self.loop else ())}
        free = []
        for item in items:
            cheap = isinstance(item, Compute) and item.op.name in LATE and not item.op.has_effects
            free.append(cheap and there.issuperset(reads(item)) and ends.isdisjoint(writes(item)))
            there.update(writes(item) if free[-1] else ())
        first: dict[int, int] = {}
        for n in range(len(items) - 1, -1, -1):
            if free[n]:
                out[n] = min((first[r] for r in writes(items[n]) if r in first), default=out[n])
            for r in reads(items[n]):
                first[r] = min(out[n], first.get(r, out[n]))
        return out

    def _arriving(self) -> dict[int, int]:
        """For each register with a value that another stage makes late, the first round that can read it."""
        ports = zip(self.program.body.inputs, self.stage.inputs, strict=False)
        return {register: 1 + self.stage.arrivals[port.number] for register, port in ports if port.kind == "late"}


def _named(phase: int, slices: int) -> tuple[Kind, int]:
    """The kind of a segment, and the slice of the sequence that it is of."""
    if phase < slices:
        return "forward", phase
    return ("backward", 2 * slices - 1 - phase) if phase < 2 * slices else ("weight", 0)
