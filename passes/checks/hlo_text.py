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

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from alpa_lite.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.reading import is_unknown_loop
from alpa_lite.passes.checks.replica_groups import axes_from_pairs, axes_from_text, parse_groups

_ITEM_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4,
}  # fmt: skip

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
}
_WORDS = re.compile(r"\ball-|collective-|reduce-scatter")
_OTHER = re.compile(rf"send|recv|.*(?:{_WORDS.pattern})")
_CALLERS = ("fusion", "call", "async", "custom-call")
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
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CHAIN = re.compile(r'\bchain_id="?(\d+)')
_CALLS = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_CALLED = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_BRANCH = re.compile(r"\b(?:true|false)_computation=%?([\w.\-]+)")
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_GROUPS = re.compile(
    r"\breplica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\(.*?\)(?= \{))? \{[^}]*\})"
)
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
      channel: the channel number, None without one.
      where: the `op_name` of the metadata: the name stack of the traced equation.
      loops: how many loops of the compiled program are around it.
      chain: the number that copies of one collective share, None without copies.
    """

    kind: str
    axes: Axes
    bytes: int
    count: int
    dtype: str
    op: str
    channel: int | None
    where: str
    loops: int
    chain: int | None = None


@dataclass(frozen=True)
class HloText:
    """The communication in the text of a compiled module.

    Attributes:
      collectives: in the order of the text; not those over groups of one device.
      transfers: the exchanges of the program of a TPU slice with other slices (`checks.slices`), by kind, over no axes,
        with the bytes that a device sends.
      unread: each line that may communicate and cannot be read, and each instruction in a computation that the entry is
        not seen to reach, with the name of its computation in front.
    """

    collectives: tuple[HloCollective, ...]
    transfers: tuple[HloCollective, ...]
    unread: tuple[str, ...]


@dataclass
class _Computation:
    """Collectives of one computation, before trip counts, and the computations that it calls."""

    collectives: list[HloCollective] = field(default_factory=list)
    calls: list[tuple[str, int, bool]] = field(default_factory=list)  # name, executions, whether a loop
    loops: list[tuple[str, str]] = field(default_factory=list)  # (condition, body) without a known trip count
    fused: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # compares and integer constants, kept for trip counts
    unread: list[str] = field(default_factory=list)


def parse_hlo(text: str, mesh: LogicalMesh | int) -> tuple[HloCollective, ...]:
    """The `collectives` of `read_hlo`."""
    return read_hlo(text, mesh).collectives


def read_hlo(text: str, mesh: LogicalMesh | int) -> HloText:
    """Returns the logical collectives of a compiled module, and the lines that may be one and cannot be read.

    Args:
      text: the result of `Compiled.as_text()`, for CPU, GPU or TPU.
      mesh: the mesh whose axes name the replica groups; a device count stands for one axis `devices`.
    """
    if isinstance(mesh, int):
        mesh = LogicalMesh((mesh,), ("devices",))
    computations, entry = _split(text, mesh)
    executions, depth = _executions(computations, entry)
    out, unread = [], []
    for name, computation in computations.items():
        unread += [f"{name}: {line}" for line in computation.unread]
        times = executions.get(name)
        if times is None:
            ops = dict.fromkeys(f"{c.op} ({c.kind})" for c in computation.collectives)
            unread += [f"{name}, which the entry is not seen to reach: {op}" for op in ops]
        elif times:
            out += [replace(c, count=times, loops=depth[name]) for c in computation.collectives]
    collectives = tuple(_first_of_chains(c for c in out if c.axes))
    return HloText(collectives, tuple(c for c in out if not c.axes), tuple(unread))


def _first_of_chains(collectives: Iterable[HloCollective]) -> Iterator[HloCollective]:
    """The collectives, of those that are steps of one collective only the first."""
    seen = set()
    for c in collectives:
        key = c.chain, c.kind, c.axes, c.bytes, c.count, c.loops
        if c.chain is None or key not in seen:
            yield c
        seen.add(key)


def _split(text: str, mesh: LogicalMesh) -> tuple[dict[str, _Computation], str]:
    """Every computation by name, and the entry's name (the last computation where none is marked)."""
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
            into.unread.append(line.strip())
    marked = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    return computations, marked[1] if marked else current or entry


def _instruction(line: str, into: _Computation, mesh: LogicalMesh) -> bool:
    """Files one instruction. Whether it could be read."""
    named = _NAMED.match(line)
    if named is None:
        return False
    type_end = _skip_type(line, named.end())
    opcode = _OPCODE.match(line, type_end)
    if opcode is None:
        return False
    code, printed = opcode[1], line[named.end() : type_end]
    base = code.removesuffix("-start")
    if base in KINDS:
        into.collectives.extend(_collective(line, named[2], printed, code, mesh))
        return bool(_payload(printed, code))
    elif code == "while":
        _loop(line, into)
    elif code == "conditional":
        into.calls += [(n.strip(" %"), 1, False) for m in _CALLED.finditer(line) for n in m[1].split(",")]
        into.calls += [(n, 1, False) for n in _BRANCH.findall(line)]
    elif base in _CALLERS:
        into.calls += [(n, 1, False) for n in _CALLS.findall(line)]
        into.calls += [(n.strip(" %"), 1, False) for m in _CALLED.finditer(line) for n in m[1].split(",")]
        into.fused += _CALLS.findall(line) if base == "fusion" else []
    elif code in ("compare", "constant"):
        into.lines.append(line)
    elif code == "send" and (transfer := _TRANSFER.search(line)) is not None:
        (dtype, size), *_ = _payload(printed, code)
        into.collectives.append(HloCollective(transfer[1].lower(), (), size, 1, dtype, named[2], None, "", 0))
    elif _OTHER.match(code) and not code.endswith(("-done", "-update")) and "is_host_transfer=true" not in line:
        into.collectives.extend(_collective(line, named[2], printed, code, mesh))
    return True


def _loop(line: str, into: _Computation) -> None:
    parts = dict(_LOOP.findall(line))
    trips = _TRIPS.search(line)
    if "body" not in parts:
        return
    if is_unknown_loop(line):
        into.calls += [(name, 1, True) for name in parts.values()]
    elif trips is not None:
        into.calls.append((parts["body"], int(trips[1]), True))
        into.calls.append((parts.get("condition", ""), int(trips[1]) + 1, True))
    else:
        into.loops.append((parts.get("condition", ""), parts["body"]))


def _collective(line: str, op: str, printed: str, code: str, mesh: LogicalMesh) -> Iterator[HloCollective]:
    """One entry per logical operand of the instruction."""
    base = code.removesuffix("-start")
    kind = KINDS.get(base, base)
    groups = _GROUPS.search(line)
    width = 1
    if (pairs := _PAIRS.search(line)) is not None:
        axes = axes_from_pairs(pairs[1], mesh)
    else:
        text = groups[1] if groups else ""
        axes = axes_from_text(text, mesh)
        rows = parse_groups(text, mesh.size)
        width = 1 if rows is None else rows.shape[1]
    if not axes and kind in KINDS.values():
        return
    shapes = _payload(printed, code)
    if base not in KINDS:  # of an op that we do not know, the first member is what it moves; the rest is bookkeeping
        shapes = shapes[:1]
    if kind == "all_to_all" and len(shapes) == width:  # one piece per member of the group
        shapes = [(shapes[0][0], sum(n for _, n in shapes))]
    name, channel, chain = _OP_NAME.search(line), _CHANNEL.search(line), _CHAIN.search(line)
    for dtype, size in shapes:
        if kind == "reduce_scatter":
            size *= width
        yield HloCollective(
            kind=kind,
            axes=axes,
            bytes=size,
            count=1,
            dtype=dtype,
            op=op,
            channel=int(channel[1]) if channel else None,
            where=name[1] if name else "",
            loops=0,
            chain=int(chain[1]) if chain else None,
        )


def _payload(printed: str, code: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of each logical result in a printed type.

    An asynchronous start has the type (operands, results, contexts...); only an all-reduce's may be the plain results.
    """
    parts = _parts(printed)
    if code.endswith("-start") and parts and printed.startswith("("):
        plain = code == "all-reduce-start" and not parts[0].startswith("(")
        if not plain:
            parts = _parts(parts[1] if len(parts) > 1 else parts[0])
    out = []
    for part in parts:
        shape = _SHAPE.match(part)
        if shape is not None and shape[1] != "token":
            out.append((shape[1], _bytes(shape[1], shape[2])))
    return out


def item_bits(dtype: str) -> int:
    """Bits of one item in the payload of a collective, by HLO's name of its type; 32 for a name that is not known."""
    return _ITEM_BITS.get(dtype, 8 if dtype.startswith("f8") else 32)


def _bytes(dtype: str, dims: str) -> int:
    return math.prod(int(n) for n in re.findall(r"\d+", dims)) * item_bits(dtype) // 8


def _parts(printed: str) -> list[str]:
    """The members of a tuple type, `/*index=5*/` comments left out; any other type is its only member."""
    printed = re.sub(r"/\*.*?\*/", "", printed).strip()
    if not printed.startswith("("):
        return [printed]
    out, depth, start = [], 0, 1
    for i, char in enumerate(printed):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        if (char == "," and depth == 1) or depth == 0:
            out.append(printed[start:i].strip())
            start = i + 1
            if depth == 0:
                break
    return [part for part in out if part]


def _skip_type(line: str, at: int) -> int:
    """The index behind the type that starts at `at`."""
    if at >= len(line) or line[at] != "(":
        end = line.find(" ", at)
        return len(line) if end < 0 else end
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i + 1
    return len(line)


def _executions(computations: dict[str, _Computation], entry: str) -> tuple[dict[str, int], dict[str, int]]:
    """Executions per step, and the depth of loops, of every computation that the entry reaches."""
    order: list[str] = []
    seen: set[str] = set()

    def calls(name: str) -> list[tuple[str, int, bool]]:
        c = computations[name]
        loops = [
            call
            for condition, body in c.loops
            for trips in [_trips(computations, condition)]
            for call in ((body, trips or 1, True), (condition, 1 if trips is None else trips + 1, True))
        ]
        return [call for call in c.calls + loops if call[0] in computations]

    stack: list[tuple[str, bool]] = [(entry, False)] if entry in computations else []
    while stack:  # depth first, callees before callers
        name, done = stack.pop()
        if done:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack.extend((callee, False) for callee, _, _ in calls(name) if callee not in seen)
    times = dict.fromkeys(order, 0)
    depth = dict.fromkeys(order, 0)
    if order:
        times[entry] = 1
    for name in reversed(order):
        for callee, n, loop in calls(name):
            times[callee] += times[name] * n
            depth[callee] = max(depth[callee], depth[name] + loop)
    return times, depth


def _trips(computations: dict[str, _Computation], condition: str) -> int | None:
    """The trip count of a loop that carries none: the one integer that its condition compares with, else None.

    This takes the counter to start at zero and to step by one, as every loop that JAX writes with a known count does.
    """
    if condition not in computations:
        return None
    names = [condition, *computations[condition].fused]
    lines = [line for name in names if name in computations for line in computations[name].lines]
    bounds = {m[1] for line in lines for m in [re.search(r"= [su]\d+\[\]\S* constant\((\d+)\)", line)] if m}
    less = any("direction=LT" in line for line in lines)
    return int(bounds.pop()) if less and len(bounds) == 1 else None
