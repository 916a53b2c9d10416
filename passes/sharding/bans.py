"""Strategies that a user forbids by name, as exclusions from the integer program.

data parallel     a dim that is connected with the first dim of a batch argument is cut, in any operation
fsdp              a parameter, or a copy of it in another form, is gathered for the operations that read it
zero              a new parameter is gathered after its update, which was cut
tensor parallel   a product or a gather works on blocks of a parameter

Factors are connected if a value passes between them: those of the batch are all dims that its examples become,
micro-batches included.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from alpa_lite.graph import Traced
from alpa_lite.methods import STRATEGIES
from alpa_lite.passes.ir.primitives import PRODUCTS
from alpa_lite.passes.sharding.connected import connected, of_the_batch
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.kinds import parameter_of, state_kinds


@dataclass(frozen=True)
class Bans:
    """Exclusions from the integer program of a step.

    Attributes:
      factors: group -> those of its factors that must not be cut.
      gathers: values that must not be gathered.
    """

    factors: Mapping[int, frozenset[int]] = field(default_factory=dict)
    gathers: frozenset[int] = frozenset()


NO_BANS = Bans()


def bans(traced: Traced, grouping: Grouping, forbidden: Collection[str]) -> Bans:
    """Returns the exclusions from the program of a step that follow from forbidding some of `STRATEGIES`."""
    assert set(forbidden) <= set(STRATEGIES)
    if not forbidden:
        return NO_BANS
    block = traced.graph.block
    read = parameter_of(traced).keys()
    factors: dict[int, set[int]] = {}
    gathers: set[int] = set()
    if "data parallel" in forbidden:
        for group, factor in connected(grouping, of_the_batch(traced, grouping)):
            factors.setdefault(group, set()).add(factor)
    if "tensor parallel" in forbidden:
        for demand in grouping.demands:
            if demand.value in read and demand.op >= 0 and grouping.ops[demand.op].name in PRODUCTS | {"gather"}:
                factors.setdefault(demand.group, set()).update(f for dim in demand.dims for f in dim)
    if "fsdp" in forbidden:
        gathers |= read
    if "zero" in forbidden:
        kinds = state_kinds(traced)
        new = (block.outputs[out] for out, argument in traced.state if kinds.get(argument) == "params")
        gathers.update(a for a in new if isinstance(a, int) and a not in block.inputs)
    return Bans({group: frozenset(some) for group, some in factors.items()}, frozenset(gathers))
