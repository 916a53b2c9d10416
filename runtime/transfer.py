"""Arrays from one submesh to another, as planned, without the host and without waiting (`docs/transfers.md`).

Blocks move singly, and the work on them is done by small functions on one device each, which start without waiting too:

1. *cut*: where a device sends parts of its blocks, one function for each such device makes all the pieces;
2. *put*: one `jax.device_put` takes every piece, and every array that can go whole, to its device;
3. *join*: where a device receives its blocks in parts, one function for each such device joins them;
4. *assemble*: the blocks are made global arrays in the layouts in which they landed;
5. *reshard*: one function on the destination's submesh takes all arrays on from there.

Steps that a transfer has no use for are left out. All functions are compiled when the transfer is made. A block that
stays on its device, and is not resharded after, is copied by the cut: `device_put` would share its memory, which the
receiver may donate.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from alpa_lite import _jax
from alpa_lite.passes.local.types import apply_in_bytes
from alpa_lite.passes.lowering.emission import change_layout
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs.transfers import Ranges, TransferPlan, blocks
from alpa_lite.runtime.compile import compile_lowered, throttle
from alpa_lite.runtime.meshes import lower_region, submesh_of

Part = tuple[int, Any, Ranges, Ranges]
"""A part of a block: the number of the block that has it, the dtype, the ranges of that block and those of the part."""

Blocks = dict[int, list[tuple[int, list[Part]]]]
"""By device, the blocks that it makes of parts of others: the number of each, and the parts."""


class Transfer:
    """The arrays of one edge of the pipeline, from their submesh to the next. Call it once for each transfer.

    Holds no arrays. Equal plans may share one.
    """

    def __init__(self, plans: Sequence[TransferPlan], devices: Sequence[Any]) -> None:
        """Compiles the executables of the plans.

        Args:
          plans: one for each array, all between the same two submeshes.
          devices: the devices of the cluster, by number.

        Raises:
          ValueError: the plans are between different submeshes.
        """
        if len({(plan.src_mesh, plan.dst_mesh) for plan in plans}) > 1:
            raise ValueError("plans of one transfer are between the same two submeshes; make a transfer for each pair")
        source, destination = submesh_of(plans[0].src_mesh, devices), submesh_of(plans[0].dst_mesh, devices)
        self._expected: list[Any] = [NamedSharding(source, spec_of(plan.src)) for plan in plans]
        self._landed = [(p.shape, p.dtype, NamedSharding(destination, spec_of(p.landing_layout))) for p in plans]
        self._whole = [i for i, plan in enumerate(plans) if plan.is_equal]
        self._split = [i for i, plan in enumerate(plans) if not plan.is_equal]
        self._targets: list[Any] = [self._landed[i][-1] for i in self._whole]
        # Blocks are numbered: those of the source, and pieces as they are cut, as they are put, and as they are joined.
        self._num_blocks = len(self._split) * source.size
        self._sent: list[int] = []
        self._put: list[int] = []
        self._assembled: dict[int, list[int]] = {}
        cuts: Blocks = defaultdict(list)
        joins: Blocks = defaultdict(list)
        for first, i in enumerate(self._split):
            self._plan_pieces(i, first * source.size, plans[i], cuts, joins)
        self._targets += [devices[piece.destination] for i in self._split for piece in plans[i].pieces]
        self._cuts, self._joins = (
            [_compile_blocks(devices[d], made) for d, made in some.items()] for some in (cuts, joins)
        )
        self._reshard = compile_reshard(plans, destination)

    def _plan_pieces(self, number: int, first: int, plan: TransferPlan, cuts: Blocks, joins: Blocks) -> None:
        """Numbers the pieces of an array that does not go whole; `first` is the number of its first block."""
        have = blocks(plan.shape, plan.src, plan.src_mesh.mesh)
        assembled = self._assembled[number] = []
        for device, pieces in itertools.groupby(plan.pieces, lambda piece: piece.destination):
            parts: list[Part] = []
            for piece in pieces:
                k = piece.source - plan.src_mesh.first
                sent, stays = first + k, piece.source == piece.destination and not plan.steps  # steps make new arrays
                if piece.ranges != have[k] or stays:
                    sent = self._new_block()
                    cuts[piece.source].append((sent, [(first + k, plan.dtype, have[k], piece.ranges)]))
                self._sent.append(sent)
                self._put.append(self._new_block())
                parts.append((self._put[-1], plan.dtype, piece.ranges, piece.ranges))
            assembled.append(parts[0][0] if len(parts) == 1 else self._new_block())
            if len(parts) > 1:
                joins[device].append((assembled[-1], parts))

    def _new_block(self) -> int:
        """Returns the number of one more block."""
        self._num_blocks += 1
        return self._num_blocks - 1

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays on the destination's submesh, each in its `dst` layout. Returns before they are there.

        Args:
          arrays: as planned: on the devices of the source's submesh, in its order, each in its `src` layout.

        Raises:
          ValueError: an array is sharded otherwise. (It would arrive permuted, or through the host.)
        """
        for i, (array, expected) in enumerate(zip(arrays, self._expected, strict=True)):
            if array.sharding is not expected:
                if not array.sharding.is_equivalent_to(expected, array.ndim):
                    raise ValueError(
                        f"arrays[{i}] has the sharding {array.sharding}, but the transfer was planned from {expected}; "
                        "give the executable that makes it these output shardings"
                    )
                self._expected[i] = array.sharding  # the next one has this object
        held: list[Any] = [block for i in self._split for block in _jax.blocks_of(arrays[i])]
        held += [None] * (self._num_blocks - len(held))
        _make(self._cuts, held)
        here: list[Any] = jax.device_put(
            [*(arrays[i] for i in self._whole), *(held[n] for n in self._sent)], self._targets
        )
        for n, block in zip(self._put, here[len(self._whole) :], strict=True):
            held[n] = block
        _make(self._joins, held)
        out: list[Any] = [None] * len(arrays)
        for i, array in zip(self._whole, here, strict=False):
            out[i] = array
        for i, numbers in self._assembled.items():
            out[i] = _jax.array_of_blocks(*self._landed[i], [held[n] for n in numbers])
        return out if self._reshard is None else self._reshard(out)


def _make(calls: Sequence[tuple[Callable[..., list[Any]], tuple[list[int], list[int]]]], held: list[Any]) -> None:
    """Calls functions on some blocks, which make others."""
    for call, (taken, made) in calls:
        for n, block in zip(made, call(*[held[n] for n in taken]), strict=True):
            held[n] = block


def _compile_blocks(device: Any, made: Sequence[tuple[int, list[Part]]]) -> tuple[Any, tuple[list[int], list[int]]]:
    """Compiles a function that makes blocks on a device, and returns it with the numbers that it takes and makes."""
    where = SingleDeviceSharding(device)
    given = {
        number: jax.ShapeDtypeStruct(_sizes(have), dtype, sharding=where)
        for _, parts in made for number, dtype, have, _ in parts
    }  # fmt: skip

    def make(*arrays: Any) -> list[Any]:
        held = dict(zip(given, arrays, strict=True))
        out = []
        for _, parts in made:
            ranges = [wanted for *_, wanted in parts]
            pieces = [_slice(held[number], wanted, have) for number, _, have, wanted in parts]
            out.append(
                pieces[0] if len(parts) == 1 else apply_in_bytes(lambda *own, at=ranges: _join(own, at, 0), *pieces)
            )
        # Without a copy, a jitted function hands its argument's memory on.
        return [jnp.copy(one) if any(one is array for array in arrays) else one for one in out]

    call = compile_lowered(jax.jit(make).lower(*given.values()), [device])
    return call, (list(given), [number for number, _ in made])


def compile_reshard(plans: Sequence[TransferPlan], mesh: Mesh) -> Callable[[list[Any]], list[Any]] | None:
    """Returns a function from arrays as they landed to arrays as they are wanted; None where they landed so.

    One executable does it for all arrays of a transfer, its communication written out.

    Args:
      mesh: the destination.
    """
    logical, numbers = plans[0].dst_mesh.mesh, [n for n, plan in enumerate(plans) if plan.steps]
    if not numbers:
        return None
    plans = [plans[n] for n in numbers]

    def local(*held: Any) -> list[Any]:
        out = []
        for block, plan in zip(held, plans, strict=True):
            for step in plan.steps:
                block = change_layout(block, step, plan.shape, logical)
            out.append(block)
        return out

    landed, wanted = (
        [jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=NamedSharding(mesh, spec_of(layout)))
         for plan, layout in zip(plans, layouts, strict=True)]
        for layouts in ([plan.landing_layout for plan in plans], [plan.dst for plan in plans])
    )  # fmt: skip
    devices = list(mesh.devices.flat)
    call = throttle(compile_lowered(lower_region(local, mesh, landed, wanted), devices), devices)

    def reshard(arrays: list[Any]) -> list[Any]:
        out = list(arrays)
        for n, array in zip(numbers, call(*[arrays[n] for n in numbers]), strict=True):
            out[n] = array
        return out

    return reshard


def _sizes(ranges: Ranges) -> tuple[int, ...]:
    return tuple(high - low for low, high in ranges)


def _slice(block: Any, wanted: Ranges, have: Ranges) -> Any:
    """Returns a part of a block that has some ranges of the global array; the block itself, if it is all of it."""
    if wanted == have:
        return block
    starts = [low - first for (low, _), (first, _) in zip(wanted, have, strict=True)]
    return lax.slice(block, starts, [start + size for start, size in zip(starts, _sizes(wanted), strict=True)])


def _join(pieces: Sequence[Any], ranges: Sequence[Ranges], dim: int) -> Any:
    """Returns the block that pieces fill, which form a grid and come in its order: joined along the last dims first."""
    if len(pieces) == 1:
        return pieces[0]
    starts = list(dict.fromkeys(piece[dim] for piece in ranges))
    rows = []
    for start in starts:
        row = [n for n, piece in enumerate(ranges) if piece[dim] == start]
        rows.append(_join([pieces[n] for n in row], [ranges[n] for n in row], dim + 1))
    return rows[0] if len(rows) == 1 else lax.concatenate(rows, dim)
