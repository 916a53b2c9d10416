"""The conventions of factor rules: table by table, against Shardy where it has a rule, and what must stay opaque."""

import contextvars
import math
from dataclasses import replace

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from alpa_lite.ir.graph import Lit
from alpa_lite.passes import factors
from alpa_lite.passes.factors import tables
from alpa_lite.passes.factors.base import Call
from gallery.batches import f32
from tests.passes.factors.factor_cases import CASES, check, equations, example
from tests.passes.factors.shardy_rules import shardy_rule


def rule_of(case):
    op, values = example(case)
    return factors.rules_of([op], values)[op.key]


def shown(rule):
    """Like `ab,bc->ac a=4 b=6+ c=8`, a mark for each kind: + sum, > max, < min, * special, ! replicate."""
    names = "abcdefghijklmnopqrstuvwxyz"
    marks = {"parallel": "", "sum": "+", "max": ">", "min": "<", "special": "*", "replicate": "!"}

    def tensor(dims):
        return "".join(
            "." if not dim else names[dim[0]] if len(dim) == 1 else f"({''.join(names[f] for f in dim)})"
            for dim in dims
        )

    kinds = [f"{names[n]}={factor.size}{marks[factor.kind]}" for n, factor in enumerate(rule.factors)]
    return f"{','.join(map(tensor, rule.operands))}->{','.join(map(tensor, rule.results))} {' '.join(kinds)}".strip()


EXPECTED = {
    "add": "ab,ab->ab a=4 b=6", "add of a literal": "ab,->ab a=4 b=6", "select by a scalar": ",a,a->a a=4",
    "clamp": ",ab,->ab a=4 b=6", "erf_inv": "ab->ab a=4 b=6", "product": "abc,acd->abd a=2 b=4 c=6+ d=8",
    "product of many": "abcd,bcde->cae a=4 b=6+ c=2 d=8+ e=10", "product of bools": "ab,bc->ac a=4 b=6! c=4",
    "ragged product": "ab,cbd,e->ad a=8! b=6+ c=3! d=4 e=3!", "reduce_sum": "abc->ac a=4 b=6+ c=8",
    "reduce_max": "abc->b a=4> b=6 c=8>", "reduce_min": "abc->ac a=4 b=6< c=8", "reduce_prod": "abc->ac a=4 b=6* c=8",
    "argmax": "ab->a a=4 b=6*", "cumsum": "ab->ab a=4 b=6*", "sort": "ab,ab->ab,ab a=4! b=6",
    "top_k": "ab->a.,a. a=4 b=6*", "merge": "abc->(ab)c a=4 b=2 c=6", "divide": "(ab)c->abc. a=2 b=4 c=6",
    "uneven reshape": "a(bc)f->a(bd)e a=8 b=2 c=5! d=2! e=15! f=6!", "squeeze": "a.b->ab a=4 b=6",
    "transpose": "abc->cab a=4 b=6 c=8", "broadcast": "a.b->cadb a=4 b=6 c=2 d=10", "rev": "ab->ab a=4* b=6",
    "concatenate": "ab,ac->ad a=4 b=6! c=2! d=8!", "split": "ab->ac,ad a=4 b=6! c=2! d=4!",
    "stack": "ab,ab->acb a=4 b=6 c=2!", "tile": "ab->ac a=4 b=6! c=12!", "pad": "ab,->ab a=4 b=2*",
    "slice": "ab->ab a=4 b=2*", "dynamic_slice": "ab,,->ac a=4 b=6! c=2!",
    "dynamic_update_slice": "ab,ac,,->ab a=4 b=6! c=2!", "embedding": "cd,ab.->abd a=2 b=4 c=8+ d=6",
    "clipped embedding": "bc,a.->ac a=4 b=8+ c=6", "embedding of bools": "bc,a.->ac a=4 b=8! c=6",
    "two indices": "bcd,a.->ad a=10 b=8+ c=6+ d=4", "batched gather": "acd,ab.->abd a=4 b=2 c=8+ d=6",
    "label pick": "ab,a..->a. a=4 b=8+", "window gather": "bd,a.->acd a=4 b=8! c=2! d=6",
    "scatter-add": "bc,a.,ac->bc a=4+ b=8* c=6", "batched scatter-add": "acd,ab.,abd->acd a=4 b=2+ c=8* d=6",
    "scatter": "bc,a.,ac->bc a=4! b=8* c=6", "scatter-max": "bc,a.,ac->bc a=4! b=8* c=6",
    "conv": "cbd,abe->cad a=8 b=6+ c=4 d=10* e=3!", "point conv": "cbd,ab.->cad a=8 b=6+ c=4 d=10",
    "patches": "cb(de),abe->cad a=8 b=6+ c=4 d=4 e=4!", "patches by kernel": "bc(de),bad->ace a=8 b=4+ c=6 d=4+ e=4!",
    "patches by operand": "cbd,bae->ca(de) a=6 b=8+ c=4 d=4 e=4!",
    "grouped conv": "c(ab).,abd->ca. a=4 b=2! c=2 d=3!",
    "grouped conv by kernel": "c(ad).,c(ab)e->(ab)d. a=4 b=2! c=2+ d=2! e=3!", "max pool": "a(bc)->ab a=4 b=3 c=2!",
    "max pool by operand": "ab,a(bc)->a(bc) a=4 b=3 c=2!", "overlapping pool": "ab->ab a=4 b=6*",
    "spread window": "ab->a(bc) a=4 b=6 c=2!", "fft": "ab->ac a=4 b=6! c=4!",
    "cholesky": "abc->ade a=4 b=3! c=3! d=3! e=3!", "svd": "abc->ad a=4 b=3! c=2! d=2!",
    "lu": "abc->ade,af,ag a=4 b=3! c=3! d=3! e=3! f=3! g=3!", "qr": "abc->ade,afg a=4 b=3! c=2! d=3! e=2! f=2! g=2!",
    "eigh": "abc->ade,af a=4 b=3! c=3! d=3! e=3! f=3!",
    "triangular_solve": "abc,ade->afg a=4 b=3! c=3! d=3! e=2! f=3! g=2!", "bitcast": "ab->abc a=4 b=6 c=4!",
    "barrier": "ab,c->ab,c a=4 b=6 c=2", "random bits": "a->ab a=4 b=6*", "split keys": "a->ab a=4 b=2!",
    "keys": ",a->a a=4",
}  # fmt: skip


@pytest.mark.parametrize("case", EXPECTED)
def test_conventions(case):
    assert shown(rule_of(case)) == EXPECTED[case]


def described(case):
    """The rule of a case, and Shardy's of the same equation."""
    op, values = example(case)
    call = call_of(op, values)
    return factors.rules_of([op], values)[op.key], shardy_rule(call)


def call_of(op, values):
    avals = tuple(a.aval if isinstance(a, Lit) else values[a].aval for a in op.operands)
    literals = tuple(isinstance(a, Lit) for a in op.operands)
    return Call(op.primitive, op.params, avals, tuple(values[r].aval for r in op.results), literals)


def places(rule, *kinds):
    """Where the factors of some kinds are: a set of (size, ((tensor, dim), ...))."""
    tensors = (*rule.operands, *rule.results)
    return {
        (f.size, tuple((t, d) for t, dims in enumerate(tensors) for d, dim in enumerate(dims) if n in dim))
        for n, f in enumerate(rule.factors)
        if f.kind in kinds
    }


# Shardy has no rule for what these lower to (a composite, a custom call, an iota, a loop), or it is several operations.
NO_RULE = {"erf_inv", "ragged product", "argmax", "top_k", "barrier", "keys", "cholesky", "svd", "lu", "qr", "eigh"}
NO_RULE |= {"triangular_solve", "random bits", "split keys", "split", "stack", "tile"}
# Windows that do not overlap, and groups, are plain factors here; Shardy replicates or permutes them.
FINER = {"point conv", "patches", "patches by kernel", "patches by operand", "grouped conv", "grouped conv by kernel"}
FINER |= {"max pool", "max pool by operand", "spread window"}
# A minor factor beside one that cannot be split, which no block of a dim is; in JAX 0.10 an update's dim.
COARSER = {"uneven reshape", "grouped conv by kernel", "dynamic_update_slice"}


@pytest.mark.parametrize("case", sorted(CASES.keys() - NO_RULE))
def test_agrees_with_shardy(case):
    ours, theirs = described(case)
    assert theirs is not None
    more = places(ours, "parallel") - places(theirs, "parallel")
    fewer = places(theirs, "parallel") - places(ours, "parallel")
    assert not more or case in FINER | COARSER
    inserted = places(ours, "special") if "scatter" in case else set()
    assert not fewer - inserted or case in COARSER
    reductions = places(theirs, "sum", "max", "min", "special")
    if case != "rev":  # the one permutation that is not a reduction
        assert places(ours, "sum", "max", "min") <= reductions or case == "patches by kernel"


@pytest.mark.parametrize("case", sorted(NO_RULE & CASES.keys()))
def test_shardy_has_no_rule(case):
    """So that a table is dropped when the compiler learns the rule."""
    ours, theirs = described(case)
    assert theirs is None and places(ours, "parallel", "sum", "special")


UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2
    expm1 floor is_finite lgamma log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
"""
BINARY = "add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub igamma igammac zeta polygamma"
INTEGER = "and or xor shift_left shift_right_arithmetic shift_right_logical"
# Loops, several operations, or composites of a dialect that Shardy does not read.
WITHOUT_RULE = """
    acos acosh asin asinh atan atanh bessel_i1e cosh digamma erf erf_inv erfc igamma igammac integer_pow lgamma
    nextafter polygamma sinh square zeta
"""


def elementwise_equations():
    x, n = f32(4, 6), jax.ShapeDtypeStruct((4, 6), jnp.int32)
    p, c = jax.ShapeDtypeStruct((4, 6), jnp.bool_), jax.ShapeDtypeStruct((4, 6), jnp.complex64)
    s = f32()
    for name in UNARY.split():
        yield from equations(getattr(lax, name), x)
    for name in BINARY.split():
        yield from equations(getattr(lax, name), x, x)
    for name in INTEGER.split():
        yield from equations(
            getattr(lax, {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}.get(name, name)), n, n
        )
    for fun in (lax.bitwise_not, lax.population_count, lax.clz, lambda v: lax.convert_element_type(v, jnp.float32)):
        yield from equations(fun, n)
    for fun in (lax.real, lax.imag, lax.conj):
        yield from equations(fun, c)
    for fun in (lambda v: lax.integer_pow(v, 3), lambda v: lax.reduce_precision(v, 8, 7), lambda v: v * 2.0):
        yield from equations(fun, x)
    yield from equations(lax.complex, x, x)
    yield from equations(lax.select_n, p, x, x)
    yield from equations(lax.select_n, jax.ShapeDtypeStruct((), jnp.bool_), x, x)
    yield from equations(lax.clamp, s, x, s)


def test_elementwise_agree_with_shardy():
    found = [(op, values) for op, values in elementwise_equations() if op.name in tables.TABLE]
    calls = [call_of(op, values) for op, values in found]
    different = set()
    for (op, values), call in zip(found, calls, strict=True):
        ours, theirs = factors.rules_of([op], values)[op.key], shardy_rule(call)
        assert tables.TABLE[call.name] is tables.elementwise_rule
        if theirs is None or places(ours, "parallel") != places(theirs, "parallel"):
            different.add(call.name)
    assert len(found) > 70
    assert different <= set(WITHOUT_RULE.split())


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12]), max_size=5), st.randoms())
@settings(deadline=None, max_examples=200)
def test_reshape_shares_what_is_shared(before, random):
    """Splitting the result's flat index by its factors gives the operand's; dims' leading factors are found."""
    flat = [p for size in before for p in prime_factors(size)]
    random.shuffle(flat)
    after = []
    for p in flat:
        if after and random.random() < 0.5:
            after[-1] *= p
        else:
            after.append(p)
    call = call_of(
        *equations(
            lambda x: lax.reshape_p.bind(x, new_sizes=tuple(after), dimensions=None, sharding=None),
            jax.ShapeDtypeStruct(tuple(before), jnp.float32),
        )[0]
    )
    rule = factors.describe(call)
    check(rule, [tuple(before)], [tuple(after)])
    index = np.arange(math.prod(before))
    assert all(
        np.array_equal(coordinate(index, rule, rule.operands[0], n), coordinate(index, rule, rule.results[0], n))
        for n, factor in enumerate(rule.factors)
        if factor.kind == "parallel"
    )
    # A dim's leading factor is lost only if its stride is no stride of the other shape.
    for dims, own, others in ((rule.operands[0], before, after), (rule.results[0], after, before)):
        for d, dim in enumerate(dims):
            start = math.prod(own[:d])
            starts = [math.prod(others[:e]) for e in range(len(others))]
            if (
                own[d] > 1
                and start in starts
                and math.gcd(own[d], others[max(e for e, s in enumerate(starts) if s == start)]) > 1
            ):
                assert rule.factors[dim[0]].kind == "parallel"


def prime_factors(n):
    return [] if n == 1 else next([p, *prime_factors(n // p)] for p in range(2, n + 1) if n % p == 0)


def coordinate(index, rule, dims, factor):
    """The factor's coordinate of each flat index of a tensor, or zeros where the tensor does not have it."""
    after = 1
    for f in reversed([f for dim in dims for f in dim]):
        if f == factor:
            return index // after % rule.factors[f].size
        after *= rule.factors[f].size
    raise AssertionError(f"factor {factor} is missing")


def test_reshape_finds_shardys_factors():
    """Wherever the dims nest. Elsewhere Shardy's versions differ."""
    shapes = [
        ((8, 6), (48,)), ((48,), (2, 4, 6)), ((2, 3, 4), (6, 4)), ((5, 2, 9), (10, 3, 3)), ((1, 8, 1), (8,)),
        ((12, 10), (3, 4, 10)),
    ]  # fmt: skip
    calls = [
        call_of(*equations(lambda x, b=b: x.reshape(b), jax.ShapeDtypeStruct(a, jnp.float32))[0]) for a, b in shapes
    ]
    for call in calls:
        theirs = shardy_rule(call)
        assert theirs is not None and places(factors.describe(call), "parallel") == places(theirs, "parallel")


def callback(x):
    return jax.pure_callback(lambda v: v, x, x)


def debug(x):
    jax.debug.print("{}", x)
    return x


def mapped(x):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    turn = [(i, (i + 1) % 8) for i in range(8)]
    return jax.shard_map(lambda v: lax.ppermute(v, "d", turn), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))(x)


@pytest.mark.parametrize(
    ("name", "fun"),
    [
        ("pure_callback", callback),
        ("debug_callback", debug),
        ("shard_map", mapped),
        ("custom_linear_solve", lambda x: jnp.linalg.solve(jnp.eye(8) + x[:, None], x)),
        ("create_token", lambda x: (lax.create_token(), x)),
    ],
)
def test_opaque(name, fun):
    found = equations(fun, jnp.ones(8))
    names = (name, "debug_print") if name == "debug_callback" else (name,)
    rule = next(factors.rules_of([op], values)[op.key] for op, values in found if op.name in names)
    assert rule.source == "opaque" and not rule.factors
    assert "no rule for the primitive" in rule.reason


def test_control_flow_is_left_to_its_bodies():
    (op, values), *_ = equations(lambda x: lax.scan(lambda c, v: (c + v, c), x[0], x), jnp.ones(8))[-1:]
    assert op.name == "scan" and factors.rules_of([op], values) == {}


def test_a_table_that_meets_unknown_parameters_is_opaque():
    op, values = example("cumsum")
    broken = [replace(op, params={})]
    with pytest.raises(KeyError, match="axis"):  # in tests
        factors.rules_of(broken, values)
    rule = contextvars.Context().run(factors.rules_of, broken, values)[op.key]
    assert rule.source == "opaque" and "parameters" in rule.reason


def test_what_meets_a_literal_is_replicated():
    op, values = example("add")
    literal = Lit(np.ones((4, 6), np.float32), values[0].aval)
    rule = factors.rules_of([replace(op, operands=(literal, op.operands[1]))], values)[op.key]
    assert shown(rule) == "..,ab->ab a=4! b=6!"


def test_typed_keys_and_wide_types_can_be_moved():
    keys = jax.random.split(jax.random.key(0), 4)
    found = equations(lambda k: lax.broadcast_in_dim(k, (3, 4), (1,)), keys)
    assert [shown(factors.rules_of([op], values)[op.key]) for op, values in found] == ["a->ba a=4 b=3"]
    with jax.enable_x64(True):
        found = equations(
            lambda a, b: a @ b, jax.ShapeDtypeStruct((4, 6), "float64"), jax.ShapeDtypeStruct((6, 8), "float64")
        )
    (op, values) = found[-1]
    assert shown(factors.rules_of([op], values)[op.key]) == "ab,bc->ac a=4 b=6+ c=8"
