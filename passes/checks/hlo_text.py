"""The collectives of a compiled program, read from the text of its optimised HLO.

A compiled module is a list of computations, each a list of instructions

    [ROOT] %name = type opcode(operands), attribute=value, ..., metadata={op_name="..."}

and the entry computation reaches the others through `while` (body and condition, times the trip count), `conditional`
(each branch), `call`, fusions and asynchronous wrappers. With n(c) the executions of computation c per step, n(entry)
= 1 and n(c) = sum over the instructions that call c, in a computation d, of n(d) times the trip count of the call; a
collective in c runs n(c) times. A branch counts as if it were taken, and a loop whose trip count the plan does not know
as if it ran once, as in a plan.

Differences between the backends are normalised: one op with a tuple of operands (the combiner's work) is one
`HloCollective` per operand; an all-to-all of k pieces is one; `-start` ops and `async-start` wrappers are the op that
they start, and the `-done` ops nothing; groups are axes of the mesh (`checks.replica_groups`). The TPU compiler runs a
collective in steps next to other work: each step is a fusion with a copy of the instruction, and the copies of one
collective share a `chain_id`, so only the first of a chain counts. An op that reads like a collective but is not
one of the known five (`send`, `ragged-all-to-all`, ...) is reported under its opcode.

A newer compiler's text never stops the reading, but nothing that may communicate is passed over in silence: a line that
cannot be read and holds a word that collectives have is *unread*, and so is a computation with collectives that the
entry is not seen to reach, since compilers leave no dead ones. `compare_hlo` fails on unread parts.
"""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.reading import is_unknown_loop
from alpa_lite.passes.checks.replica_groups import axes_from_pairs, axes_from_text, parse_groups

_ITEM_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
}  # fmt: skip

_KNOWN = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_WORDS = re.compile(r"\ball-|collective-|reduce-scatter")
_OTHER = re.compile(rf"send|recv|.*(?:{_WORDS.pattern})")
_CALLERS = ("conditional", "fusion", "call", "async", "custom-call")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OF_INTEREST = re.compile(
    r" (?:all-|reduce-scatter|collective-|ragged-|send|recv|async-start"
    r"|while|conditional|fusion|(?:custom-)?call|compare|constant)"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CHAIN = re.compile(r'\bchain_id="?(\d+)')
_CALLS = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_GROUPS = re.compile(
    r"\breplica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\(.*?\)(?= \{))? \{[^}]*\})"
)
_INTEGER = re.compile(r"= [su]\d+\[\]\S* constant\((\d+)\)")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIRS = re.compile(r"\bsource_target_pairs=(\{\{.*?\}\}|\{\})")


@dataclass(frozen=True)
class HloCollective:
    """One logical collective of a compiled program.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all or collective_permute; else the opcode as printed.
      axes: the mesh axes it runs over, in mesh order.
      bytes: per-device result payload (for reduce_scatter the operand's) of one execution, at the dtype that is sent.
      count: executions per step.
      dtype: the element type that is sent, as HLO names it.
      op: the instruction's name; operands that a compiler combined share it.
      where: the `op_name` of the metadata: the name stack of the traced equation.
      chain: the number that copies of one collective share, None without copies.
    """

    kind: str
    axes: Axes
    bytes: int
    count: int
    dtype: str
    op: str
    where: str
    chain: int | None = None


@dataclass(frozen=True)
class HloText:
    """The communication in the text of a compiled module.

    Attributes:
      collectives: in the order of the text; not those over groups of one device.
      transfers: the exchanges of the program of a TPU slice with other slices (`checks.slices`), by kind, over no axes,
        with the bytes that a device sends.
      unread_lines: each line that may communicate and cannot be read, and each instruction in a computation that the
        entry is not seen to reach, with the name of its computation in front.
    """

    collectives: tuple[HloCollective, ...]
    transfers: tuple[HloCollective, ...]
    unread_lines: tuple[str, ...]


@dataclass
class _Computation:
    """Collectives of one computation, before trip counts, and the computations that it calls.

    Attributes:
      calls: name, executions, and executions beyond these; the name of the condition of a loop in place of its trips.
      bounds: integer constants.
      is_upward: whether something is compared by <.
    """

    collectives: list[HloCollective] = field(default_factory=list)
    calls: list[tuple[str, int | str, int]] = field(default_factory=list)
    fusions: list[str] = field(default_factory=list)
    bounds: set[int] = field(default_factory=set)
    is_upward: bool = False
    unread_lines: list[str] = field(default_factory=list)


def read_hlo(text: str, mesh: LogicalMesh) -> HloText:
    """Returns the logical collectives of a compiled module, and the lines that may be one and cannot be read.

    Args:
      text: the result of `Compiled.as_text()`, for CPU, GPU or TPU.
      mesh: the mesh whose axes name the replica groups.
    """
    computations, entry = _split(text, mesh)
    executions = _executions(computations, entry)
    out, unread = [], []
    for name, computation in computations.items():
        unread += [f"{name}: {line}" for line in computation.unread_lines]
        times = executions.get(name)
        if times is None:
            ops = dict.fromkeys(f"{c.op} ({c.kind})" for c in computation.collectives)
            unread += [f"{name}, which the entry is not seen to reach: {op}" for op in ops]
        elif times:
            out += [replace(c, count=times) for c in computation.collectives]
    steps: dict[Any, HloCollective] = {}
    for number, c in enumerate(c for c in out if c.axes):
        copies = c.chain, c.kind, c.axes, c.bytes, c.count
        steps.setdefault(number if c.chain is None else copies, c)
    return HloText(tuple(steps.values()), tuple(c for c in out if not c.axes), tuple(unread))


def _split(text: str, mesh: LogicalMesh) -> tuple[dict[str, _Computation], str]:
    """Returns every computation by name, and the entry's name (the last computation where none is marked)."""
    computations: dict[str, _Computation] = {}
    entry = current = ""
    for line in text.splitlines():
        if not line.startswith((" ", "\t", "}")):
            head = _COMPUTATION.match(line)
            if head is not None and not line.startswith("HloModule"):
                current = head[2]
                computations[current] = _Computation()
                entry = current if head[1] or not entry else entry
            continue
        into = computations.setdefault(current, _Computation())
        may_communicate = _WORDS.search(line) is not None
        read = not (may_communicate or _OF_INTEREST.search(line)) or _instruction(line, into, mesh)
        if not read and _WORDS.search(_QUOTED.sub("", line)):
            into.unread_lines.append(line.strip())
    marked = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    return computations, marked[1] if marked else current or entry


def _instruction(line: str, into: _Computation, mesh: LogicalMesh) -> bool:
    """Files one instruction. Whether it could be read."""
    named = _NAMED.match(line)
    if named is None:
        return False
    _, type_end = _type(line, named.end())
    opcode = _OPCODE.match(line, type_end)
    if opcode is None:
        return False
    code, printed = opcode[1], line[named.end() : type_end]
    base = code.removesuffix("-start")
    if base in _KNOWN:
        into.collectives += _collective(line, named[2], printed, code, mesh)
        return bool(_payload(printed, code))
    if code == "while":
        parts, trips = dict(_LOOP.findall(line)), _TRIPS.search(line)
        condition = parts.get("condition", "")
        count = int(trips[1]) if trips else condition
        counts = ((1, 0), (1, 0)) if is_unknown_loop(line) else ((count, 0), (count, 1))
        into.calls += [(name, *n) for name, n in zip((parts.get("body", ""), condition), counts, strict=True)]
    elif base in _CALLERS:
        names = _CALLS.findall(line)
        into.fusions += names if base == "fusion" else []
        names += [name.strip(" %") for listed in _CALLED.findall(line) for name in listed.split(",")]
        into.calls += [(name, 1, 0) for name in names]
    elif code == "compare":
        into.is_upward |= "direction=LT" in line
    elif code == "constant":
        into.bounds.update(int(n) for n in _INTEGER.findall(line))
    elif code == "send" and (transfer := _TRANSFER.search(line)) is not None:
        (dtype, size), *_ = _payload(printed, code)
        into.collectives.append(HloCollective(transfer[1].lower(), (), size, 1, dtype, named[2], ""))
    elif _OTHER.match(code) and not code.endswith(("-done", "-update")) and "is_host_transfer=true" not in line:
        into.collectives += _collective(line, named[2], printed, code, mesh)
    return True


def _collective(line: str, op: str, printed: str, code: str, mesh: LogicalMesh) -> Iterator[HloCollective]:
    """Yields one entry per logical operand of the instruction."""
    base = code.removesuffix("-start")
    kind = base.replace("-", "_") if base in _KNOWN else base
    groups = _GROUPS.search(line)
    text, width = groups[1] if groups else "", 1
    if (pairs := _PAIRS.search(line)) is not None:
        axes = axes_from_pairs(pairs[1], mesh)
    else:
        axes, rows = axes_from_text(text, mesh), parse_groups(text, mesh.size)
        width = 1 if rows is None else rows.shape[1]
    if not axes and base in _KNOWN:
        return
    shapes = _payload(printed, code)
    if base not in _KNOWN:  # of an op that we do not know, the first member is what it moves; the rest is bookkeeping
        shapes = shapes[:1]
    if kind == "all_to_all" and len(shapes) == width:  # one piece per member of the group
        shapes = [(shapes[0][0], sum(n for _, n in shapes))]
    name, chain = _OP_NAME.search(line), _CHAIN.search(line)
    where, copies = name[1] if name else "", int(chain[1]) if chain else None
    for dtype, size in shapes:
        sent = size * width if kind == "reduce_scatter" else size
        yield HloCollective(kind, axes, sent, 1, dtype, op, where, copies)


def _payload(printed: str, code: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each logical result in a printed type.

    An asynchronous start has the type (operands, results, contexts...); only an all-reduce's may be the plain results.
    """
    members, _ = _type(printed, 0)
    started = code.endswith("-start") and members and printed.startswith("(")
    if started and (code != "all-reduce-start" or members[0].startswith("(")):
        members, _ = _type(members[1] if len(members) > 1 else members[0], 0)
    out = []
    for member in members:
        shape = _SHAPE.match(member)
        if shape is not None and shape[1] != "token":
            items = math.prod(int(n) for n in re.findall(r"\d+", shape[2]))
            out.append((shape[1], items * item_bits(shape[1]) // 8))
    return out


def item_bits(dtype: str) -> int:
    """Bits of one item in the payload of a collective, by HLO's name of its type; 32 for a name that is not known."""
    return _ITEM_BITS.get(dtype, 8 if dtype.startswith("f8") else 32)


def _type(line: str, at: int) -> tuple[list[str], int]:
    """Returns the members of the tuple type at `at`, and the index behind it; any other type is its only member."""
    if not line.startswith("(", at):
        end = line.find(" ", at)
        end = len(line) if end < 0 else end
        return [line[at:end]], end
    members, depth, start = [], 0, at + 1
    for i in range(at, len(line)):
        depth += (line[i] in "({[") - (line[i] in ")}]")
        if depth == 0 or (depth == 1 and line[i] == ","):
            members.append(re.sub(r"/\*.*?\*/", "", line[start:i]).strip())  # as in `/*index=5*/ f32[8]`
            start = i + 1
        if depth == 0:
            return [member for member in members if member], start
    return members, len(line)


def _executions(computations: dict[str, _Computation], entry: str) -> dict[str, int]:
    """Returns executions per step of every computation that the entry reaches."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for name, computation in computations.items():
        calls[name] = []
        for callee, times, more in computation.calls:
            trips = _trips(computations, times) if isinstance(times, str) else times
            if callee in computations:
                calls[name].append((callee, 1 if trips is None else trips + more))
    sorter = graphlib.TopologicalSorter({name: [callee for callee, _ in found] for name, found in calls.items()})
    try:
        order = [*sorter.static_order()][::-1]  # callers before callees
    except graphlib.CycleError:  # of damaged text nothing but the entry is seen to run
        order = []
    times = {entry: 1}
    for name in order:
        for callee, n in calls[name] if name in times else ():
            times[callee] = times.get(callee, 0) + times[name] * n
    return times


def _trips(computations: dict[str, _Computation], condition: str) -> int | None:
    """Returns the trip count of a loop that carries none: the one integer that its condition compares with, else None.

    This takes the counter to start at zero and to step by one, as every loop that JAX writes with a known count does.
    """
    names = [condition, *computations[condition].fusions] if condition in computations else []
    parts = [computations[name] for name in names if name in computations]
    bounds = {bound for part in parts for bound in part.bounds}
    return bounds.pop() if len(bounds) == 1 and any(part.is_upward for part in parts) else None
