"""Arrays of some devices as arrays of more, and back, without touching what the devices hold.

A program over the union of two sets of devices takes and gives arrays of the union. What a device holds is a block of
an array of its own set; the array of the union has the same blocks, and zeros or nothing of worth elsewhere. Making
such an array from a list of blocks costs a Python object for each block. Where the blocks of this process are all that
it has of both arrays, one call changes the label instead; for this the array of the union has the shape that the other
has, so that it says of itself that it is replicated over some axes, which nobody relies on.

Where an executable makes an array for a transfer alone, its result is labelled for that from the start, and what a
transfer brings is labelled for the destination (`of_results`, `_jax.call_results`): then nothing is done to either.

That takes a union whose size is a multiple of the number of blocks; others are arrays of all blocks along the first
dim, and are made from lists. An array without dims is called replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.program import Program, Run


def mesh_over(devices: Sequence[Any]) -> Mesh:
    """A mesh with an axis for each prime factor of the number of devices, so that it has blocks of every divisor."""
    sizes = _primes(len(devices)) or (1,)
    names = tuple(f"all{n}" for n in range(len(sizes)))
    return Mesh(np.array(list(devices)).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


@dataclass(frozen=True)
class Label:
    """What an array of the union is called.

    Attributes:
      aval: shape and dtype.
      sharding: over the union; that of a shape whose shards are the blocks.
      same: whether the shape is that of the array whose blocks these are.
    """

    aval: Any
    sharding: NamedSharding
    same: bool


def label(shape: Sequence[int], block: Sequence[int], dtype: Any, mesh: Mesh) -> Label:
    """How an array of the union is called whose blocks are those of an array of this shape.

    Args:
      shape, block: of the array, and of each of its blocks.
      mesh: of `mesh_over`.
    """
    counts = [size // part if part else 1 for size, part in zip(shape, block, strict=True)]
    if mesh.size % math.prod(counts) == 0:
        free: dict[int, list[str]] = {}
        for name, size in reversed(mesh.shape.items()):
            free.setdefault(size, []).append(name)
        dims = [tuple(free[prime].pop() for prime in _primes(count)) for count in counts]
        sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims)))
        return Label(_jax.aval_of(shape, dtype), sharding, True)
    stacked = (mesh.size * block[0], *block[1:])
    return Label(_jax.aval_of(stacked, dtype), NamedSharding(mesh, PartitionSpec(mesh.axis_names)), False)


def relabelling(
    aval: Any, sharding: Any, positions: Sequence[int], *, same: bool, stand_ins: Sequence[Any] = ()
) -> Callable[[Any], Any]:
    """What makes an array, from those blocks of another that lie on the same devices.

    Args:
      aval, sharding: of the array that is made.
      positions: for each device of this process, in the order of that sharding, the position of the block among those
        of the other array; -1 for a stand-in.
      same: whether the other array has this shape, and no more blocks here.
      stand_ins: a block for each position that is -1.
    """
    if all(position < 0 for position in positions):
        made = _jax.assembled(aval, sharding, list(stand_ins))
        return lambda array: made
    if same and min(positions) >= 0:
        return _jax.relabeller(sharding)

    def assembled(array: Any) -> Any:
        blocks, rest = _jax.blocks_of(array), iter(stand_ins)
        return _jax.assembled(aval, sharding, [blocks[n] if n >= 0 else next(rest) for n in positions])

    return assembled


def of_results(
    program: Program, labels: Mapping[int, Sequence[Any]], told: Mapping[int, Any] | None = None
) -> dict[int, dict[int, Any]]:
    """What executables may call their results from the start: those that nothing reads but transfers of one label.

    Args:
      labels: for a transfer, that of each array, or None. Transfers that are left out take arrays as they are.
      told: the labels of buffers that are results of the step and go to all processes from there.

    Returns:
      For each executable the labels, by the number of the result.
    """
    wanted: dict[int, set[Any]] = {number: {(told or {}).get(number)} for number in program.outputs}
    for number, transfer in enumerate(program.transfers):
        for buffer, one in zip(transfer.sent, labels.get(number, [None] * len(transfer.sent)), strict=True):
            wanted.setdefault(buffer, set()).add(one)
    runs = [item for items in program.lists for item in items if isinstance(item, Run)]
    for buffer in {buffer for item in runs for buffer in item.inputs}:
        wanted.setdefault(buffer, set()).add(None)
    found: dict[int, dict[int, set[Any]]] = {}
    for item in runs:
        for position, buffer in enumerate(item.outputs):
            found.setdefault(item.executable, {}).setdefault(position, set()).update(wanted.get(buffer, ()))
    return {
        number: {place: label for place, those in results.items() if len(those) == 1 for label in those - {None}}
        for number, results in found.items()
    }


def _primes(number: int) -> tuple[int, ...]:
    """The prime factors."""
    out, factor = [], 2
    while number > 1:
        while number % factor == 0:
            out.append(factor)
            number //= factor
        factor += 1
    return tuple(out)
