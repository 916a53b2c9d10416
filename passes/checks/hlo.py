"""Comparison of the collectives of a compiled program with the planned ones, up to known rewrites of compilers.

Collectives are identified by (kind, axes, bytes), and counted by their executions per step. Those that are planned and
found as they are, or differ in kind or width by a rule below, are paired at once, so that as few as possible are left
(`checks.matching`). Each other rule, in order, explains a part of the missing ones or pairs it with extra ones; those
that no rule explains are differences, and the comparison fails. The rules, with the compilers that were seen to apply
them (CPU: JAX 0.10.2 and 0.12; TPU: libtpu 0.0.42 and 0.0.50; GPU: JAX's CUDA plugin 0.12.0.1):

    combined                several operands in one op: equal logically, listed only                      CPU, TPU
    split all-to-all        one piece per device in a tuple: equal logically, listed only                 CPU
    dtype promoted          bf16 sent as f32: extra of twice the bytes                                    CPU
    dtype narrowed          f32 sent as bf16 because its consumer rounds it: extra of half the bytes      TPU
    reduce-scatter as all-reduce, all-gather as all-reduce      small or misaligned operands              TPU
    all-reduce as reduce-scatter                                an all-reduce that is only sliced         GPU *
    joined                  several all-reduces as one of their bytes together, flattened one after another       GPU
    packed into a tile      items of one or two bytes, fewer than 128, as one u32[128] all-reduce         TPU
    hoisted                 loop-invariant, run once before the loop                                      CPU
    merged duplicates       one collective for equal ones of one value                                    CPU, TPU
    reassociated sums       psum(a) + psum(b) as psum(a + b)                                              TPU
    removed constants       collectives of constants are folded                                           CPU, TPU
    removed empty           collectives of no elements are removed                                        all
    between slices          in two levels, within a slice and between slices (`checks.slices`)            TPU
    packed into tiles       all-reduces over several slices as one of their bytes, rounded up to tiles    TPU

(* XLA's reduce-scatter-creator pass does it there; not seen here.)

Those that merge, reassociate, hoist or remove lose communication. With the lowered module at hand each must be admitted
by it (`checks.redundancy`), as often as it is used, and only what it writes may be rewritten at all; without, only
hoisting that the metadata proves and merging into one that is still there are accepted, and the report marks them
as unproven.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.errors import VerificationError
from alpa_lite.layout import Axes, LogicalMesh
from alpa_lite.passes.checks import slices
from alpa_lite.passes.checks.hlo_text import KINDS, HloCollective, item_bits, read_hlo
from alpa_lite.passes.checks.matching import paired
from alpa_lite.passes.checks.redundancy import Key, Redundancy, redundant_collectives
from alpa_lite.passes.checks.replica_groups import normal_axes
from alpa_lite.records import Collective

_WIDE = ("f32", "f16", "bf16")
_OTHER_WIDTH = 50.0
"""The cost of pairing payloads of equal bytes whose items differ in width; more than that of any change."""
_TILE = 512
_TILES = 4096
_LOSING = ("hoisted", "merged duplicates", "reassociated sums", "removed constants", "removed empty")
_NARROW = ("bf16", "f16", "f8")
_PRIMITIVES = {
    "all_reduce": ("psum", "pmax", "pmin", "pand", "por"),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
}
_KIND_CHANGES = {
    "reduce_scatter": (("all_reduce", "reduce-scatter as all-reduce"),),
    "all_gather": (("all_reduce", "all-gather as all-reduce"),),
    "all_reduce": (("reduce_scatter", "all-reduce as reduce-scatter"),),
}


@dataclass(frozen=True)
class Rewrite:
    """A compiler's rewrite by name.

    Attributes:
      name: as in the module's table.
      count: executions per step that it concerns.
      detail: what it did to which collectives.
    """

    name: str
    count: int
    detail: str

    def __str__(self) -> str:
        """The rewrite on one line."""
        return f"{self.name}: {self.count} x {self.detail}"


@dataclass(frozen=True)
class HloReport:
    """The collectives of a compiled program, compared with a plan.

    Attributes:
      found: the logical collectives of the program.
      rewrites: the compiler's rewrites that explain where it differs from the plan.
      differences: one message for each difference that no rewrite explains, and for each line that may communicate but
        cannot be read; empty if the plan is true.
    """

    found: tuple[HloCollective, ...]
    rewrites: tuple[Rewrite, ...]
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the program communicates as planned."""
        return not self.differences

    def bytes_by_kind(self) -> dict[tuple[str, Axes], int]:
        """Bytes per step and device that are sent, at the dtype that is sent, by kind and axes."""
        out: Counter[tuple[str, Axes]] = Counter()
        for c in self.found:
            out[(c.kind, c.axes)] += c.bytes * c.count
        return dict(out)

    def raise_if_bad(self) -> None:
        """Raises VerificationError with every difference, and the rewrites that were recognised."""
        if self.differences:
            known = "".join(f"\n  recognised {rewrite}" for rewrite in self.rewrites)
            raise VerificationError(
                "the compiled program does not communicate as planned:\n  " + "\n  ".join(self.differences) + known
            )


def compare_hlo(text: str, mesh: LogicalMesh, planned: Sequence[Collective], lowered: Any = None) -> HloReport:
    """Compares the collectives of a compiled program with the planned ones, logically.

    Args:
      text: the optimised HLO, `Compiled.as_text()`.
      mesh: the mesh of the plan.
      planned: the plan's collectives; entries that agree in kind, axes and bytes are added up.
      lowered: the StableHLO module that was compiled; with it, communication that is lost must be proven redundant.

    Returns:
      The report; `raise_if_bad` turns differences into an error.
    """
    part = slices.part_of(text, mesh)
    read = read_hlo(text, part)
    found = read.collectives
    missing: Counter[Key] = Counter()
    for c in planned:
        if axes := normal_axes(c.axes, part):
            missing[(c.kind, axes, c.bytes)] += c.count
    redundancy = None if lowered is None else slices.within(redundant_collectives(lowered, mesh), part)
    match = _Match(missing, found, redundancy)
    match.pair()
    match.joined()
    match.packed()
    crossing = slices.crossing(planned, mesh, part)
    match.in_two_levels(crossing, part)
    match.lost()
    rewrites, differences = [*_listed(found, text), *match.rewrites], list(match.differences())
    if crossing or read.transfers:
        spare = sum(rewrite.count for rewrite in match.rewrites if rewrite.name in _LOSING)
        said, more = slices.transfers(read.transfers, crossing, mesh, part, spare)
        rewrites.append(Rewrite("between slices", sum(c.count for c in read.transfers), said))
        differences += more
    differences += [f"may communicate, but cannot be read: {line}" for line in read.unread]
    return HloReport(found, tuple(rewrites), tuple(differences))


def _listed(found: Sequence[HloCollective], text: str) -> list[Rewrite]:
    """Rewrites that change no logical collective."""
    operands: dict[tuple[str, str], list[HloCollective]] = defaultdict(list)
    for c in found:
        operands[(c.kind, c.op)].append(c)
    groups: Counter[tuple[str, Axes, int]] = Counter()
    for (kind, _), members in operands.items():
        if len(members) > 1:
            groups[(kind, members[0].axes, len(members))] += members[0].count
    out = [
        Rewrite("combined", n * size, f"{kind} over ({', '.join(axes)}), {size} in one")
        for (kind, axes, size), n in groups.items()
    ]
    pieces = {m[1] for m in re.finditer(r"^\s+(?:ROOT )?%?([\w.\-]+) = \(.*?\) all-to-all\(", text, re.MULTILINE)}
    split: Counter[Axes] = Counter()
    for c in found:
        if c.kind == "all_to_all" and c.op in pieces:
            split[c.axes] += c.count
    return out + [Rewrite("split all-to-all", n, f"all_to_all over ({', '.join(a)})") for a, n in split.items()]


def _forms() -> list[tuple[str, str, str, int, int]]:
    """(name, planned kind, found kind, numerator, denominator of the bytes), the least change first."""
    out = []
    scales = [
        ("", 1, 1),
        ("dtype promoted", 2, 1),
        ("dtype narrowed", 1, 2),
        ("dtype promoted", 4, 1),
        ("dtype narrowed", 1, 4),
    ]
    for kind in KINDS.values():
        out += [(name, kind, kind, up, down) for name, up, down in scales]
    for kind, changes in _KIND_CHANGES.items():
        for other, change in changes:
            out += [(f"{change}, {name}" if name else change, kind, other, up, down) for name, up, down in scales]
    return sorted(out, key=lambda form: (form[1] != form[2], form[3] * form[4]))


class _Match:
    """The planned collectives not yet found, the found ones not yet planned, and the rules that pair them.

    Found executions are distinguished by dtype and by whether the metadata names them after the primitive of their
    kind, since a compiler that changes the kind makes an op of its own.
    """

    def __init__(self, missing: Counter[Key], found: Sequence[HloCollective], redundancy: Redundancy | None) -> None:
        self.missing = missing
        self.found = found
        self.redundancy = redundancy
        self.extra: dict[Key, Counter[tuple[str, bool]]] = defaultdict(Counter)
        operands = Counter((c.kind, c.op) for c in found)
        for c in found:
            # A combined op has the name of one of its parts; which kinds the others were, the lowered module knows.
            named = operands[(c.kind, c.op)] == 1 or redundancy is None
            native = named and c.where.rsplit("/", 1)[-1].startswith(_PRIMITIVES.get(c.kind, ()))
            self.extra[(c.kind, c.axes, c.bytes)][(c.dtype, native)] += c.count
        self.as_found: dict[Key, set[Key]] = {key: {key} for key in missing}
        self.rewrites: list[Rewrite] = []

    def pair(self) -> None:
        """Pairs planned collectives with found ones, with as few changes of kind and width as can be."""
        planned: dict[tuple[Key, int | None], int] = {}
        for key, n in self.missing.items():
            planned.update({(key, bits): part for bits, part in self._by_width(key, n)})
        found = {(at, form): n for at, forms in self.extra.items() for form, n in forms.items()}
        changes = self._changes(planned)
        costs = {pair: cost for pair, (cost, _) in changes.items()}
        groups = {one: one[0] for one in planned}
        for pair, n in paired(planned, found, costs, groups, self._losable()).items():
            (key, _), (at, form) = pair
            self._take(key, at, form, n)
            if name := changes[pair][1]:
                self._note(name, n, key, f" as {at[2]} bytes of {form[0]}" if at[2] != key[2] else "")

    def _changes(self, planned: Iterable[tuple[Key, int | None]]) -> dict[tuple[Any, Any], tuple[float, str]]:
        """Planned and found collective -> the cost of changing one into the other, and its name; "" for equal ones."""
        out: dict[tuple[Any, Any], tuple[float, str]] = {}
        forms = list(enumerate(_forms(), start=1))
        for key, bits in planned:
            for cost, (name, kind, other, up, down) in forms:
                if key[0] != kind or key[2] * up % down or (name and not self._is_written(key)):
                    continue
                at = other, key[1], key[2] * up // down
                for form in self.extra.get(at, ()):
                    if (kind != other and form[1]) or not self._width(key, bits, form[0], up, down):
                        continue
                    # An equal payload that is named otherwise, or has other items, is rather a changed one.
                    strange = not name and bits not in (None, item_bits(form[0]))
                    out[(key, bits), (at, form)] = cost + 0.1 * (not form[1]) + _OTHER_WIDTH * strange, name
        return out

    def _by_width(self, key: Key, n: int) -> list[tuple[int | None, int]]:
        """The planned executions of a key by the width of their items; None if the lowered module does not say."""
        known = Counter[int]() if self.redundancy is None else self.redundancy.item_bits.get(key, Counter[int]())
        return list(known.items()) if known.total() == n else [(None, n)]

    def _losable(self) -> Counter[Key]:
        """How many executions of each key a compiler may leave out; if nothing is known of them, all but one."""
        r = self.redundancy
        if r is None:
            return Counter({key: n - 1 for key, n in self.missing.items() if n > 1})
        return r.hoisted + r.merged + r.reassociated + r.constant

    def joined(self) -> None:
        """Pairs all missing all-reduces over some axes with extra ones of the same bytes in all, which are fewer."""
        for axes in dict.fromkeys(key[1] for key in self._open("all_reduce")):
            open_keys = [key for key in self._open("all_reduce") if key[1] == axes]
            there = {
                (key, form): n
                for key, forms in self.extra.items() if key[:2] == ("all_reduce", axes)
                for form, n in forms.items() if n > 0
            }  # fmt: skip
            wanted = sum(key[2] * self.missing[key] for key in open_keys)
            fewer = 0 < sum(there.values()) < sum(self.missing[key] for key in open_keys)
            if not fewer or wanted != sum(key[2] * n for (key, _), n in there.items()):
                continue
            for key in open_keys:
                n, self.missing[key] = self.missing[key], 0
                self._note("joined", n, key)
                self.as_found[key].update(at for at, _ in there)
            for at, form in there:
                self.extra[at][form] = 0

    def packed(self) -> None:
        """Pairs small missing collectives with all-reduces of one tile of 128 words."""
        for key in self._open("all_reduce") + self._open("all_gather"):
            at = ("all_reduce", key[1], _TILE)
            n = sum(self._take(key, at, ("u32", native)) for native in (False, True)) if key[2] < _TILE else 0
            if n:
                self._note("packed into a tile", n, key, f" as an all-reduce of {_TILE} bytes of u32")

    def in_two_levels(self, crossing: Sequence[Collective], part: LogicalMesh) -> None:
        """Pairs the remaining collectives over several slices with the parts of them that run within one."""
        allowed: Counter[Key] = Counter()
        for c in crossing:
            if c.kind == "all_reduce":
                allowed[("all_gather", normal_axes(c.axes, part), c.bytes)] += c.count
        for axes in dict.fromkeys(key[1] for key in allowed):
            keys = [key for key in self._open("all_reduce") if key[1] == axes]
            whole = sum(key[2] * self.missing[key] for key in keys)
            tiled = {("all_reduce", axes, -(-whole // tile) * tile) for tile in (_TILE, _TILES) if whole}
            forms = [(at, form) for at in tiled for form, n in self.extra.get(at, Counter()).items() if n > 0]
            for at, form in sorted(forms)[:1]:
                self.extra[at][form] -= 1
                for key in keys:
                    n, self.missing[key] = self.missing[key], 0
                    self._note("packed into tiles", n, key, f", {at[2]} bytes together")
        for key, most in allowed.items():
            for form, n in self.extra.get(key, Counter()).items():
                taken = min(n, most)
                most -= taken
                self.extra[key][form] -= taken

    def lost(self) -> None:
        """Explains missing collectives without a counterpart: the program runs fewer collectives than planned."""
        r = self.redundancy
        for key in [key for key, n in self.missing.items() if n > 0 and key[2] == 0]:
            n, self.missing[key] = self.missing[key], 0
            self._note("removed empty", n, key)
        if r is None:
            self._unproven()
            return
        for name, allowed in [
            ("hoisted", r.hoisted),
            ("merged duplicates", r.merged),
            ("reassociated sums", r.reassociated),
            ("removed constants", r.constant),
        ]:
            for key, n in self.missing.items():
                if (lost := min(n, allowed[key])) > 0:
                    self.missing[key] -= lost
                    self._note(name, lost, key)

    def differences(self) -> tuple[str, ...]:
        """Returns one message for each collective that remains on either side."""
        out = [f"planned but not found: {_text(key, n)}" for key, n in sorted(self.missing.items()) if n > 0]
        for key, forms in sorted(self.extra.items()):
            for (dtype, _), n in sorted(forms.items()):
                if n > 0:
                    at = [c.where or c.op for c in self.found if (c.kind, c.axes, c.bytes, c.dtype) == (*key, dtype)]
                    places = "; ".join(list(dict.fromkeys(at))[:3])
                    out.append(f"found but not planned: {_text(key, n)} of {dtype} at {places}")
        return tuple(out)

    def _open(self, kind: str) -> list[Key]:
        """Missing collectives of a kind that the lowered module, if it is known, really has."""
        return [k for k, n in self.missing.items() if n > 0 and k[0] == kind and self._is_written(k)]

    def _is_written(self, key: Key) -> bool:
        """Whether the lowered module, if it is known, has such a collective."""
        return self.redundancy is None or key in self.redundancy.item_bits

    def _width(self, key: Key, bits: int | None, dtype: str, up: int, down: int) -> bool:
        """Whether `dtype` can result from the planned items if a compiler changes their width by up / down."""
        if up == down:
            return True
        if not dtype.startswith(_WIDE if up > down else _NARROW):
            return False
        if self.redundancy is None:
            return True
        widths = self.redundancy.item_bits[key] if bits is None else (bits,)
        return any(width * up == item_bits(dtype) * down for width in widths)

    def _unproven(self) -> None:
        for key in [key for key, n in self.missing.items() if n > 0]:
            alive = [c for c in self.found if (c.kind, c.axes, c.bytes) in self.as_found[key]]
            if not alive:
                continue
            hoisted = any(len(re.findall(r"\bwhile/body\b", c.where)) > c.loops for c in alive)
            n, self.missing[key] = self.missing[key], 0
            self._note("hoisted" if hoisted else "merged duplicates", n, key, ", unproven")

    def _take(self, key: Key, at: Key, form: tuple[str, bool], most: int | None = None) -> int:
        n = min(self.missing[key], self.extra[at][form])
        n = n if most is None else min(n, most)
        if n > 0:
            self.missing[key] -= n
            self.extra[at][form] -= n
            self.as_found[key].add(at)
        return max(n, 0)

    def _note(self, name: str, n: int, key: Key, more: str = "") -> None:
        self.rewrites.append(Rewrite(name, n, f"{key[0]} over ({', '.join(key[1])}) of {key[2]} bytes{more}"))


def _text(key: Key, n: int) -> str:
    return f"{n} x {key[0]} over ({', '.join(key[1])}) of {key[2]} bytes"
