"""Operations with effects inside the region, where every device runs every operation.

A callback that may not be repeated (`io_callback`, a print) would run once per device: it runs on the first device
only, and the others receive its results, if there are any, as a sum with zeros. A pure callback may run everywhere. The
order of ordered effects is that of values (`tracing.conversion`).

Some operations cannot be in the region at all, see `needs_outside`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local.types import LocalCollective, LocalForm, Setting, bind, block_number


def needs_outside(op: Op) -> bool:
    """Returns whether an operation cannot be emitted inside `shard_map`.

    True for a user's own `shard_map` (its mesh is another one), for `device_put` to another kind of memory, and for
    `rng_uniform`, whose hidden state differs between devices; and for what holds one of these in a body or in a jaxpr
    among its parameters.
    """
    if op.bodies:
        return any(needs_outside(inner) for body in op.bodies for inner in body.ops)
    return _outside(op.name, op.params)


def _outside(name: str, params: Mapping[str, Any]) -> bool:
    if name in primitives.MANUAL or name in primitives.SHARED_STATE_DRAWS:
        return True
    if name == "device_put" and any(_names_memory(device) for device in params.get("devices", ())):
        return True
    return any(_outside(e.primitive.name, e.params) for jaxpr in _jax.inner_jaxprs(params) for e in jaxpr.eqns)


def _names_memory(device: Any) -> bool:
    if device is None or isinstance(device, jax.Device):
        return False
    return not isinstance(device, jax.sharding.Sharding) or device.memory_kind not in (None, "device")


def callback_form(s: Setting) -> LocalForm | None:
    """A callback that must not be repeated: on the first device, which sends its results, if any, to the others."""
    axes = tuple(axis for axis in s.mesh.axis_names if s.mesh.axis_size(axis) > 1)
    if not axes:
        return s.bind()
    params = s.params()
    dtypes = [np.dtype(s.result_dtype(i)) for i in range(len(s.results))]

    def run(*operands: Any) -> list:
        def call(*operands: Any) -> list[jax.Array]:
            outs = map(jnp.asarray, bind(s.op, operands, params))
            return [lax.convert_element_type(x, np.int32) if x.dtype == np.bool_ else x for x in outs]

        def skip(*_: Any) -> list[jax.Array]:
            return [jnp.zeros(s.result_shape(i), np.int32 if t == np.bool_ else t) for i, t in enumerate(dtypes)]

        outs = lax.cond(block_number(axes) == 0, call, skip, *operands)
        return [lax.convert_element_type(lax.psum(out, axes), t) for out, t in zip(outs, dtypes, strict=True)]

    def size(i: int) -> int:
        return s.result_bytes(i) * (4 if dtypes[i] == np.bool_ else 1)

    return s.form(run, *(LocalCollective("all_reduce", axes, size(i)) for i in range(len(dtypes))))
