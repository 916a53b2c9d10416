"""Initialises state directly in its planned shardings: no device or host holds it unsharded.

The initialisation is traced once, and its results are made some at a time, on the mesh of each. Operations that these
results do not need are left out.

*Bit for bit.* A program that makes a block of a random array computes the same random bits (threefry), but not always
the same numbers: the CPU compiler vectorises other loops (measured on JAX 0.12: 14 of 512 normal numbers differ in the
last bit). Generators that are not counter-based (`rbg`) make other bits. So a group of results, an eighth of the bytes
of all, is computed whole by every device of its mesh, and each device keeps its block. Only a result that has no room
is computed in blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Graph, Lit
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.tracing import conversion, pytrees
from alpa_lite.runtime import placement
from alpa_lite.runtime.compile import persistent_cache
from alpa_lite.runtime.multihost import global_array

logger = logging.getLogger(__name__)


class ShardedInit:
    """A traced initialisation.

    Attributes:
      shapes: the result with a `jax.ShapeDtypeStruct` for each array; NNX objects hold them in their Variables.
      paths: for each flat result JAX's keys, and the path within an NNX object, as `pytrees.LeafPath`.
      types: for each flat result its shape and dtype.
    """

    def __init__(self, init: Callable[..., Any], args: Sequence[Any]) -> None:
        """Traces `init(*args)`. Nothing is executed."""
        self._leaves, in_tree = jax.tree_util.tree_flatten(pytrees.hide(args))
        self._tree: Any = None
        self.paths: list[pytrees.LeafPath] = []

        def flat(*leaves: Any) -> list[Any]:
            out = init(*jax.tree_util.tree_unflatten(in_tree, leaves))
            self.paths = pytrees.leaf_paths(out)
            arrays, self._tree = pytrees.flatten_nnx(out)
            return arrays

        traced = jax.jit(flat).trace(*self._leaves)
        self._graph: Graph = conversion.graph_of(traced.jaxpr)
        self.types = list(map(_jax.spec_of, traced.jaxpr.out_avals))
        self.shapes = pytrees.unflatten_nnx(self._tree, self.types)

    def run(self, shardings: Sequence[NamedSharding], room: float) -> tuple[Any, list[jax.Array]]:
        """Returns the result with arrays of these shardings, one for each flat result, and these arrays.

        Args:
          room: bytes of a device that one whole result may take.
        """
        sizes = [int(np.prod(one.shape)) * getattr(one.dtype, "itemsize", 4) for one in self.types]
        meshes: dict[Any, list[int]] = {}
        for number, sharding in enumerate(shardings):
            meshes.setdefault(sharding.mesh, []).append(number)
        arrays: list[Any] = [None] * len(shardings)
        for numbers in meshes.values():
            if not global_array.is_addressable(shardings[numbers[0]]):
                for n in numbers:
                    arrays[n] = global_array.make_non_addressable(
                        self.types[n].shape, self.types[n].dtype, shardings[n]
                    )
                continue
            large = [n for n in numbers if sizes[n] > room]
            if large:
                logger.info("%s results have no room whole: they are made in blocks, equal up to rounding", len(large))
            small = [n for n in numbers if sizes[n] <= room]
            groups = [[small[i] for i in group] for group in placement.group_positions([sizes[n] for n in small])]
            for group in filter(None, (large, *groups)):
                made = self._group(group, [shardings[n] for n in group], whole=group is not large)
                for number, array in zip(group, made, strict=True):
                    arrays[number] = array
        return pytrees.unflatten_nnx(self._tree, arrays), arrays

    def _group(self, numbers: Sequence[int], shardings: Sequence[NamedSharding], *, whole: bool) -> list[jax.Array]:
        """Returns some results on one mesh."""
        block = self._graph.block
        block = pruning.live_block(replace(block, outputs=tuple(block.outputs[n] for n in numbers)))
        graph = replace(self._graph, block=block)
        read = {a for op in block.ops for a in op.operands if not isinstance(a, Lit)} | set(block.outputs)
        used = [n for n, value in enumerate(block.inputs[: len(self._leaves)]) if value in read]
        everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
        inputs = [_put(self._leaves[n], everywhere) for n in used]

        def part(arrays: Sequence[Any]) -> list[Any]:
            given = dict(zip(used, arrays, strict=True))  # an argument that is not read may be on other devices
            return list(evaluate(graph, [given.get(n) for n in range(len(self._leaves))]))

        out = [everywhere] * len(numbers) if whole else list(shardings)
        with persistent_cache(everywhere.device_set):
            arrays = jax.jit(part, out_shardings=out)(inputs)
        return placement.copies(arrays, shardings) if whole else arrays


def _put(leaf: Any, everywhere: NamedSharding) -> Any:
    """Returns an argument on the devices of a mesh; as it is, if it is there."""
    if isinstance(leaf, jax.Array) and leaf.sharding.device_set == everywhere.device_set:
        return leaf
    return global_array.put([leaf], [everywhere])[0]
