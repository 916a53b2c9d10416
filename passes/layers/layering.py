"""The forward pass of a micro-batch as layers, and layers as stages.

`layering` finds the forward pass in the body of the scan over micro-batches (`layers.forward`), orders it so that what
needs no activation stands before its first user, and cuts it into layers (`layers.cuts`): contiguous groups of
forward operations that balance seconds and cut few bytes, identical where the model repeats itself. `assign` gives
every operation of the step a stage, once layers have been grouped into stages (`layers.assignment`).

Nothing here depends on a device: seconds are those of a nominal accelerator and serve only to compare layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.graph import Op, Traced
from alpa_lite.passes.ir.flow import producers
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.layers import cuts
from alpa_lite.passes.layers.cuts import Atom
from alpa_lite.passes.layers.forward import Split, is_expensive, split
from alpa_lite.passes.layers.types import Layer, Layering
from alpa_lite.strategy import Rule


def layering(
    traced: Traced,
    scan: int,
    rules: Mapping[object, Rule],
    *,
    max_layers: int = 16,
    tolerance: float = 1.0,
    hints: Sequence[str] | None = None,
) -> Layering:
    """Cuts the forward pass of a micro-batch into layers.

    Args:
      traced: a step whose micro-batches run in a scan of the top block.
      scan: the index of that scan.
      rules: of all ops, as `factors.rules_of` gives them.
      max_layers: at most so many layers.
      tolerance: by how much a layer may exceed the mean seconds, as a share, where bytes are saved by it.
      hints: names of scopes (`jax.named_scope`, module names): a layer begins at the first operation of each, and
        nowhere else.

    Raises:
      ValueError: `scan` is no scan of the top block.
      OptionError: `max_layers` is less than one; no operation is in a scope that `hints` names; the scan has no
        forward operation.
    """
    if max_layers < 1:
        raise OptionError(f"max_layers={max_layers} leaves no layer; pass 1 or more")
    parts = split(traced, scan, rules)
    values = traced.graph.values
    body = scan_op(traced, scan).bodies[0]
    if not parts.forward:
        raise OptionError(f"scan={scan} has no forward operation, so there is nothing to cut into layers")
    order = _ordered(body.ops, parts)
    crossing = cuts.crossing(order, parts.free, values)
    prices = [cuts.price(op, rules, values) for op in order]
    made = cuts.free_values(order, parts.free, values)
    if hints is None:
        marks = _candidates(order, parts.free, crossing)
        atoms = [
            Atom(
                start,
                stop,
                sum(s for s, _ in prices[start:stop]),
                cuts.fingerprint(order[start:stop], values, made),
                int(crossing[stop - 1]) if stop < len(order) else 0,
            )
            for start, stop in zip([0, *marks], [*marks, len(order)], strict=True)
        ]
        ends, at = [], 0
        for count in cuts.cut(atoms, max_layers, tolerance):
            at += count
            ends.append(atoms[at - 1].stop)
    else:
        ends = [*_hinted(order, hints), len(order)]
    layers = tuple(
        Layer(
            tuple(op.index for op in order[start:stop]),
            sum(s for s, _ in prices[start:stop]),
            sum(f for _, f in prices[start:stop]),
            cuts.fingerprint(order[start:stop], values, made),
            int(crossing[stop - 1]) if stop < len(order) else 0,
        )
        for start, stop in zip([0, *ends[:-1]], ends, strict=True)
    )
    return Layering(traced, scan, parts.forward, layers, tuple(op.index for op in order), parts.free)


def _ordered(ops: Sequence[Op], parts: Split) -> list[Op]:
    """The forward ops: program order, each free op right before its first user that is not free.

    Reductions of parameters (a regulariser) stand before the first other user of these parameters. A free op that only
    the backward pass reads keeps its place.
    """
    forward = [op for op in ops if op.index in parts.forward]
    defined = producers(forward)
    reduces = {
        op.index: parts.param_of[op.results[0]]
        for op in forward
        if op.index not in parts.free and op.results and op.results[0] in parts.param_of
    }
    used = {v for op in forward for v in op.reads}
    out: list[Op] = []
    done: set[int] = set()

    def place(op: Op) -> None:
        stack = [op]
        while stack:
            top = stack[-1]
            missing = [defined[v] for v in top.reads if v in defined and defined[v].index not in done]
            if missing:
                stack += missing
                continue
            stack.pop()
            if top.index not in done:
                done.add(top.index)
                out.append(top)

    early: dict[int, list[Op]] = {}
    for op in forward:
        for root in reduces.get(op.index, ()):
            early.setdefault(root, []).append(op)
    for op in forward:
        if op.index in parts.free:
            if used.isdisjoint(op.results):
                place(op)
            continue
        if early and op.index not in reduces:
            roots = {root for v in op.reads for root in parts.param_of.get(v, ())}
            for follower in [f for root in sorted(roots) for f in early.pop(root, [])]:
                if _only_free(follower, defined, parts):
                    place(follower)
        place(op)
    for op in forward:
        if op.index not in done:
            place(op)
    return out


def _only_free(op: Op, defined: Mapping[int, Op], parts: Split) -> bool:
    """Whether an op reads only inputs and free ops' results, so that it may stand anywhere."""
    return all(v not in defined or defined[v].index in parts.free for v in op.reads)


def _candidates(order: Sequence[Op], free: frozenset[int], crossing: np.ndarray) -> list[int]:
    """Ends of atoms: after ops that are not free, where the next such op raises the bytes cut, or is expensive."""
    places = [i for i in range(len(order) - 1) if order[i].index not in free]
    if places and all(op.index in free for op in order[places[-1] + 1 :]):
        places.pop()  # what follows would be no layer
    out = []
    for i, following in itertools.pairwise([*places, len(order) - 1]):
        rise = int(crossing[following]) - int(crossing[i]) if following < len(crossing) else 1
        if rise > 0 or (rise == 0 and is_expensive(order[following])):
            out.append(i + 1)
    return out


def _hinted(order: Sequence[Op], hints: Sequence[str]) -> list[int]:
    """The first op of each scope, but for the very first op."""
    known = [_jax.scopes(op.source) for op in order]
    out = set()
    for hint in hints:
        first = next((i for i, scopes in enumerate(known) if hint in scopes), None)
        if first is None:
            names = sorted({name for scopes in known for name in scopes if "(" not in name})
            raise OptionError(
                f"hints names the scope {hint!r}, which no forward operation is in; "
                + (f"there are {', '.join(names)}" if names else "mark layers with jax.named_scope")
            )
        out.add(first)
    return sorted(out - {0})
