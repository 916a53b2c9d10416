"""Runs of instructions that repeat, so that readers of a program process each distinct run once.

The instructions of an unrolled model repeat with the layers. Two runs are equal if instruction by instruction they do
the same (operation, local form, layouts, steps) and are wired alike: every operand is the same
result within the run, or the same one of its inputs, and the same results leave it. Equal runs are one function, called
several times.

Where runs begin is found from the distances at which equal instructions follow each other: a stretch in which every
instruction equals that p places on is cut into pieces of length p. Any cut is correct; a good one shares much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.passes.ir.repeats import SHORTEST, find_periods, find_stretches
from alpa_lite.passes.lowering.program import Body, Compute, Instruction, Reshard

_MOST = 0.2  # of what repeats but for a few instructions, the least part between those that is cut out


@dataclass(frozen=True, eq=False)
class Run:
    """The function that instructions are, the registers it makes, and a key: None equals nothing."""

    body: Body
    outputs: tuple[int, ...]
    key: Any = None


def runs_of(instructions: Sequence[Instruction], wanted: Sequence[int], traced: Traced) -> list[Run]:
    """Returns the instructions in order, cut into runs. `wanted`: the registers that are read after all of them."""
    tokens = _tokens(instructions, traced)
    last_read: dict[int, int] = {}
    for i, item in enumerate(instructions):
        last_read.update(dict.fromkeys(item.reads, i))
    last_read.update((register, len(instructions)) for register in wanted)
    cuts = itertools.pairwise(_cuts(tokens))
    return [_run(instructions[start:end], tokens[start:end].tolist(), end, last_read) for start, end in cuts]


def _run(instructions: Sequence[Instruction], tokens: list[int], end: int, last_read: dict[int, int]) -> Run:
    """Returns the run of some instructions, the last of which is number `end - 1`."""
    inputs: dict[int, int] = {}
    made: dict[int, int] = {}
    wiring: list[int] = []
    for item in instructions:
        for o in item.reads:
            wiring.append(made[o] if o in made else -1 - inputs.setdefault(o, len(inputs)))
        for register in item.results:
            made[register] = len(made)
    outputs = tuple(register for register in made if last_read.get(register, -1) >= end)
    key = None
    if len(instructions) >= SHORTEST and min(tokens) >= 0:
        key = tuple(tokens), tuple(wiring), tuple(made[register] for register in outputs)
    return Run(Body(tuple(inputs), tuple(instructions), outputs), outputs, key)


def _tokens(instructions: Sequence[Instruction], traced: Traced) -> np.ndarray:
    """Returns a number for each instruction: equal ones do the same to equal shapes; negative ones equal nothing."""
    values, numbers = traced.graph.values, {}
    out = np.empty(len(instructions), dtype=np.int64)
    for i, item in enumerate(instructions):
        match item:
            case Compute(op=op, form=form) if not op.has_effects:
                wired = tuple([isinstance(o, Lit) for o in item.operands])
                token = (op.key, op.ctx, form.operands, form.results, form.collectives, wired)
            case Reshard(value=value, steps=steps, is_late=late):
                token = (steps, values[value].shape, values[value].dtype, late)
            case _:
                out[i] = -1 - i
                continue
        out[i] = numbers.setdefault(token, len(numbers))
    return out


def _cuts(tokens: np.ndarray) -> list[int]:
    """Returns where runs begin, and the end.

    Whole repeats are cut first, then repeats but for a few instructions, such as layers each of which reads a row of
    its own of one array: the parts between those.
    """
    cuts = {0, len(tokens)}
    free = np.ones(len(tokens), dtype=bool)
    periods = find_periods(tokens)
    for period in periods:
        for start, end in find_stretches(tokens, period, free):
            times = (end - start) // period + 1  # the last of the equal pieces begins where the stretch ends
            if times < 2:
                continue
            cuts.update(start + period * k for k in range(times + 1))
            free[start : start + period * times] = False
    pieces: set[tuple[int, int]] = set()
    for period in periods:
        for start, end in find_stretches(tokens, period, free):
            those = {(start, end), (start + period, end + period)}
            taken = any(piece not in pieces and not free[slice(*piece)].all() for piece in those)
            if taken or end - start < max(SHORTEST, _MOST * period):
                continue
            pieces |= those
            for piece in those:
                cuts.update(piece)
                free[slice(*piece)] = False
    return sorted(cuts)
