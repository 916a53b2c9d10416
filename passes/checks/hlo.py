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

Those that merge, reassociate, hoist or remove lose communication. Each must be admitted by the lowered module
(`checks.redundancy`), as often as it is used, and only what that module writes may be rewritten at all.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alpa_lite.errors import VerificationError
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.checks import slices
from alpa_lite.passes.checks.hlo_text import HloCollective, item_bits, read_hlo
from alpa_lite.passes.checks.matching import pair_executions
from alpa_lite.passes.checks.redundancy import REASONS, Redundancy
from alpa_lite.passes.checks.shardy import Key, describe, totals
from alpa_lite.plan.records import Collective

_Planned = tuple[Key, int | None]
"""Planned executions whose items have a width in bits; None if the lowered module does not say."""
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
    "reduce_scatter": ("all_reduce", "reduce-scatter as all-reduce", 25.0),
    "all_gather": ("all_reduce", "all-gather as all-reduce", 26.0),
    "all_reduce": ("reduce_scatter", "all-reduce as reduce-scatter", 27.0),
}
"""Planned kind -> found kind, name of the change, and its cost: more than that of any change of width."""
_SCALES = (
    ("", 1, 1), ("dtype promoted", 2, 1), ("dtype narrowed", 1, 2), ("dtype promoted", 4, 1), ("dtype narrowed", 1, 4)
)  # fmt: skip
"""Changes of width: the name, and numerator and denominator of the bytes."""
_OTHER_WIDTH = 50.0
"""The cost of pairing payloads of equal bytes whose items differ in width; more than that of any change."""


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

    def raise_if_bad(self) -> None:
        """Raises VerificationError with every difference, and the rewrites that were recognised."""
        if self.differences:
            known = "".join(f"\n  recognised {rewrite}" for rewrite in self.rewrites)
            raise VerificationError(
                "the compiled program does not communicate as planned:\n  " + "\n  ".join(self.differences) + known
            )


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
    match.pair_joined()
    match.pair_packed()
    crossing = slices.collectives_across_slices(planned, mesh, part)
    match.pair_in_two_levels(totals((c for c in crossing if c.kind == "all_reduce"), part))
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
    combined: Counter[tuple[str, int]] = Counter()
    for (kind, _), members in operands.items():
        if (size := len(members)) > 1:
            combined[f"{kind} over ({', '.join(members[0].axes)}), {size} in one", size] += members[0].count
    pieces = {m[1] for m in re.finditer(r"^\s+(?:ROOT )?%?([\w.\-]+) = \(.*?\) all-to-all\(", text, re.MULTILINE)}
    split: Counter[Axes] = Counter()
    for c in found:
        if c.kind == "all_to_all" and c.op in pieces:
            split[c.axes] += c.count
    return [
        *(Rewrite("combined", n * size, detail) for (detail, size), n in combined.items()),
        *(Rewrite("split all-to-all", n, f"all_to_all over ({', '.join(axes)})") for axes, n in split.items()),
    ]


class _Match:
    """The planned collectives not yet found, the found ones not yet planned, and the rules that pair them."""

    def __init__(self, missing: Counter[Key], found: Sequence[HloCollective], redundancy: Redundancy) -> None:
        self.missing, self.found = missing, found
        self.lost_by, self.item_bits = redundancy.removals, redundancy.item_bits
        self.extra: Counter[_Found] = Counter()
        operands = Counter((c.kind, c.op) for c in found)
        for c in found:
            # A combined op has the name of one of its parts; which kinds the others were, the lowered module knows.
            native = operands[c.kind, c.op] == 1 and c.where.rsplit("/", 1)[-1].startswith(_PRIMITIVES.get(c.kind, ()))
            self.extra[(c.kind, c.axes, c.bytes), c.dtype, native] += c.count
        self.rewrites: list[Rewrite] = []

    def pair(self) -> None:
        """Pairs planned collectives with found ones, with as few changes of kind and width as can be."""
        planned = {(key, bits): n for key, count in self.missing.items() for bits, n in self._by_width(key, count)}
        changes = self._changes(planned)
        costs = {pair: cost for pair, (cost, _) in changes.items()}
        lost = sum(self.lost_by.values(), Counter[Key]())
        for pair, n in pair_executions(planned, self.extra, costs, {one: one[0] for one in planned}, lost).items():
            (key, _), (at, dtype, _) = pair
            self._take(key, pair[1], n)
            if name := changes[pair][1]:
                self._note(name, n, key, f" as {at[2]} bytes of {dtype}" if at[2] != key[2] else "")

    def _changes(self, planned: Iterable[_Planned]) -> dict[tuple[_Planned, _Found], tuple[float, str]]:
        """Planned and found collective -> the cost of changing one into the other, and its name; "" for equal ones."""
        out: dict[tuple[_Planned, _Found], tuple[float, str]] = {}
        there: dict[Key, list[_Found]] = defaultdict(list)
        for found in self.extra:
            there[found[0]].append(found)
        for key, bits in planned:
            kind, axes, size = key
            changed = [_KIND_CHANGES[kind]] if kind in _KIND_CHANGES else []
            for other, change, price in ((kind, "", 0.0), *changed):
                for scale, up, down in _SCALES:
                    name = ", ".join(filter(None, (change, scale)))
                    if size * up % down or (name and key not in self.item_bits):
                        continue
                    for found in there.get((other, axes, size * up // down), ()):
                        _, dtype, native = found
                        if (change and native) or not self._width(key, bits, dtype, up, down):
                            continue
                        # An equal payload that is named otherwise, or has other items, is rather a changed one.
                        strange = not name and bits not in (None, item_bits(dtype))
                        cost = price + 5.0 * up * down + 0.1 * (not native) + _OTHER_WIDTH * strange
                        out[(key, bits), found] = cost, name
        return out

    def _by_width(self, key: Key, n: int) -> list[tuple[int | None, int]]:
        """Returns the planned executions of a key by the width of their items."""
        known = self.item_bits.get(key, Counter[int]())
        return list(known.items()) if known.total() == n else [(None, n)]

    def pair_joined(self) -> None:
        """Pairs all missing all-reduces over some axes with extra ones of the same bytes in all, which are fewer."""
        for axes in dict.fromkeys(key[1] for key in self._open("all_reduce")):
            keys = [key for key in self._open("all_reduce") if key[1] == axes]
            there = {at: n for at, n in self.extra.items() if n > 0 and at[0][:2] == ("all_reduce", axes)}
            wanted = sum(key[2] * self.missing[key] for key in keys)
            fewer = 0 < sum(there.values()) < sum(self.missing[key] for key in keys)
            if fewer and wanted == sum(at[0][2] * n for at, n in there.items()):
                for key in keys:
                    self._explain("joined", key)
                self.extra.subtract(there)

    def pair_packed(self) -> None:
        """Pairs small missing collectives with all-reduces of one tile of 128 words."""
        for key in self._open("all_reduce") + self._open("all_gather"):
            if key[2] < _TILE:
                at = "all_reduce", key[1], _TILE
                if n := sum(self._take(key, (at, "u32", native)) for native in (False, True)):
                    self._note("packed into a tile", n, key, f" as an all-reduce of {_TILE} bytes of u32")

    def pair_in_two_levels(self, crossing: Counter[Key]) -> None:
        """Pairs the remaining all-reduces over several slices with the parts of them that run within one."""
        for axes in dict.fromkeys(axes for _, axes, _ in crossing):
            keys = [key for key in self._open("all_reduce") if key[1] == axes]
            whole = sum(key[2] * self.missing[key] for key in keys)
            tiled = {("all_reduce", axes, -(-whole // tile) * tile) for tile in (_TILE, _TILES) if whole}
            for found in sorted(found for found, n in self.extra.items() if n > 0 and found[0] in tiled)[:1]:
                self.extra[found] -= 1
                for key in keys:
                    self._explain("packed into tiles", key, f", {found[0][2]} bytes together")
        for (_, axes, size), most in crossing.items():
            for found, n in self.extra.items():
                if found[0] == ("all_gather", axes, size):
                    taken = min(n, most)
                    most -= taken
                    self.extra[found] -= taken

    def explain_missing(self) -> None:
        """Explains missing collectives without a counterpart: the program runs fewer collectives than planned."""
        for key in [key for key, n in self.missing.items() if n > 0 and key[2] == 0]:
            self._explain("removed empty", key)
        for name in REASONS:
            for key, n in self.missing.items():
                if (lost := min(n, self.lost_by[name][key])) > 0:
                    self.missing[key] -= lost
                    self._note(name, lost, key)

    def differences(self) -> list[str]:
        """Returns one message for each collective that remains on either side."""
        out = [f"planned but not found: {n} x {describe(key)}" for key, n in sorted(self.missing.items()) if n > 0]
        for (key, dtype, _), n in sorted(self.extra.items()):
            if n > 0:
                at = [c.where or c.op for c in self.found if (c.kind, c.axes, c.bytes, c.dtype) == (*key, dtype)]
                places = "; ".join(list(dict.fromkeys(at))[:3])
                out.append(f"found but not planned: {n} x {describe(key)} of {dtype} at {places}")
        return out

    def _open(self, kind: str) -> list[Key]:
        """Missing collectives of a kind that the lowered module really has."""
        return [k for k, n in self.missing.items() if n > 0 and k[0] == kind and k in self.item_bits]

    def _width(self, key: Key, bits: int | None, dtype: str, up: int, down: int) -> bool:
        """Returns whether `dtype` can result from the planned items if a compiler changes their width by up / down."""
        if up == down:
            return True
        if not dtype.startswith(_WIDE if up > down else _NARROW):
            return False
        widths = self.item_bits[key] if bits is None else (bits,)
        return any(width * up == item_bits(dtype) * down for width in widths)

    def _take(self, key: Key, found: _Found, most: float = float("inf")) -> int:
        n = max(0, int(min(self.missing[key], self.extra[found], most)))
        self.missing[key] -= n
        self.extra[found] -= n
        return n

    def _explain(self, name: str, key: Key, more: str = "") -> None:
        """Takes all that is missing of a collective as explained by a rewrite."""
        n, self.missing[key] = self.missing[key], 0
        self._note(name, n, key, more)

    def _note(self, name: str, n: int, key: Key, more: str = "") -> None:
        self.rewrites.append(Rewrite(name, n, describe(key) + more))
