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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax import lax

from alpa_lite.ir.graph import Argument, Atom, Block, Bounds, Op, Pieces, Stacked, Traced, Value
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.ir.flow import producers, users, values_in
from alpa_lite.passes.ir.rewriting import renamed_atom, renamed_op


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


def split(traced: Traced, block: Block, values: Sequence[Value]) -> tuple[Block, Stacked]:
    """The top block with arguments and results in pieces, where that is all that it needs of them.

    Args:
      block: its new top block; slices and concatenations are those that `layers.scans` writes.
    """
    block = pruning.live_block(block)  # what is dead may still mention whole leaves
    count = len(traced.arguments)
    made, readers = producers(block.ops), users(block.ops)
    new_value = {argument: output for output, argument in traced.state}
    returned = Counter(values_in(block.outputs))
    inputs: list[int] = []
    taken: dict[int, tuple[Bounds, tuple[int, ...]]] = {}  # output -> its parts
    renamed: dict[int, int] = {}
    arguments: list[Pieces] = []
    for number, value in enumerate(block.inputs[:count]):
        output = new_value.get(number)
        itself = output is not None and block.outputs[output] == value
        slices = _slices(readers.get(value, []), values[value])
        parts = None if slices is None else _concatenated(made, block, output, values)
        fits = slices is not None and (output is None or itself or (parts is not None and parts[0] == slices[0]))
        if not fits or returned[value] > itself:
            arguments.append(Pieces((len(inputs),)))
            inputs.append(value)
            continue
        assert slices is not None
        bounds, groups = slices
        own = tuple(group[0].results[0] for group in groups)
        renamed.update((op.results[0], first) for group, first in zip(groups, own, strict=True) for op in group[1:])
        arguments.append(Pieces(tuple(range(len(inputs), len(inputs) + len(own))), bounds))
        inputs += own
        if output is not None:
            taken[output] = (bounds, own) if itself else (bounds, parts[1])  # type: ignore[index]
    outputs: list[Atom] = []
    results: list[Pieces] = []
    for number, atom in enumerate(block.outputs):
        bounds, atoms = taken.get(number, ((), (atom,)))
        results.append(Pieces(tuple(range(len(outputs), len(outputs) + len(atoms))), bounds))
        outputs += atoms
    gone = {*inputs, *renamed}
    ops = tuple(renamed_op(op, renamed) for op in block.ops if not op.results or not gone.issuperset(op.results))
    names = tuple(renamed_atom(atom, renamed) for atom in outputs)
    return Block((*inputs, *block.inputs[count:]), ops, names), Stacked(tuple(arguments), tuple(results))


def _slices(readers: Sequence[Op], value: Value) -> tuple[Bounds, list[list[Op]]] | None:
    """The bounds at which dim 0 is sliced, and the ops of each slice; None if a reader needs anything else."""
    found: dict[tuple[int, int], list[Op]] = {}
    for op in readers:
        if op.primitive is not lax.slice_p or op.params["strides"] is not None:
            return None
        starts, limits = op.params["start_indices"], op.params["limit_indices"]
        if any(starts[1:]) or tuple(limits[1:]) != value.shape[1:]:
            return None
        found.setdefault((int(starts[0]), int(limits[0])), []).append(op)
    spans = sorted(found)
    if len(spans) < 2 or spans[0][0] != 0 or spans[-1][1] != value.shape[0]:
        return None
    if any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
        return None
    return (0, *(high for _, high in spans)), [found[span] for span in spans]


def _concatenated(
    made: Mapping[int, Op], block: Block, output: int | None, values: Sequence[Value]
) -> tuple[Bounds, tuple[Atom, ...]] | None:
    """The bounds and the parts of a result that is a concatenation along dim 0."""
    atom = None if output is None else block.outputs[output]
    op = made.get(atom) if isinstance(atom, int) else None
    if op is None or op.primitive is not lax.concatenate_p or op.params["dimension"] != 0:
        return None
    sizes = [values[v].shape[0] for v in op.reads]
    if len(sizes) != len(op.operands):
        return None
    return (0, *itertools.accumulate(sizes)), op.operands


def _parts(leaves: Sequence[Argument], pieces: Sequence[Pieces]) -> tuple[Argument, ...]:
    """The records of pieces: their paths name the slice."""
    out: list[Argument] = []
    for leaf, one in zip(leaves, pieces, strict=True):
        spans = list(itertools.pairwise(one.bounds))
        out += [replace(leaf, path=f"{leaf.path}[{low}:{high}]") for low, high in spans] or [leaf]
    return tuple(out)
