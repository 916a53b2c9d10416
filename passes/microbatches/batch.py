"""The dims along which the arguments of a batch can be cut into micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from alpa_lite.errors import MicrobatchError
from alpa_lite.ir.graph import Argument, Traced
from alpa_lite.ir.paths import format_path


class BatchArray(NamedTuple):
    """An argument of the batch that has dims."""

    path: str
    value: int
    shape: tuple[int, ...]


class Cut(NamedTuple):
    """A way to cut the batch: the number of examples, and the dim of each input that is cut."""

    size: int
    dims: dict[int, int]


def inputs_of(traced: Traced) -> list[tuple[Argument, int]]:
    """Returns the arguments of a step, with the values of its graph; constants are left out."""
    return list(zip(traced.arguments, traced.graph.block.inputs, strict=False))


def batch_arrays(traced: Traced) -> list[BatchArray]:
    """Returns each argument of the batch that is not a scalar."""
    values = traced.graph.values
    return [
        BatchArray(format_path(argument.path), value, values[value].shape)
        for argument, value in inputs_of(traced)
        if argument.role == "batch" and values[value].shape
    ]


def bound_inputs(traced: Traced) -> set[int]:
    """Arguments that are floating-point state; without state, weights: they must not be read ahead of the loop."""
    values, kept = traced.graph.values, "state" if traced.state else "frozen"
    return {
        value
        for argument, value in inputs_of(traced)
        if argument.role == kept and jnp.issubdtype(values[value].dtype, jnp.inexact)
    }


def argument_dims(traced: Traced, dims: Mapping[int, int]) -> dict[int, int]:
    """Argument number -> dim, from value -> dim."""
    number = {value: i for i, value in enumerate(traced.graph.block.inputs)}
    return {number[value]: dim for value, dim in dims.items()}


def candidate_cuts(traced: Traced, parts: int) -> list[Cut]:
    """Returns the cuts in order of preference: dim 0 of every batch argument first.

    The size is one that every argument of the batch has. Where there is none, there may be several batches (of points
    within and points on the edge), each cut along its own dim 0; or only the size that most have is one of a batch, and
    the others (class weights) are whole in every micro-batch.

    Raises:
      MicrobatchError: there is no batch, or it does not divide.
    """
    batch = [item for item in batch_arrays(traced) if math.prod(item.shape) > 1]
    if not batch:
        raise MicrobatchError(
            f"num_microbatches={parts}: no argument of the step is a batch of arrays; name it with batch_argnums=..."
        )
    sizes = _sizes([item.shape for item in batch])
    fits = [size for size in sizes if size % parts == 0]
    leading = {item.shape[0] for item in batch}
    several = []  # batches
    if len(leading) > 1 and all(size % parts == 0 for size in leading):
        several = [Cut(batch[0].shape[0], {item.value: 0 for item in batch})]
    if not fits and not several and not any(size % parts == 0 for size in leading if not traced.has_named_batch):
        raise indivisible_error(next(item for item in batch if sizes[0] in item.shape), sizes[0], parts)
    out = []
    for size in fits:
        having = [item for item in batch if size in item.shape]
        dims = {item.value: [d for d, n in enumerate(item.shape) if n == size] for item in having}
        common = set.intersection(*map(set, dims.values()))
        out.append(Cut(size, {value: min(common) if common else own[0] for value, own in dims.items()}))
    has_uncut = any(size not in item.shape for size in fits for item in batch)
    out = [*several, *out] if has_uncut else [*out, *several]
    if len(leading) > 1 and not traced.has_named_batch:  # the arguments of one size may be all that is a batch
        alone = [
            Cut(size, {item.value: 0 for item in batch if item.shape[0] == size})
            for size in leading
            if size % parts == 0
        ]
        out += [cut for cut in sorted(alone, key=lambda cut: -len(cut.dims)) if cut not in out]
    return out


def _sizes(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The sizes that the batch may have: only that of every dim 0, else those that all have, else the commonest."""
    first = Counter(shape[0] for shape in shapes)
    if len(first) == 1:
        size = shapes[0][0]
        others = set.intersection(*(set(shape[1:]) for shape in shapes)) - {1, size}
        return [size, *sorted(others, reverse=True)]
    everywhere = set.intersection(*(set(shape) for shape in shapes)) - {1}
    if everywhere:
        return sorted(everywhere, key=lambda size: (first[size], size), reverse=True)
    return [first.most_common(1)[0][0]]


def find_indivisible(traced: Traced, parts: int) -> MicrobatchError | None:
    """The error that the first dim of the batch does not divide, for steps in which cutting another one was refused."""
    batch = batch_arrays(traced)
    if len({item.shape[0] for item in batch}) != 1 or batch[-1].shape[0] % parts == 0:
        return None
    return indivisible_error(batch[-1], batch[-1].shape[0], parts)


def indivisible_error(item: BatchArray, size: int, parts: int) -> MicrobatchError:
    """Returns the error that a number of micro-batches does not divide the batch."""
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return MicrobatchError(
        f"num_microbatches={parts}: the batch argument {item.path} of shape {list(item.shape)} holds {size} examples, "
        f"which {parts} micro-batches do not divide; use one of {divisors}, or another batch size"
    )
