"""The table of factor rules; `factors.rules` states the conventions that it follows.

`TABLE` maps a primitive's name to the function that describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from alpa_lite.ir.strategy import FactorKind, Rule
from alpa_lite.passes.factors.attention import cudnn
from alpa_lite.passes.factors.base import Call, Dim, Dims, Rules, shape
from alpa_lite.passes.factors.indexing import INDEXING
from alpa_lite.passes.factors.pallas import pallas
from alpa_lite.passes.factors.registered import custom_partitioning_rule
from alpa_lite.passes.factors.windows import WINDOWS
from alpa_lite.passes.ir import primitives


def elementwise_rule(call: Call) -> Rule:
    """Every dim of the result is a factor; operands of rank zero and dims of size one broadcast."""
    new = Rules()
    out = shape(call.results[0])
    dims = new.dims(out, "parallel")
    operands = []
    for aval in call.operands:
        have = shape(aval)
        assert len(have) in (0, len(out)), (have, out)
        operands.append(tuple(d if size == want else () for d, size, want in zip(dims, have, out, strict=False)))
    return new.rule(operands, [dims] * len(call.results))


def pairs(call: Call) -> Rule:
    """Result k is operand k, each with factors of its own."""
    new = Rules()
    dims = [new.dims(shape(aval), "parallel") for aval in call.operands]
    return new.rule(dims, list(dims))


def replicated_rule(call: Call) -> Rule:
    """Nothing can be split, and that is known."""
    new = Rules()
    tensors = [new.dims(shape(aval), "replicate") for aval in (*call.operands, *call.results)]
    return new.rule(tensors[: len(call.operands)], tensors[len(call.operands) :])


def dims_rule(name: str, kind: FactorKind, result: Literal["same", "whole", "gone"] = "same") -> Callable[[Call], Rule]:
    """Returns the dims that a parameter names have a kind; all others are parallel, in all operands and results.

    Args:
      name: of the parameter, a dim or several.
      result: whether results have these dims, have them without the factor (of another size), or lack them.
    """

    def describe(call: Call) -> Rule:
        new = Rules()
        size, named = shape(call.operands[0]), call.params[name]
        axes = {axis % len(size) for axis in ((named,) if isinstance(named, int) else named)}
        dims = tuple(new.dim(s, kind if d in axes else "parallel") for d, s in enumerate(size))
        kept = {
            "same": dims,
            "whole": tuple(() if d in axes else dim for d, dim in enumerate(dims)),
            "gone": tuple(dim for d, dim in enumerate(dims) if d not in axes),
        }
        # Further scalar operands are initial values.
        operands: list[Dims] = [dims if len(shape(aval)) == len(size) else () for aval in call.operands]
        return new.rule(operands, [kept[result]] * len(call.results))

    return describe


def broadcast(call: Call) -> Rule:
    """Returns dims that are kept, and new ones of the result, are parallel."""
    new = Rules()
    dims = new.dims(shape(call.operands[0]), "parallel")
    kept = dict(zip(call.params["broadcast_dimensions"], dims, strict=True))
    return new.rule(
        [dims], [tuple(kept.get(d) or new.dim(s, "parallel") for d, s in enumerate(shape(call.results[0])))]
    )


def transpose(call: Call) -> Rule:
    """Every dim is parallel."""
    new = Rules()
    dims = new.dims(shape(call.operands[0]), "parallel")
    return new.rule([dims], [tuple(dims[d] for d in call.params["permutation"])])


def fft(call: Call) -> Rule:
    """Returns the dims that are transformed are whole; one that changes its size has two factors."""
    new = Rules()
    before, after = shape(call.operands[0]), shape(call.results[0])
    batch = len(before) - len(call.params["fft_lengths"])
    dims = tuple(new.dim(s, "parallel" if d < batch else "replicate") for d, s in enumerate(before))
    return new.rule(
        [dims], [tuple(x if a == b else new.dim(a, "replicate") for x, b, a in zip(dims, before, after, strict=True))]
    )


def reshape(call: Call) -> Rule:
    """Splits both shapes into common factors, major to minor.

    Two dims that start at the same stride share their greatest common divisor as a factor. If what remains of one of
    them is 1, its next dim starts at the same stride as what remains of the other. If not, the dims up to where the
    shapes meet again (the products of their sizes are equal) hold remainders that nothing shares: those are
    replicated.
    """
    new = Rules()
    before, after = shape(call.operands[0]), shape(call.results[0])
    left: list[Dim] = [()] * len(before)
    right: list[Dim] = [()] * len(after)
    if math.prod(before) == 0:
        return new.rule([tuple(left)], [tuple(right)])
    i = j = 0
    a = b = 1
    while True:
        while a == 1 and i < len(before):
            a, i = before[i], i + 1
        while b == 1 and j < len(after):
            b, j = after[j], j + 1
        if a == 1 and b == 1:
            return new.rule([tuple(left)], [tuple(right)])
        common = math.gcd(a, b)
        dim = new.dim(common, "parallel")
        left[i - 1] += dim
        right[j - 1] += dim
        a, b = a // common, b // common
        if a > 1 and b > 1:
            left[i - 1] += new.dim(a, "replicate")
            right[j - 1] += new.dim(b, "replicate")
            while a != b:
                if a < b:
                    left[i] = new.dim(before[i], "replicate")
                    a, i = a * before[i], i + 1
                else:
                    right[j] = new.dim(after[j], "replicate")
                    b, j = b * after[j], j + 1
            a = b = 1


def concatenate_rule(call: Call) -> Rule:
    """concatenate and split: dims that differ between the tensors are replicated, each for itself."""
    axis = call.params["dimension" if call.name == "concatenate" else "axis"]
    new = Rules()
    dims = new.dims(tuple(1 if d == axis else s for d, s in enumerate(shape(call.results[0]))), "parallel")

    def tensor(aval: Any) -> Dims:
        return (*dims[:axis], new.dim(shape(aval)[axis], "replicate"), *dims[axis + 1 :])

    return new.rule([tensor(aval) for aval in call.operands], [tensor(aval) for aval in call.results])


def stack_rule(call: Call) -> Rule:
    """stack and unstack: the new dim is replicated."""
    new = Rules()
    short, long = (call.operands, call.results) if call.name == "stack" else (call.results, call.operands)
    axis = call.params["axis"] % len(shape(long[0]))
    dims = new.dims(shape(short[0]), "parallel")
    stack = (*dims[:axis], new.dim(shape(long[0])[axis], "replicate"), *dims[axis:])
    one, many = [stack], [dims] * len(short)
    return new.rule(many, one) if call.name == "stack" else new.rule(one, many)


def pad_rule(call: Call) -> Rule:
    """pad and slice: dims that stay as they are, are parallel; the others share a special factor."""
    before, after = shape(call.operands[0]), shape(call.results[0])
    if call.name == "pad":
        same = [tuple(map(int, config)) == (0, 0, 0) for config in call.params["padding_config"]]
    else:
        starts, strides = call.params["start_indices"], call.params["strides"] or (1,) * len(before)
        same = [s == 0 and t == 1 and a == b for s, t, a, b in zip(starts, strides, before, after, strict=True)]
    new = Rules()
    dims = tuple(
        new.dim(b, "parallel") if keep else new.dim(math.gcd(b, a), "special")
        for keep, b, a in zip(same, before, after, strict=True)
    )
    scalars: list[Dims] = [() for _ in call.operands[1:]]
    return new.rule([dims, *scalars], [dims])


def iota(call: Call) -> Rule:
    """Returns a block's values depend on where it is: its own offset makes it, without communication."""
    new = Rules()
    return new.rule([], [new.dims(shape(call.results[0]), "special")])


def product(call: Call) -> Rule:
    """dot_general, and ragged_dot_general, whose lhs is cut into groups of rows (or of contracted or batch indices)."""
    numbers = call.params.get("ragged_dot_dimension_numbers")
    dims = call.params["dimension_numbers"] if numbers is None else numbers.dot_dimension_numbers
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    ragged, grouped = ((), ()) if numbers is None else (numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    lhs, rhs = (shape(aval) for aval in call.operands[:2])
    new = Rules()

    def factor(d: int) -> Dim:
        return new.dim(lhs[d], "replicate" if d in ragged else "sum" if d in lhs_contract else "parallel")

    left = {d: factor(d) for d in range(len(lhs))}
    right = {d: left[e] for d, e in zip((*rhs_contract, *rhs_batch), (*lhs_contract, *lhs_batch), strict=True)}
    for d in range(len(rhs)):
        if d not in right:
            right[d] = new.dim(rhs[d], "replicate" if d in grouped else "parallel")
    out = [left[d] for d in lhs_batch]
    out += [left[d] for d in range(len(lhs)) if d not in (*lhs_contract, *lhs_batch)]
    out += [right[d] for d in range(len(rhs)) if d not in (*rhs_contract, *rhs_batch, *grouped)]
    if not set(lhs_contract).isdisjoint(ragged):  # one product a group
        out.insert(0, new.dim(shape(call.operands[2])[-1], "replicate"))
    assert len(out) == len(shape(call.results[0])), dims
    tensors = [tuple(left[d] for d in range(len(lhs))), tuple(right[d] for d in range(len(rhs)))]
    return new.rule([*tensors, *(new.dims(shape(a), "replicate") for a in call.operands[2:])], [tuple(out)])


def leading_dims_rule(kind: FactorKind, core: int | None = None) -> Callable[[Call], Rule]:
    """Returns the dims that all tensors begin with are a batch; the others are of a kind.

    Args:
      core: the number of the others that the first operand has; by default all ranks but the least.
    """

    def describe(call: Call) -> Rule:
        new = Rules()
        sizes = [shape(aval) for aval in (*call.operands, *call.results)]
        count = min(map(len, sizes)) if core is None else len(sizes[0]) - core
        shared = new.dims(sizes[0][:count], "parallel")

        def tensor(size: tuple[int, ...]) -> Dims:
            assert size[:count] == sizes[0][:count], sizes
            return (*shared, *new.dims(size[count:], kind))

        tensors = list(map(tensor, sizes))
        return new.rule(tensors[: len(call.operands)], tensors[len(call.operands) :])

    return describe


INDEPENDENT: Mapping[str, frozenset[str]] = {
    "random_bits": frozenset({"key<fry>"}),
    "random_split": frozenset({"key<fry>", "key<rbg>"}),
    "random_fold_in": frozenset({"key<fry>", "key<rbg>"}),
}
"""The dtypes of keys for which an operation on an array of keys treats each by itself.

JAX draws from the hardware generator for a whole array of `rbg` keys with the first key alone (JAX's documentation of
`jax.random`, "Advanced RNG configuration"): what one key draws depends on where it stands, and a block of the keys
would draw other numbers. `rbg` splits and folds by threefry, key by key; `unsafe_rbg` draws there, too. Of generators
that a user has registered nothing is known.
"""


def key_rule(describe: Callable[[Call], Rule]) -> Callable[[Call], Rule]:
    """Returns a rule for arrays of keys that are used one by one; for others every dim is whole."""

    def described(call: Call) -> Rule:
        keys = call.operands[0]
        if not shape(keys) or str(keys.dtype) in INDEPENDENT[call.name]:
            return describe(call)
        return replicated_rule(call)

    return described


def _table() -> dict[str, Callable[[Call], Rule]]:
    table: dict[str, Callable[[Call], Rule]] = dict.fromkeys(primitives.ELEMENTWISE, elementwise_rule)
    table |= dict.fromkeys(primitives.PAIRWISE, pairs)
    table |= dict.fromkeys(("rng_bit_generator", "rng_uniform", "random_gamma"), replicated_rule)
    table |= dict.fromkeys(primitives.CUMULATIVE, dims_rule("axis", "special"))
    table |= dict.fromkeys(
        ("argmax", "argmin", "reduce_and", "reduce_or", "reduce_prod", "reduce_xor"),
        dims_rule("axes", "special", "gone"),
    )
    table |= {f"reduce_{kind}": dims_rule("axes", kind, "gone") for kind in ("sum", "max", "min")}
    table |= dict.fromkeys(("dot_general", "ragged_dot_general"), product)
    table |= dict.fromkeys(primitives.MATRIX_ALGEBRA, leading_dims_rule("replicate", 2))
    table |= dict.fromkeys(primitives.VECTOR_ALGEBRA, leading_dims_rule("replicate", 1))
    table |= dict.fromkeys(("reshape", "squeeze"), reshape)
    table |= dict.fromkeys(("concatenate", "split"), concatenate_rule)
    table |= dict.fromkeys(("stack", "unstack"), stack_rule)
    table |= dict.fromkeys(("pad", "slice"), pad_rule)
    table |= dict.fromkeys(("random_wrap", "random_unwrap", "bitcast_convert_type"), leading_dims_rule("replicate"))
    table |= {
        "broadcast_in_dim": broadcast,
        "transpose": transpose,
        "rev": dims_rule("dimensions", "special"),
        "sort": dims_rule("dimension", "replicate"),
        "fft": fft,
        "reduce": dims_rule("dimensions", "replicate", "gone"),
        "top_k": dims_rule("axis", "special", "whole"),
        "approx_top_k": dims_rule("reduction_dimension", "replicate", "whole"),
        "tile": INDEXING["dynamic_slice"],
        "iota": iota,
        "random_bits": key_rule(leading_dims_rule("special")),
        **dict.fromkeys(primitives.CUDNN, cudnn),
        "custom_partitioning": custom_partitioning_rule,
        "pallas_call": pallas,
        "random_split": key_rule(leading_dims_rule("replicate")),
        "random_fold_in": key_rule(elementwise_rule),
    }
    return {**table, **INDEXING, **WINDOWS}


TABLE: Mapping[str, Callable[[Call], Rule]] = _table()
