"""The local form of a Pallas kernel whose grid is cut (`factors.pallas`): the same kernel, a shorter grid."""

from __future__ import annotations

from alpa_lite import _jax
from alpa_lite.passes.local.types import LocalForm, Setting


def kernel(s: Setting) -> LocalForm | None:
    """Calls the kernel on a device's blocks, with as many steps as it has blocks."""
    operands = [s.local_operand(i) for i in range(len(s.op.operands))]
    results = [s.local_result(i) for i in range(len(s.op.results))]
    return s.bind(**_jax.pallas_on_blocks(s.op.params, operands, results))
