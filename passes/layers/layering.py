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

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Op, Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir.flow import append_behind_makers, producers
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.layers import cuts
from alpa_lite.passes.layers.forward import Split, is_expensive, split
from alpa_lite.passes.layers.types import Layer, Layering


def layering(traced: Traced, scan: int, rules: Mapping[object, Rule], *, max_layers: int = 16) -> Layering:
    """Cuts the forward pass of a micro-batch into layers.

    Args:
      traced: a step whose micro-batches run in a scan of the top block.
      rules: of all ops, as `factors.rules_of` gives them.

    Raises:
      ValueError: `scan` is no scan of the top block.
      OptionError: `max_layers` is less than one; the scan has no forward operation.
    """
    if max_layers < 1:
        raise OptionError(f"max_layers={max_layers} leaves no layer; pass 1 or more")
    parts = split(traced, scan, rules)
    values = traced.graph.values
    if not parts.forward:
        raise OptionError(f"scan={scan} has no forward operation, so there is nothing to cut into layers")
    order = _ordered(scan_op(traced, scan).bodies[0].ops, parts)
    crossing = [*cuts.crossing(order, parts.free, values).tolist(), 0]
    prices = [cuts.price(op, rules, values) for op in order]
    made = cuts.free_values(order, parts.free, values)

    def layers(starts: Sequence[int]) -> list[Layer]:
        """The order cut at some places."""
        found = []
        for start, stop in itertools.pairwise([*starts, len(order)]):
            some = order[start:stop]
            seconds = sum(prices[start:stop])
            mark = cuts.fingerprint(some, values, made)
            found.append(Layer(tuple(op.index for op in some), seconds, mark, crossing[stop - 1]))
        return found

    atoms = layers([0, *_candidates(order, parts.free, crossing)])
    ends = itertools.accumulate(cuts.cut(atoms, max_layers), initial=0)
    sizes = [0, *itertools.accumulate(len(atom.ops) for atom in atoms)]
    found = layers([sizes[end] for end in ends][:-1])
    return Layering(traced, scan, parts.forward, tuple(found), parts.free)


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
    out: dict[Op, None] = {}
    early: dict[int, list[Op]] = {}
    for op in forward:
        for root in reduces.get(op.index, ()):
            early.setdefault(root, []).append(op)
    for op in forward:
        if op.index in parts.free and not used.isdisjoint(op.results):
            continue
        if early and op.index not in reduces and op.index not in parts.free:
            roots = {root for v in op.reads for root in parts.param_of.get(v, ())}
            for follower in [f for root in sorted(roots) for f in early.pop(root, [])]:
                if _only_free(follower, defined, parts):
                    append_behind_makers(out, follower, defined)
        append_behind_makers(out, op, defined)
    for op in forward:
        append_behind_makers(out, op, defined)
    return list(out)


def _only_free(op: Op, defined: Mapping[int, Op], parts: Split) -> bool:
    """Whether an op reads only inputs and free ops' results, so that it may stand anywhere."""
    return all(v not in defined or defined[v].index in parts.free for v in op.reads)


def _candidates(order: Sequence[Op], free: frozenset[int], crossing: Sequence[int]) -> list[int]:
    """Ends of atoms: after ops that are not free, where the next such op raises the bytes cut, or is expensive."""
    places = [i for i in range(len(order) - 1) if order[i].index not in free]
    if places and all(op.index in free for op in order[places[-1] + 1 :]):
        places.pop()  # what follows would be no layer
    out = []
    for i, following in itertools.pairwise([*places, len(order) - 1]):
        rise = crossing[following] - crossing[i] if following < len(order) - 1 else 1
        if rise > 0 or (rise == 0 and is_expensive(order[following])):
            out.append(i + 1)
    return out
