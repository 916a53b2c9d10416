"""What a rule says must be so: the operation on two halves of a factor gives the halves of its result, or summands."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.ir.strategy import Factor
from alpa_lite.passes import factors
from tests.passes.factors.factor_cases import CASES, bind, capture, check

# The kinds that need no local form, which the test below can hold to the operation itself.
PLAIN = ("parallel", "sum", "max", "min")


def part(x, dims, rule, factor, half):
    """The half of a tensor along one factor, wherever it is in the dims."""
    for d, dim in enumerate(dims):
        if factor in dim:
            sizes = [rule.factors[f].size for f in dim]
            at = d + dim.index(factor)
            split = x.reshape(*x.shape[:d], *sizes, *x.shape[d + 1 :])
            n = split.shape[at] // 2
            block = lax.slice_in_dim(split, half * n, (half + 1) * n, axis=at)
            return block.reshape(*x.shape[:d], x.shape[d] // 2, *x.shape[d + 1 :])
    return x


def local_params(op, rule, factor, inputs):
    """The parameters that hold sizes, written for blocks."""
    params = dict(op.params)
    where = {d for d, dim in enumerate(rule.results[0]) if factor in dim}
    taken = {d for d, dim in enumerate(rule.operands[0]) if factor in dim} if rule.operands else set()
    if op.name == "broadcast_in_dim":
        params["shape"] = tuple(s // 2 if d in where else s for d, s in enumerate(params["shape"]))
    if op.name == "reshape":
        params["new_sizes"] = tuple(s // 2 if d in where else s for d, s in enumerate(params["new_sizes"]))
    if op.name == "slice":
        params["limit_indices"] = tuple(s // 2 if d in taken else s for d, s in enumerate(params["limit_indices"]))
    if op.name in ("dynamic_slice", "gather") and where:
        sizes = params["slice_sizes"]
        params["slice_sizes"] = tuple(s // 2 if d in taken and s > 1 else s for d, s in enumerate(sizes))
    if op.name == "conv_general_dilated":
        lhs, rhs, _ = params["dimension_numbers"]
        features = inputs[0].shape[lhs[1]] // inputs[1].shape[rhs[1]]
        params["feature_group_count"] = features
        if params["batch_group_count"] > 1 and lhs[0] in taken:
            params["batch_group_count"] //= 2
    return params


def run_half(op, rule, factor, half, inputs):
    blocks = [part(x, dims, rule, factor, half) for x, dims in zip(inputs, rule.operands, strict=True)]
    params = local_params(op, rule, factor, blocks)
    if op.name == "scatter-add" and rule.factors[factor].kind == "sum" and half:
        blocks[0] = jnp.zeros_like(blocks[0])
    if op.name == "gather" and rule.factors[factor].kind == "sum":  # rows of the other half read as zero
        d = next(d for d, dim in enumerate(rule.operands[0]) if factor in dim)
        column = op.params["dimension_numbers"].start_index_map.index(d)
        blocks[1] = blocks[1].at[..., column].add(-half * blocks[0].shape[d])
        params |= {"mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}
    return bind(op, blocks, **params)


def joined(halves, dims, rule, factor):
    """The whole result from its halves."""
    for d, dim in enumerate(dims):
        if factor in dim:
            sizes = [rule.factors[f].size for f in dim]
            at = d + dim.index(factor)
            sizes[dim.index(factor)] //= 2
            views = [x.reshape(*x.shape[:d], *sizes, *x.shape[d + 1 :]) for x in halves]
            whole = jnp.concatenate(views, at)
            return whole.reshape(*halves[0].shape[:d], math.prod(sizes) * 2, *halves[0].shape[d + 1 :])
    kind = rule.factors[factor].kind
    if kind == "parallel":  # a factor of other results only
        return halves[0]
    return {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[kind](*halves)


def numbers(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def halve(rule, op, inputs):
    """The results of an operation, and for each of its plain factors those of the two halves."""
    plain = [n for n, factor in enumerate(rule.factors) if factor.kind in PLAIN and factor.size % 2 == 0]
    halves = {n: [run_half(op, rule, n, half, inputs) for half in (0, 1)] for n in plain}
    return bind(op, inputs), halves


def run(cases, change=lambda rule: rule):
    """Runs all cases in one program, which compiles faster than many: {case: (rule, whole, halves)}."""
    examples = {case: CASES[case] for case in cases}
    rules = {}

    @jax.jit
    def everything(args):
        out = {}
        for case, (name, fun, *_) in examples.items():
            op, values, inputs = capture(name, fun, *args[case])
            rules[case] = change(factors.rules_of([op], values)[op.key])
            check(rules[case], [x.shape for x in inputs], [values[r].shape for r in op.results])
            out[case] = halve(rules[case], op, inputs)
        return out

    out = everything({case: args for case, (_, _, *args) in examples.items()})
    return {case: (rules[case], *out[case]) for case in cases}


def compare(rule, whole, halves):
    """Raises AssertionError unless the halves of each factor make the whole."""
    for factor, (left, right) in halves.items():
        for want, dims, a, b in zip(whole, rule.results, left, right, strict=True):
            have = joined([a, b], dims, rule, factor)
            np.testing.assert_allclose(numbers(have), numbers(want), rtol=1e-5, atol=1e-5, err_msg=f"{rule} {factor}")


@pytest.fixture(scope="module")
def results():
    return run(CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_factor_can_be_halved(case, results):
    rule, whole, halves = results[case]
    assert rule.source != "opaque", rule.reason
    assert halves, "the case tests nothing"
    compare(rule, whole, halves)


def test_a_wrong_rule_is_noticed():
    def all_parallel(rule):
        return replace(rule, factors=tuple(Factor(factor.size, "parallel") for factor in rule.factors))

    for rule, whole, halves in run(["cumsum", "sort", "rev", "overlapping pool"], all_parallel).values():
        with pytest.raises(AssertionError, match="Not equal"):
            compare(rule, whole, halves)
