"""Which arguments of a step on one mesh are donated: those whose buffers become outputs.

XLA reuses a donated buffer for an output of the same type and sharding, and for no other; JAX warns of a donated buffer
that no output can use. So "auto" donates the state leaves whose new value has their sharding, and of the arguments that
a user names those are donated that find such an output.

JAX gives the buffers to the outputs of their type as they come. Where a leaf's new value is written over another leaf,
XLA copies the old values that are still to be read; so donated arguments are in the order of what replaces them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite.errors import OptionError
from alpa_lite.graph import Traced
from alpa_lite.passes.tracing.arguments import donated_leaves
from alpa_lite.pins import layout_of_spec

Donate = str | int | Sequence[int | str]
"""What a user says of donation: "auto", or positions and names of arguments."""


def donated(
    traced: Traced, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], donate: Donate
) -> list[int]:
    """The numbers of the arguments whose buffers become outputs, in the order of these outputs as far as it is known.

    These are the arguments asked for whose type and sharding an output has; JAX would warn of others.
    """
    values, block = traced.graph.values, traced.graph.block

    def kind(aval: Any, spec: PartitionSpec) -> tuple[Any, ...]:
        return tuple(aval.shape), aval.dtype, layout_of_spec(spec, len(aval.shape))

    arguments = [kind(values[number], spec) for number, spec in zip(block.inputs, in_specs, strict=False)]
    outputs = [
        kind(values[atom] if isinstance(atom, int) else atom.aval, spec)
        for atom, spec in zip(block.outputs, out_specs, strict=True)
    ]
    if isinstance(donate, str):
        if donate != "auto":
            raise OptionError(f'donate_argnums is {donate!r}; give "auto", an int or a tuple of ints')
        return [argument for output, argument in sorted(traced.state) if outputs[output] == arguments[argument]]
    wanted = donated_leaves(traced, donate)
    free = Counter(outputs)
    chosen = []
    for argument in wanted:
        if free[arguments[argument]] > 0:
            free[arguments[argument]] -= 1
            chosen.append(argument)
    replaced_by = {argument: output for output, argument in traced.state}
    return sorted(chosen, key=lambda argument: replaced_by.get(argument, len(outputs)))
