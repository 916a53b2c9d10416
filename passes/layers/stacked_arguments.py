"""A stacked argument of the user's step as several arguments of the cut step, one for each stage that owns a part.

Problem. A scan over layers that is cut between stages (`layers.scans`) reads slices of stacked leaves, and the new
state is the concatenation of what the stages return. As one argument, such a leaf would be owned by one stage and sent
to the others whole.

Answer. An argument that is read in slices of dim 0 alone, which cover it, and whose new value is the concatenation of
as many parts (or itself), becomes one argument a slice, and its new value one result a part. Then each stage owns its
slice, as any other leaf. The user still passes and receives whole leaves: `Stacked` records which arguments and
results make up which leaf, and the runtime takes leaves apart and puts them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from alpa_lite.ir.graph import Argument, Atom, Block, Bounds, Pieces, Stacked, Traced
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.ir.flow import uses

InPieces = tuple[Bounds, tuple[int, ...]]
"""Where the pieces of a stacked value begin, with the end of the last, and the pieces."""


def applied(stacked: Stacked, traced: Traced) -> Traced:
    """The user's step with arguments and results in pieces; its graph has them already."""
    new_value = {argument: output for output, argument in traced.state}
    state = [
        pair
        for argument, output in new_value.items()
        for pair in zip(stacked.results[output].numbers, stacked.arguments[argument].numbers, strict=True)
    ]
    return replace(
        traced,
        arguments=_parts(traced.arguments, stacked.arguments),
        outputs=_parts(traced.outputs, stacked.results),
        state=tuple(sorted(state)),
        stacked=stacked,
    )


def split(
    traced: Traced, block: Block, asked_for: Mapping[int, InPieces], joined: Mapping[int, InPieces]
) -> tuple[Block, Stacked, list[int]]:
    """The top block with arguments and results in pieces, where that is all that it needs of them.

    Args:
      block: its new top block. Nothing makes the pieces of arguments that it reads.
      asked_for: argument -> the pieces that are read of it.
      joined: the pieces of values that are concatenations.

    Returns:
      The block and its leaves; and the arguments that stay whole although pieces of them are read.
    """
    used = uses(pruning.live_block(block))  # what is dead may still mention whole leaves
    count = len(traced.arguments)
    new_value = {argument: output for output, argument in traced.state}
    inputs: list[int] = []
    taken: dict[int, InPieces] = {}  # output -> its parts
    arguments: list[Pieces] = []
    whole: list[int] = []
    for number, value in enumerate(block.inputs[:count]):
        output = new_value.get(number)
        atom = None if output is None else block.outputs[output]
        made = (asked_for if atom == value else joined).get(atom) if isinstance(atom, int) else None
        bounds, parts = asked_for.get(value, ((), ()))
        fits = parts and used[value] == (atom == value) and all(used[part] for part in parts)
        if not fits or (output is not None and (made is None or made[0] != bounds)):
            whole += [value] if parts else []
            bounds, parts = (), (value,)
        elif output is not None and made is not None:
            taken[output] = made
        arguments.append(Pieces(tuple(range(len(inputs), len(inputs) + len(parts))), bounds))
        inputs += parts
    outputs: list[Atom] = []
    results: list[Pieces] = []
    for number, atom in enumerate(block.outputs):
        bounds, atoms = taken.get(number, ((), (atom,)))
        results.append(Pieces(tuple(range(len(outputs), len(outputs) + len(atoms))), bounds))
        outputs += atoms
    block = Block((*inputs, *block.inputs[count:]), block.ops, tuple(outputs))
    return block, Stacked(tuple(arguments), tuple(results)), whole


def _parts(leaves: Sequence[Argument], pieces: Sequence[Pieces]) -> tuple[Argument, ...]:
    """The records of pieces: their paths name the slice."""
    out: list[Argument] = []
    for leaf, one in zip(leaves, pieces, strict=True):
        spans = list(itertools.pairwise(one.bounds))
        out += [replace(leaf, path=f"{leaf.path}[{low}:{high}]") for low, high in spans] or [leaf]
    return tuple(out)
