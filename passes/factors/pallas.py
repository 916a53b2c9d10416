"""Pallas kernels by their grids: the steps of a grid that know nothing of each other may be on different devices.

A kernel runs once for each point of its grid, on the blocks that index maps say. A grid dim g is a factor if

- every index map that has its number uses it as it is, for one dim of the array, in steps of whole blocks, as
  `(b, i, j) -> (b, j, 0)` does for b and j;
- every result has it, so that each block of a result belongs to one step of g;
- the kernel never asks for its number or for how many there are (`program_id`, `num_programs`).

A device that has a share of the steps then calls the same kernel with a shorter grid on its blocks of the arrays
(`local.registered`). Batch and heads of attention kernels are such dims, and the columns of grouped products. The dim
of an array is (steps, block), of which the block stays whole. Nothing is carried in scratch memory from one step of g
to the next, since that would have to begin at a step whose number the kernel asks for.

Anything else, such as the length of causal attention, has no rule; `alpa_lite.register_rule` on the function that calls
the kernel says more.
"""

from __future__ import annotations

from alpa_lite import _jax
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.passes.factors.base import Call, make_opaque_rule, shape

_REMEDY = "; alpa_lite.register_rule on the function that calls it says which dims may be sharded"


def pallas(call: Call) -> Rule:
    """Returns the rule of a call of a Pallas kernel."""
    kernel = _jax.pallas_grid(call.params)
    if kernel is None:
        return make_opaque_rule(call, "a Pallas kernel with effects, or with a grid of its own, has no rule" + _REMEDY)
    tensors = [shape(aval) for aval in (*call.operands[kernel.first :], *call.results)]
    factor_of = {g: f for f, g in enumerate(_independent(kernel, tensors, len(call.results)))}
    if not factor_of:
        return make_opaque_rule(call, "no dim of the grid of a Pallas kernel is independent of the others" + _REMEDY)
    factors = [Factor(kernel.grid[g], "parallel") for g in factor_of]
    described = []
    for blocks in kernel.blocks:
        dims = []
        for g, size in blocks:
            dim = (factor_of[g],) if g in factor_of else ()
            if dim and size > 1:
                factors.append(Factor(size, "replicate"))
                dim = (*dim, len(factors) - 1)
            dims.append(dim)
        described.append(tuple(dims))
    whole = [((),) * len(shape(operand)) for operand in call.operands[: kernel.first]]
    count = len(call.operands) - kernel.first
    return Rule(tuple(factors), (*whole, *described[:count]), tuple(described[count:]))


def _independent(kernel: _jax.PallasGrid, tensors: list[tuple[int, ...]], results: int) -> list[int]:
    """The grid dims that are factors: every result has them, and arrays have a whole block for each of their steps."""
    found = []
    for g in kernel.independent:
        fits = all(
            step != g or extent == kernel.grid[g] * size
            for extents, blocks in zip(tensors, kernel.blocks, strict=True)
            for extent, (step, size) in zip(extents, blocks, strict=True)
        )
        everywhere = all(any(step == g for step, _ in blocks) for blocks in kernel.blocks[len(tensors) - results :])
        if fits and everywhere and kernel.grid[g] > 1:
            found.append(g)
    return found
