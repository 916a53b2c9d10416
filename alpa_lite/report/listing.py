"""The values between passes as text, for dump directories and bug reports.

Each operation, rule, group, strategy or instruction is one line. Values are `%number:type`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from alpa_lite import _jax
from alpa_lite import program as programs
from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Traced
from alpa_lite.layout import Layout
from alpa_lite.methods import by
from alpa_lite.passes.layers.division import Divided, Divisible
from alpa_lite.passes.layers.types import Layering
from alpa_lite.passes.lowering.program import Body, LocalProgram, Loop, Reshard
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.stages.choosing import StagePlan
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from alpa_lite.passes.stages.pricing import LayerCosts
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.paths import shown
from alpa_lite.report import units
from alpa_lite.strategy import Factor, Rule

_LONGEST = 160  # characters of an operation's key


def text(value: Any) -> str:
    """Any value that a pass returns, as text; a value of another type as Python prints it."""
    match value:
        case Traced():
            return "\n".join((*_arguments(value), *graph_lines(value.graph)))
        case Graph():
            return "\n".join(graph_lines(value))
        case Grouping():
            return "\n".join(_groups(value))
        case MeshSolution():
            return "\n".join(_found(value))
        case DecidedStage():
            program = _program(value.program) if isinstance(value, PlannedStage) else ()
            return "\n".join((*_found(value.found), *program))
        case StageGraph():
            return text(value.traced)
        case Accumulated():
            return "\n".join((*(f"note: {note}" for note in value.notes), text(value.traced)))
        case Divisible():
            return "\n".join((*_layers(value.layering), "", text(value.layering.traced)))
        case Divided():
            return "\n".join((*_layers(value.layering), "", text(value.accumulated)))
        case LayerCosts():
            return "\n".join(_priced(value))
        case StagePlan():
            return "\n".join(_sliced(value))
        case Staged():
            return "\n".join(_staged(value))
        case tuple():
            return "\n\n".join(map(text, value))
        case programs.Program():
            return "\n".join(_executables(value))
        case LocalProgram():
            return "\n".join(_program(value))
        case Mapping():
            return "\n".join(f"{_key(key)}\n    {text(item)}" for key, item in value.items())
        case Rule():
            return rule_text(value)
        case _:
            return str(value)


def graph_lines(graph: Graph) -> Iterator[str]:
    """A program, with nested bodies indented below the operation that carries them."""
    yield from _block(graph, graph.block, "")


def rule_text(rule: Rule) -> str:
    """A rule, such as "[0 2] [2 1] -> [0 1]  0=16 parallel, 1=32 parallel, 2=8 sum (shardy)"."""
    sides = (" ".join(_dims(dims) for dims in side) for side in (rule.operands, rule.results))
    reason = f": {rule.reason}" if rule.reason else ""
    return f"{' -> '.join(sides)}  {_factors(rule.factors)} ({rule.source}{reason})"


def _arguments(traced: Traced) -> Iterator[str]:
    for argument, value in zip(traced.arguments, traced.graph.block.inputs, strict=False):
        yield f"%{value} {shown(argument.path)} ({argument.role})"
    yield from (f"note: {note}" for note in traced.notes)
    yield ""


def _block(graph: Graph, block: Block, indent: str) -> Iterator[str]:
    yield f"{indent}inputs {_atoms(graph, block.inputs)}"
    for op in block.ops:
        where = _jax.where(op.source)
        place = f"  # {where}" if where else ""
        yield f"{indent}{_atoms(graph, op.results)} = {op.name} {_atoms(graph, op.operands)}{place}"
        for number, body in enumerate(op.bodies):
            yield f"{indent}  body {number}:"
            yield from _block(graph, body, f"{indent}    ")
    yield f"{indent}outputs {_atoms(graph, block.outputs)}"


def _atoms(graph: Graph, atoms: tuple[Atom, ...]) -> str:
    return ", ".join(_literal(a) if isinstance(a, Lit) else f"%{a}:{_type(graph, a)}" for a in atoms)


def _literal(literal: Lit) -> str:
    return " ".join(str(literal.value).split())[:40]


def _type(graph: Graph, value: int) -> str:
    record = graph.values[value]
    return units.type_name(str(record.dtype), record.shape)


def _dims(dims: tuple[tuple[int, ...], ...]) -> str:
    return "[" + " ".join("*".join(map(str, factors)) or "1" for factors in dims) + "]"


def _factors(factors: tuple[Factor, ...]) -> str:
    return ", ".join(f"{i}={factor.size} {factor.kind}" for i, factor in enumerate(factors)) or "no factors"


def _key(key: Any) -> str:
    line = " ".join(str(key).split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _groups(grouping: Grouping) -> Iterator[str]:
    for color, members in grouping.classes.items():
        group = grouping.groups[members[0]]
        yield f"{group.name} ({group.kind}) x {len(members)}, {group.trips} trips: {_factors(group.factors)}  [{color}]"
        names: dict[str, int] = {}
        for number in group.ops:
            name = grouping.ops[number].name
            names[name] = names.get(name, 0) + 1
        if names:
            yield "    " + ", ".join(f"{name} x {count}" if count > 1 else name for name, count in names.items())


def _found(found: MeshSolution) -> Iterator[str]:
    solution = found.solution
    yield f"mesh {units.mesh(found.mesh.shape, found.mesh.axis_names)}"
    yield f"{solution.status}: objective {solution.objective} s, bound {solution.bound} s"
    yield f"peak {solution.peak:.0f} bytes per device"
    yield f"{solution.variables} variables, {solution.constraints} constraints, {solution.work} cells visited"
    for candidate in found.candidates:
        yield f"candidate {candidate.method} {candidate.mesh_shape}: {candidate.status}, {candidate.step_seconds} s"
    for number, node in enumerate(found.space.nodes):
        yield f"node {number}: group {node.group} x {len(node.members)}"
        for s, strategy in enumerate(node.strategies):
            mark = ">" if solution.choice and solution.choice[number] == s else " "
            partial = f" partial {units.axes(strategy.partial)}" if strategy.partial else ""
            axes = " ".join("+".join(a) or "-" for a in strategy.axes)
            terms = f"FLOPs {node.terms[0, s]:.3e} s, bytes {node.terms[1, s]:.3e} s"
            cost = f"compute {node.compute[s]:.3e} s ({terms}), communication {node.communication[s]:.3e} s"
            yield f"  {mark} {axes}{partial}: {cost}"


def _staged(found: Staged) -> Iterator[str]:
    """The stages, and the program that runs them."""
    yield from (f"note: {note}" for note in found.loop.notes)
    yield f"{found.num_layers} layers, {found.program.num_microbatches} micro-batches, {found.program.schedule}"
    verdict = found.verdict
    yield f"chosen by {verdict.model}: {verdict.seconds} s, bound {verdict.bound} s; simulated {found.seconds} s"
    for mesh, (buffers, temporary) in enumerate(found.bytes):
        yield f"submesh {mesh}: {buffers} + {temporary} bytes"
    for number, first in enumerate(found.first_layers):
        mesh = found.written.mesh_of[number]
        yield f"stage {number}: from layer {first}, submesh {mesh}, remat {found.remat[number]}"
    yield from _executables(found.program)


def _layers(layers: Layering) -> Iterator[str]:
    for number, layer in enumerate(layers.layers):
        cost = f"{layer.flops:.3e} FLOPs, {layer.bytes_out} bytes cross the cut after it"
        yield f"layer {number}: {len(layer.ops)} operations, {cost}, {layer.fingerprint}"


def _priced(priced: LayerCosts) -> Iterator[str]:
    first = {layer: number for number, layer in reversed(list(enumerate(priced.layers)))}
    for number, layer in enumerate(priced.layers):
        yield f"layer {number}: as layer {first[layer]}, at least {layer.least(priced.cluster)} on one device"
    known = sorted(priced.known.items(), key=lambda item: (first[item[0][0]], *item[0][1:]))
    for (layer, kind, price, shape), cost in known:
        where = f"{priced.devices[kind]} devices" + (f" as {by(shape)}" if shape else "")
        yield f"layer {first[layer]} on {where}, price {price}: {cost}"


def _sliced(found: StagePlan) -> Iterator[str]:
    """What the stage search chose, and what it compared."""
    slices = found.slices
    yield f"{slices.schedule}, {slices.num_microbatches} micro-batches, {slices.virtual} stages per submesh"
    yield f"estimated {slices.seconds} s, bound {found.bound} s"
    for number, stage in enumerate(slices.stages):
        yield f"stage {number}: layers {stage.first} to {stage.stop - 1}, submesh {stage.mesh}"
    for w in found.weighed:
        size = "" if w.bytes is None else f", {w.bytes:.0f} bytes"
        numbers = f"{w.num_stages} submeshes, {w.seconds} s{size}, bound {w.bound} s"
        yield f"compared {w.schedule} x {w.virtual}, {w.num_microbatches} micro-batches: {w.status}, {numbers}"


def _executables(program: programs.Program) -> Iterator[str]:
    """The executables of a pipeline, its transfers, and the instruction list of every submesh."""
    for number, item in enumerate(program.executables):
        yield f"executable {number}: {item.name}, submesh {item.mesh}, {item.seconds} s"
    for number, item in enumerate(program.transfers):
        names = ", ".join(program.buffers[b].name for b in item.sent)
        yield f"transfer {number}: {item.source} to {item.destination}, {item.seconds} s: {names}"
    yield programs.text(program)


def _program(program: LocalProgram) -> Iterator[str]:
    yield f"mesh {units.mesh(program.mesh.shape, program.mesh.axis_names)}, {len(program.registers)} registers"
    yield from _body(program.body, program.inputs, program.outputs, "")


def _body(body: Body, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...], indent: str) -> Iterator[str]:
    yield f"{indent}inputs {_registers(body.inputs, inputs)}"
    for instruction in body.instructions:
        if isinstance(instruction, Reshard):
            steps = ", ".join(_step(step.kind, step.axes, step.after) for step in instruction.steps)
            late = " late" if instruction.late else ""
            yield f"{indent}r{instruction.result} = reshard r{instruction.source}{late}: {steps}"
            continue
        results = ", ".join(f"r{r}" for r in instruction.results)
        yield f"{indent}{results} = {instruction.op.name} {_registers(instruction.operands)}{_line(instruction.op)}"
        if isinstance(instruction, Loop):
            for number, inner in enumerate(instruction.bodies):
                yield f"{indent}  body {number}:"
                yield from _body(inner, (), (), f"{indent}    ")
    yield f"{indent}outputs {_registers(body.outputs, outputs)}"


def _step(kind: str, axes: tuple[str, ...], after: Layout) -> str:
    return f"{kind} {units.axes(axes)} -> {after}"


def _registers(operands: tuple[Any, ...], layouts: tuple[Layout, ...] = ()) -> str:
    names = [_literal(r) if isinstance(r, Lit) else f"r{r}" for r in operands]
    return ", ".join(f"{n} {layouts[i]}" if i < len(layouts) else n for i, n in enumerate(names))


def _line(op: Op) -> str:
    where = _jax.where(op.source)
    return f"  # {where}" if where else ""
