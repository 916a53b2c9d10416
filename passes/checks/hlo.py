"""Comparison of the collectives of a compiled program with the planned ones, up to known rewrites of compilers.

Collectives are identified by (kind, axes, bytes), and counted by their executions per step. Changes of kind and width
leave the axes and the number of items as they are, so that planned and found collectives of equal axes and items are
paired, those with the least changes first. Each other rule, in order, explains a part of the missing ones or pairs it
with extra ones; those that no rule explains are differences, and the comparison fails. The rules, with the compilers
that were seen to apply them (CPU: JAX 0.10.2 and 0.12; TPU: libtpu 0.0.42 and 0.0.50; GPU: JAX's CUDA plugin 0.12.0.1):

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

Those that merge, reassociate, hoist or remove lose communication. Each must be admitted by the lowered module
(`checks.redundancy`), as often as it is used, and only what that module writes may be rewritten at all.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from alpa_lite.errors import VerificationError
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.checks import slices
from alpa_lite.passes.checks.hlo_text import HloCollective, item_bits, read_hlo
from alpa_lite.passes.checks.redundancy import REASONS, Redundancy, Sent
from alpa_lite.passes.checks.shardy import Key, describe, totals
from alpa_lite.plan.records import Collective

_Found = tuple[Key, str, bool]
"""Found executions by dtype, and whether the metadata names them after the primitive of their kind: a compiler that
changes the kind makes an op of its own."""

_WIDE = ("f32", "f16", "bf16")
_NARROW = ("bf16", "f16", "f8")
_TILE = 512
_TILES = 4096
_LOSING = (*REASONS, "removed empty")
_PRIMITIVES = {
    "all_reduce": ("psum", "pmax", "pmin", "pand", "por"),
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
}
_KIND_CHANGES = {
    ("reduce_scatter", "all_reduce"): "reduce-scatter as all-reduce",
    ("all_gather", "all_reduce"): "all-gather as all-reduce",
    ("all_reduce", "reduce_scatter"): "all-reduce as reduce-scatter",
}
"""Planned and found kind -> name of the change."""


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
        """Returns the rewrite on one line."""
        return f"{self.name}: {self.count} x {self.detail}"


@dataclass(frozen=True)
class HloReport:
    """The collectives of a compiled program, compared with a plan.

    Attributes:
      collectives: the logical collectives of the program.
      rewrites: the compiler's rewrites that explain where it differs from the plan.
      differences: one message for each difference that no rewrite explains, and for each line that may communicate but
        cannot be read; empty if the plan is true.
    """

    collectives: tuple[HloCollective, ...]
    rewrites: tuple[Rewrite, ...]
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the program communicates as planned."""
        return not self.differences

    def raise_if_bad(self, name: str = "") -> None:
        """Raises VerificationError with every difference of an executable, and the rewrites that were recognised."""
        if self.differences:
            lines = (*self.differences, *(f"recognised {rewrite}" for rewrite in self.rewrites))
            what = f"{name}: the" if name else "the"
            raise VerificationError("\n  ".join([f"{what} compiled program does not communicate as planned:", *lines]))


def compare_hlo(text: str, mesh: LogicalMesh, planned: Sequence[Collective], redundancy: Redundancy) -> HloReport:
    """Compares the collectives of a compiled program with the planned ones, logically.

    Args:
      text: the optimised HLO, `Compiled.as_text()`.
      mesh: the mesh of the plan.
      planned: the plan's collectives; entries that agree in kind, axes and bytes are added up.
      redundancy: the communication of the StableHLO module that was compiled, and how much of it may be lost.

    Returns:
      The report; `raise_if_bad` turns differences into an error.
    """
    part = slices.part_of(text, mesh)
    read = read_hlo(text, part)
    match = _Match(totals(planned, part), read.collectives, slices.restrict_to_slices(redundancy, part))
    match.pair()
    match.pair_packed()
    crossing = slices.collectives_across_slices(planned, mesh, part)
    sums = totals((c for c in crossing if c.kind == "all_reduce"), part)
    match.pair_joined({axes for _, axes, _ in sums})
    match.take_gathers(sums)
    match.explain_missing()
    rewrites, differences = [*_listed(read.collectives, text), *match.rewrites], match.differences()
    if crossing or read.transfers:
        spare = sum(rewrite.count for rewrite in match.rewrites if rewrite.name in _LOSING)
        said, more = slices.transfers(read.transfers, crossing, mesh, part, spare)
        rewrites.append(Rewrite("between slices", sum(c.count for c in read.transfers), said))
        differences += more
    differences += [f"may communicate, but cannot be read: {line}" for line in read.unread_lines]
    return HloReport(read.collectives, tuple(rewrites), tuple(differences))


def _listed(found: Sequence[HloCollective], text: str) -> list[Rewrite]:
    """Rewrites that change no logical collective."""
    operands: dict[tuple[str, str], list[HloCollective]] = defaultdict(list)
    for c in found:
        operands[c.kind, c.op].append(c)
    notes: Counter[tuple[str, str]] = Counter()
    for (kind, _), members in operands.items():
        if (size := len(members)) > 1:
            notes["combined", f"{kind} over ({', '.join(members[0].axes)}), {size} in one"] += size * members[0].count
    pieces = {m[1] for m in re.finditer(r"^\s+(?:ROOT )?%?([\w.\-]+) = \(.*?\) all-to-all\(", text, re.MULTILINE)}
    for c in found:
        if c.kind == "all_to_all" and c.op in pieces:
            notes["split all-to-all", f"all_to_all over ({', '.join(c.axes)})"] += c.count
    return [Rewrite(name, n, detail) for (name, detail), n in notes.items()]


class _Match:
    """The planned collectives not yet found, the found ones not yet planned, and the rules that pair them."""

    def __init__(self, planned: Counter[Key], found: Sequence[HloCollective], redundancy: Redundancy) -> None:
        self.found, self.lost_by = found, redundancy.removals
        self.missing: Counter[Sent] = Counter()
        unknown = planned.copy()
        for sent, n in redundancy.collectives.items():
            if (known := min(n, unknown[sent[:3]])) > 0:
                self.missing[sent] = known
                unknown[sent[:3]] -= known
        self.missing.update({(*key, 0): n for key, n in unknown.items() if n})
        self.extra: Counter[_Found] = Counter()
        operands = Counter((c.kind, c.op) for c in found)
        for c in found:
            # A combined op has the name of one of its parts; which kinds the others were, the lowered module knows.
            native = operands[c.kind, c.op] == 1 and c.where.rsplit("/", 1)[-1].startswith(_PRIMITIVES.get(c.kind, ()))
            self.extra[(c.kind, c.axes, c.bytes), c.dtype, native] += c.count
        self.rewrites: list[Rewrite] = []

    def pair(self) -> None:
        """Pairs planned collectives with found ones of as many items, those with the least changes first.

        Executions that a compiler may leave out are set aside before, as many as there are fewer found than planned.
        """
        kept = self.missing - self._left_out()
        pairs = itertools.product(kept, self.extra)
        for change, sent, found in sorted((c, sent, found) for sent, found in pairs if (c := _change(sent, found))):
            if n := self._take(sent, found, kept[sent]):
                kept[sent] -= n
                at, dtype, _ = found
                if change[-1]:
                    self._note(change[-1], n, sent, f" as {at[2]} bytes of {dtype}" if at[2] != sent[2] else "")

    def _left_out(self) -> Counter[Sent]:
        """Returns executions that may be lost, of axes and items of which fewer are found: of what is found least."""
        lost = sum(self.lost_by.values(), Counter[Sent]())
        fewer: Counter[tuple[Axes, int]] = Counter()
        exact: Counter[Sent] = Counter()
        for sent, n in self.missing.items():
            fewer[_items(sent)] += n
        for (key, dtype, _), n in self.extra.items():
            fewer[_items((*key, item_bits(dtype)))] -= n
            exact[*key, item_bits(dtype)] += n
        out: Counter[Sent] = Counter()
        for sent, n in sorted(self.missing.items(), key=lambda one: exact[one[0]] - one[1]):
            out[sent] = max(0, min(n, lost[sent], fewer[_items(sent)]))
            fewer[_items(sent)] -= out[sent]
        return out

    def pair_packed(self) -> None:
        """Pairs small missing collectives with all-reduces of one tile of 128 words."""
        for sent in {**self._open("all_reduce"), **self._open("all_gather")}:
            if sent[2] < _TILE:
                at = "all_reduce", sent[1], _TILE
                if n := sum(self._take(sent, (at, "u32", native)) for native in (False, True)):
                    self._note("packed into a tile", n, sent, f" as an all-reduce of {_TILE} bytes of u32")

    def pair_joined(self, crossing: Container[Axes]) -> None:
        """Pairs all missing all-reduces over some axes with fewer extra ones of as many bytes in all.

        Over axes that cross slices one is enough that has their bytes rounded up to whole tiles.
        """
        for axes in dict.fromkeys(sent[1] for sent in self._open("all_reduce")):
            missing = self._open("all_reduce", axes)
            there = {at: n for at, n in self.extra.items() if n > 0 and at[0][:2] == ("all_reduce", axes)}
            whole = sum(sent[2] * n for sent, n in missing.items())
            tiled = {-(-whole // tile) * tile for tile in (_TILE, _TILES) if axes in crossing}
            name, more = "joined", ""
            if whole != sum(at[0][2] * n for at, n in there.items()) or sum(there.values()) >= sum(missing.values()):
                there = dict.fromkeys(sorted(at for at in there if at[0][2] in tiled)[:1], 1)
                name, more = "packed into tiles", f", {sum(at[0][2] for at in there)} bytes together"
            self.extra.subtract(there)
            for sent, n in missing.items() if there else ():
                self._explain(name, sent, n, more)

    def take_gathers(self, crossing: Counter[Key]) -> None:
        """Takes the all-gathers within a slice that end all-reduces over several."""
        for (_, axes, size), most in crossing.items():
            for found, n in self.extra.items():
                if found[0] == ("all_gather", axes, size):
                    taken = min(n, most)
                    most -= taken
                    self.extra[found] -= taken

    def explain_missing(self) -> None:
        """Explains missing collectives without a counterpart: the program runs fewer collectives than planned."""
        for sent, n in self.missing.items():
            if sent[2] == 0:
                self._explain("removed empty", sent, n)
        for name in REASONS:
            for sent, n in self.missing.items():
                self._explain(name, sent, min(n, self.lost_by[name][sent]))

    def differences(self) -> list[str]:
        """Returns one message for each collective that remains on either side."""
        missing: Counter[Key] = Counter()
        for sent, n in self.missing.items():
            missing[sent[:3]] += n
        out = [f"planned but not found: {n} x {describe(key)}" for key, n in sorted(missing.items()) if n > 0]
        for (key, dtype, _), n in sorted(self.extra.items()):
            if n > 0:
                at = [c.where or c.op for c in self.found if (c.kind, c.axes, c.bytes, c.dtype) == (*key, dtype)]
                places = "; ".join(list(dict.fromkeys(at))[:3])
                out.append(f"found but not planned: {n} x {describe(key)} of {dtype} at {places}")
        return out

    def _open(self, kind: str, axes: Axes | None = None) -> dict[Sent, int]:
        """Missing collectives of a kind that the lowered module really has."""
        return {s: n for s, n in self.missing.items() if n > 0 and s[0] == kind and s[3] and axes in (None, s[1])}

    def _take(self, sent: Sent, found: _Found, most: float = float("inf")) -> int:
        n = max(0, int(min(self.missing[sent], self.extra[found], most)))
        self.missing[sent] -= n
        self.extra[found] -= n
        return n

    def _explain(self, name: str, sent: Sent, n: int, more: str = "") -> None:
        """Takes missing executions of a collective as explained by a rewrite."""
        if n > 0:
            self.missing[sent] -= n
            self._note(name, n, sent, more)

    def _note(self, name: str, n: int, sent: Sent, more: str = "") -> None:
        self.rewrites.append(Rewrite(name, n, describe(sent[:3]) + more))


def _items(sent: Sent) -> tuple[Axes, int]:
    """Returns the axes and the number of items of a collective, which changes of kind and width leave as they are."""
    _, axes, size, bits = sent
    return axes, 8 * size // bits if bits else -1


def _change(sent: Sent, found: _Found) -> tuple[int, bool, bool, str] | None:
    """Returns a key to order the change by that makes a planned collective a found one, its name last; None if none.

    Payloads of equal bytes are one and the same whatever their items are, but rather a changed one of as many items.
    """
    kind, axes, size, bits = sent
    (other, over, received), dtype, native = found
    width, scale = item_bits(dtype), ""
    if axes != over:
        return None
    if _items(sent) == _items((*found[0], width)) and (
        kind == other or ((kind, other) in _KIND_CHANGES and not native)
    ):
        if width != bits:
            scale = "dtype promoted" if width > bits else "dtype narrowed"
        if not scale or dtype.startswith(_WIDE if width > bits else _NARROW):
            names = [name for name in (_KIND_CHANGES.get((kind, other)), scale) if name]
            return len(names) + (kind != other), not native, dtype.startswith(_WIDE), ", ".join(names)
    return (9, not native, True, "") if (kind, size) == (other, received) else None
