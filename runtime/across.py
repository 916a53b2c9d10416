"""The transfers of a pipeline between submeshes of different processes, as planned.

The planned pieces travel by one program over the union of both submeshes (`crossing`), and one more on the
destination's submesh takes the arrays on from the layouts in which they landed, as within one process (`transfer`).
Arrays of random keys travel as the numbers that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs.rounds import Part
from alpa_lite.passes.programs.transfers import TransferPlan
from alpa_lite.runtime import crossing
from alpa_lite.runtime.meshes import mesh_of
from alpa_lite.runtime.transfer import compile_reshard


class MoverAcross:
    """The arrays of one edge of the pipeline, from their submesh to one of other processes. As `transfer.Mover`."""

    def __init__(
        self, plans: Sequence[TransferPlan], devices: Sequence[Any], zeros: dict[Any, Any] | None = None,
        for_runs: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Compiles what the plans need. Every process with devices at either end makes one, and no other.

        Args:
          plans: one for each array, all between the same two submeshes.
          devices: the devices of the cluster, by number.
          zeros, for_runs: as for `Crossing`.
        """
        source, destination = plans[0].src_mesh, plans[0].dst_mesh
        numbers = sorted({*source.devices, *destination.devices})
        union = [devices[n] for n in numbers]
        start = mesh_of(source.mesh, [devices[n] for n in source.devices])
        end = mesh_of(destination.mesh, [devices[n] for n in destination.devices])
        self._keys = {n: plan.dtype for n, plan in enumerate(plans) if _is_key(plan.dtype)}
        ways = []
        for plan in plans:
            shape, dtype, more = plan.shape, plan.dtype, ()
            if _is_key(dtype):
                _, numbers = _jax.key_kind(dtype)
                shape, dtype, more = (*shape, *numbers), np.dtype(np.uint32), tuple((0, n) for n in numbers)
            parts = [
                Part(numbers.index(p.source), numbers.index(p.destination), (*p.ranges, *more)) for p in plan.pieces
            ]
            ends = NamedSharding(start, spec_of(plan.src)), NamedSharding(end, spec_of(plan.landing))
            ways.append(crossing.way_between(shape, dtype, *ends, union, parts))
        for_runs = {n for n in for_runs if n not in self._keys and not plans[n].steps}
        self._crossing = crossing.Crossing(ways, list(start.devices.flat), union, zeros, for_runs)
        self._starts_here = any(device.process_index == jax.process_index() for device in start.devices.flat)
        self._resharded = [n for n, plan in enumerate(plans) if plan.steps]
        self._reshard: Any = None
        if self._resharded and self._crossing.lands_here:
            self._reshard = compile_reshard([plans[n] for n in self._resharded], end)

    @property
    def labels(self) -> list[NamedSharding | None]:
        """As of its crossing; None for random keys, which do not travel as they are."""
        return [None if n in self._keys else label for n, label in enumerate(self._crossing.labels)]

    @property
    def call(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """What is called: the crossing itself where it is all there is to do."""
        return self if self._keys or self._reshard is not None else self._crossing

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The arrays on the destination's submesh, each in its `dst` layout; None in a process without devices there.

        Args:
          arrays: as planned; where this process has no device of the source, anything.
        """
        if self._keys and self._starts_here:
            arrays = [jax.random.key_data(array) if n in self._keys else array for n, array in enumerate(arrays)]
        moved = self._crossing(arrays)
        if not self._crossing.lands_here:
            return moved
        out = list(moved)
        for n, dtype in self._keys.items():
            out[n] = jax.random.wrap_key_data(out[n], impl=_jax.key_kind(dtype)[0])
        if self._reshard is not None:
            for n, array in zip(self._resharded, self._reshard(*[out[n] for n in self._resharded]), strict=True):
                out[n] = array
        return out


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)
