"""Where to cut the forward pass into layers.

Cutting after operation i moves the bytes C(i) of the activations that are made up to i and read after i. A cut is worth
considering only where the next operation raises C, or is heavy and does not lower it; so a cut stands before a heavy
operation rather than after it. Between such places lie *atoms*.

    repeats     the atoms' fingerprints are a word; its runs of repeated subwords, those that cover most seconds first,
                are the model's identical layers, and a layer is a whole number of repeats, cut where that costs least
    the rest    is cut by a dynamic program over the atoms. With T the seconds of all, h those of the heaviest atom, K
                the most layers allowed, m = max(T / K, h / 3) the mean to aim at, n = T / m and b a typical C:

                    F(k, j) = min over i < j with t(i, j) <= (1 + tolerance) m, or j = i + 1,
                              of  F(k - 1, i) + n (t(i, j) / T)^2 + (1 + C(j) / b) / 2n

                so that two mean layers are cut apart unless that costs more than three typical cuts, and two that
                together make a mean one are not.

(Zheng et al., Alpa, section 5.2, cut by FLOPs alone; repeats are what makes costs shareable.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.costs.flops import flops_of
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import body_runs
from alpa_lite.passes.layers.types import Layer

# A nominal device: FLOP/s and bytes/s. Only their ratio matters, and it is similar on all accelerators.
_PEAK, _BANDWIDTH = 1e14, 1e12
_FREE_SECONDS = 1e-12  # of an operation that moves nothing, so that no layer takes no time

TOLERANCE = 1.0
"""The share by which a layer may exceed the mean seconds where that saves bytes."""


def price(op: Op, rules: Mapping[object, Rule], values: Sequence[Value]) -> float:
    """Returns seconds of an operation on the nominal device; a scan's are its body's times its length."""
    if op.bodies:
        parts = [sum((price(inner, rules, values) for inner in body.ops), 0.0) for body in op.bodies]
        return body_runs(op) * (max(parts) if op.name == "cond" else sum(parts))
    is_product = op.name in primitives.PRODUCTS | primitives.KERNELS
    moved = sum(values[v].nbytes for v in op.results) + (sum(values[v].nbytes for v in op.reads) if is_product else 0)
    computing = flops_of(op, rules[op.key], values) / _PEAK if is_product else 0.0
    return max(computing, moved / _BANDWIDTH, _FREE_SECONDS)


def fingerprint(ops: Sequence[Op], values: Sequence[Value], free: Mapping[int, str] | None = None) -> str:
    """Returns a digest of the computation of some operations: their keys, and how they are wired.

    Args:
      free: digests of the values that operations without activations make (`free_values`). Those operations
        count where their values are read, not where they stand: of layers that read one mask, none contains it.
    """
    known: dict[int, int] = {}
    free = free or {}
    digest = hashlib.blake2b(digest_size=16)
    for op in ops:
        if op.results and all(v in free for v in op.results):
            continue
        wires = [_wire(atom, values, known, free) for atom in op.operands]
        known.update((value, len(known) + i) for i, value in enumerate(op.results))
        digest.update(f"{op.key}<{','.join(wires)}\n".encode())
    return digest.hexdigest()


def free_values(order: Sequence[Op], free: frozenset[int], values: Sequence[Value]) -> dict[int, str]:
    """Returns a digest of the expression of each value that a free op makes, down to the given values."""
    found: dict[int, str] = {}
    for op in order:
        if op.index in free:
            wires = ",".join(_wire(atom, values, {}, found) for atom in op.operands)
            text = hashlib.blake2b(f"{op.key}<{wires}".encode(), digest_size=16).hexdigest()
            found.update((value, f"{text}.{i}") for i, value in enumerate(op.results))
    return found


def _wire(atom: Any, values: Sequence[Value], known: dict[int, int], free: Mapping[int, str]) -> str:
    """Describes an operand: by its number if `known` has it, else by a new one, added there, and its digest or type."""
    if isinstance(atom, Lit):
        return "L"
    if atom in known:
        return str(known[atom])
    known[atom] = len(known)
    return f"{known[atom]}:{free.get(atom) or f'{values[atom].dtype}{values[atom].shape}'}"


def crossing_activation_bytes(order: Sequence[Op], free: frozenset[int], values: Sequence[Value]) -> np.ndarray:
    """C: int64, one for each op but the last: bytes of the activations made up to it and read by a later one."""
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, op in enumerate(order):
        last.update((value, place) for value in op.reads if value in made)
        made.update((value, place) for value in op.results if op.index not in free)
    change = np.zeros(len(order) + 1, np.int64)
    for value, end in last.items():
        change[made[value]] += values[value].nbytes
        change[end] -= values[value].nbytes
    return np.cumsum(change)[: max(0, len(order) - 1)]


def cut(atoms: Sequence[Layer], max_layers: int) -> list[int]:
    """Returns how many atoms each layer takes, in order."""
    runs = repeats(atoms)
    between = _between(runs, len(atoms))
    rest = sum(stop > start for start, stop in between)
    if len(runs) + rest > max_layers:
        runs, between, rest = [], [(0, len(atoms))], 1
    size = _group_sizes(runs, max(len(runs), max_layers - rest))
    layers = sum(-(-count // n) for (_, _, count), n in zip(runs, size, strict=True)) + rest
    finer = 2 * layers < max_layers
    left = max(0, max_layers - layers)
    mean = max(sum(a.seconds for a in atoms) / max_layers, max(a.seconds for a in atoms) / 3)
    out: list[int] = []
    for number, (start, stop) in enumerate(between):
        if stop > start:
            found = balance_layers(atoms[start:stop], 1 + left, mean)
            left -= len(found) - 1
            out += found
        if number < len(runs):
            first, period, count = runs[number]
            parts = [period]
            if finer and size[number] == 1:
                pieces = _cheap_pieces(atoms[first : first + period])
                counts = iter([n for _, n in pieces])
                grouped = balance_layers([a for a, _ in pieces], 1 + left // count, mean)
                parts = [sum(next(counts) for _ in range(n)) for n in grouped]
                left -= count * (len(parts) - 1)
            n = size[number]
            out += parts * count if n == 1 else [period * min(n, count - i) for i in range(0, count, n)]
    return out


def repeats(atoms: Sequence[Layer]) -> list[tuple[int, int, int]]:
    """(first atom, atoms in a repeat, repeats), not overlapping, in order: the runs that cover most seconds first."""
    marks = [a.fingerprint for a in atoms]
    seconds = np.concatenate([[0.0], np.cumsum([a.seconds for a in atoms])])
    found: list[tuple[int, int, int]] = []

    def search(low: int, high: int) -> None:
        best: tuple[float, int, int, int] | None = None
        for period in range(1, (high - low) // 2 + 1):
            run = 0
            for i in range(high - period - 1, low - 1, -1):
                run = run + 1 if marks[i] == marks[i + period] else 0
                if run and (i == low or marks[i - 1] != marks[i - 1 + period]) and run >= period:
                    covered = seconds[i + run + period] - seconds[i]
                    if best is None or covered > best[0] * (1 + 1e-9):
                        best = covered, i, period, run
        if best is None or best[0] < 0.1 * seconds[-1]:
            return
        _, first, period, run = best
        count, spare = divmod(run + period, period)
        first = min(range(first, first + spare + 1), key=lambda i: (atoms[i + period - 1].bytes_out, i))
        search(low, first)
        found.append((first, period, count))
        search(first + period * count, high)

    search(0, len(atoms))
    return found


def _cheap_pieces(unit: Sequence[Layer]) -> list[tuple[Layer, int]]:
    """Returns a repeat as atoms that cost no more to cut than the repeat itself, with how many of `unit` each holds."""
    out: list[tuple[Layer, int]] = []
    first = 0
    for i, atom in enumerate(unit):
        if atom.bytes_out <= unit[-1].bytes_out or i == len(unit) - 1:
            some = unit[first : i + 1]
            out.append((replace(atom, seconds=sum(a.seconds for a in some)), len(some)))
            first = i + 1
    return out


def _between(runs: Sequence[tuple[int, int, int]], end: int) -> list[tuple[int, int]]:
    out, at = [], 0
    for first, period, count in runs:
        out.append((at, first))
        at = first + period * count
    return [*out, (at, end)]


def _group_sizes(runs: Sequence[tuple[int, int, int]], room: int) -> list[int]:
    """How many repeats of each run make a layer, so that there are at most `room`; divisors where they come close."""
    sizes = [1] * len(runs)
    while sum(-(-count // n) for (_, _, count), n in zip(runs, sizes, strict=True)) > room:
        layers = [-(-count // n) for (_, _, count), n in zip(runs, sizes, strict=True)]
        widest = layers.index(max(layers))
        count = runs[widest][2]
        following = next((n for n in range(sizes[widest] + 1, 2 * sizes[widest] + 1) if count % n == 0), None)
        sizes[widest] = following or sizes[widest] + 1
    return sizes


def balance_layers(atoms: Sequence[Layer], most: int, mean: float, tolerance: float = TOLERANCE) -> list[int]:
    """Returns the cutting into at most `most` layers that minimises the sum above; how many atoms each layer takes."""
    count = len(atoms)
    ends = np.concatenate([[0.0], np.cumsum([a.seconds for a in atoms])])
    spans = ends[None, :] - ends[:, None]  # [first, end]
    single = np.arange(count + 1)[None, :] - np.arange(count + 1)[:, None] == 1
    aimed = max(1.0, ends[-1] / mean)
    cuts = np.array([0.0] + [float(a.bytes_out) for a in atoms])
    cuts = (1 + cuts / max(1.0, np.median(cuts[1:]))) / (2 * aimed)
    cuts[-1] = 0.0
    while True:
        allowed = (spans > 0) & ((spans <= (1 + tolerance) * mean) | single)
        costs = np.where(allowed, cuts[None, :] + aimed * (spans / ends[-1]) ** 2, np.inf)
        best = np.full((most + 1, count + 1), np.inf)
        best[0, 0] = 0.0
        came = np.zeros((most + 1, count + 1), int)
        for k in range(1, most + 1):
            total = best[k - 1][:, None] + costs
            came[k], best[k] = total.argmin(0), total.min(0)
        k = int(best[:, count].argmin())
        if np.isfinite(best[k, count]):
            break
        tolerance = 2 * tolerance + 0.1  # too many heavy atoms for so few layers
    out: list[int] = []
    end = count
    while k:
        out.append(end - int(came[k, end]))
        end, k = int(came[k, end]), k - 1
    return out[::-1]
