"""Factor rules of operations that index: gather, scatter, dynamic slices. Conventions: `factors.rules`.

A gather reads, for each point of the batch dims of its indices, a window of the operand. With the batch dims b,
window dims w taken whole, and an indexed dim v of which one row is taken, it is the product of a one-hot matrix with
the operand,

    result[b, w] = sum_v onehot(indices)[b, v] * operand[v, w],

so v is a sum; scatter-add is the transpose of that, and there b is the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from alpa_lite.ir.strategy import FactorKind, Rule
from alpa_lite.passes.factors.base import Call, Dim, Rules, is_number, shape
from alpa_lite.passes.ir import primitives


def gather(call: Call) -> Rule:
    """See the module's formula."""
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    operand, indices = (shape(aval) for aval in call.operands)
    result = shape(call.results[0])
    new = Rules()
    batch = list(new.dims(indices[:-1], "parallel"))
    rows: FactorKind = "sum" if is_number(call.operands[0]) else "replicate"
    read: list[Dim] = []
    window: list[Dim] = []  # of the result, in order
    for d, size in enumerate(operand):
        if d in numbers.operand_batching_dims:
            read.append(batch[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(d)]])
        elif d in numbers.collapsed_slice_dims:
            read.append(new.dim(size, rows if d in numbers.start_index_map else "replicate"))
        elif sizes[d] == size:
            read.append(new.dim(size, "parallel"))
            window.append(read[-1])
        else:
            read.append(new.dim(size, "replicate"))
            window.append(new.dim(sizes[d], "replicate"))
    offsets, batches = iter(window), iter(batch)
    out = tuple(next(offsets) if d in numbers.offset_dims else next(batches) for d in range(len(result)))
    return new.rule([tuple(read), (*batch, ())], [out])


def scatter(call: Call) -> Rule:
    """See the module's formula; without addition the order of updates matters, and their batch dims are replicated."""
    numbers = call.params["dimension_numbers"]
    operand, indices, updates = (shape(aval) for aval in call.operands)
    adds = call.name in primitives.SCATTER_ADDITIONS
    new = Rules()
    shared = numbers.scatter_indices_batching_dims
    batch = [
        new.dim(size, "parallel" if d in shared else "sum" if adds else "replicate")
        for d, size in enumerate(indices[:-1])
    ]
    sizes = iter(updates[d] for d in numbers.update_window_dims)
    written: list[Dim] = []
    window: list[Dim] = []  # of the updates, in order
    for d, size in enumerate(operand):
        if d in numbers.operand_batching_dims:
            written.append(batch[shared[numbers.operand_batching_dims.index(d)]])
        elif d in numbers.inserted_window_dims:
            indexed = d in numbers.scatter_dims_to_operand_dims
            written.append(new.dim(size, "special" if indexed else "replicate"))
        else:
            update = next(sizes)
            written.append(new.dim(size, "parallel" if update == size else "replicate"))
            window.append(written[-1] if update == size else new.dim(update, "replicate"))
    windows, batches = iter(window), iter(batch)
    given = tuple(next(windows) if d in numbers.update_window_dims else next(batches) for d in range(len(updates)))
    return new.rule([tuple(written), (*batch, ()), given], [tuple(written)])


def dynamic_slice(call: Call) -> Rule:
    """Dims taken whole are parallel; so are those that `tile` does not repeat."""
    new = Rules()
    operand, result = new.match_dims(shape(call.operands[0]), shape(call.results[0]))
    return new.rule([operand, *(new.dims(shape(aval), "replicate") for aval in call.operands[1:])], [result])


def dynamic_update_slice(call: Call) -> Rule:
    """Dims updated whole are parallel."""
    new = Rules()
    operand, given = new.match_dims(shape(call.operands[0]), shape(call.operands[1]))
    return new.rule([operand, given, *(new.dims(shape(aval), "replicate") for aval in call.operands[2:])], [operand])


INDEXING: Mapping[str, Callable[[Call], Rule]] = {
    "gather": gather,
    **dict.fromkeys(primitives.SCATTERS, scatter),
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
