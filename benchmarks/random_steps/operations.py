"""The operations of random programs: a table of forms by kind of line, with the values that they read.

A form is an expression in which "{...}" is filled by an expression of the names of its kind: picked values, other names
in order, `axis`, a random dim of the first value, `one(...)`, one of its arguments, and `dim()`, a size. Two blanks or
a new line separate forms. Some do not suit some values, and are refused by JAX: these lines are left out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.random_steps.program import Builder, Value

Scope = dict[str, Any]
Choice = Callable[[Builder, Scope], Any]
"""Of the value of a name, given those before it; None if there is none."""
FLOAT, INT, REAL, BITS = ("float32",), ("int32",), ("float32", "bfloat16"), ("int32", "uint8", "int8")


def pick(*dtypes: str, like: str = "", share: float = 1.0, **limits: Any) -> Choice:
    """A value of some dtypes; `like` an earlier one in shape, in a share of cases, and in dtype if there are none."""

    def choose(b: Builder, scope: Scope) -> Value | None:
        if not like:
            return b.pick(dtypes, **limits)
        shape = scope[like].shape if b.rng.random() < share else None
        return b.pick(dtypes or (scope[like].dtype,), shape=shape, **limits)

    return choose


def leaf(shape: str, dtype: str = "'float32'", where: str = "'state'") -> Choice:
    """A new leaf, all expressions."""
    return lambda b, scope: b.leaf(eval(where, scope), eval(shape, scope), eval(dtype, scope))


def let(expression: str) -> Choice:
    """The value of an expression."""
    return lambda b, scope: eval(expression, scope)


@dataclass(frozen=True)
class Kind:
    """Lines of one kind.

    Attributes:
      label: of the kind, as coverage counts it.
      forms: of its lines.
      names: how what they read is chosen, in order; texts are filled as forms are.
      when: an expression that must hold. exact: whether the operations do not round.
    """

    label: str
    forms: tuple[str, ...]
    names: Mapping[str, Choice | str]
    when: str = ""
    exact: bool = False

    def __call__(self, b: Builder, **given: Value) -> Value | None:
        """Adds a line, unless no value fits."""
        scope: Scope = {"math": math, "rng": b.rng, "one": lambda *some: b.rng.choice(some), "dim": b.dim, **given}
        for name, choose in self.names.items():
            scope[name] = filled(choose, scope) if isinstance(choose, str) else choose(b, scope)
            if scope[name] is None:
                return None
            if isinstance(scope[name], Value) and scope[name].shape:
                scope.setdefault("axis", b.rng.randrange(len(scope[name].shape)))
        if self.when and not eval(self.when, scope):
            return None
        try:
            source = filled(b.rng.choice(self.forms), scope)
        except IndexError:  # a dim that the value does not have
            return None
        words = set(re.findall(r"\w+", source))
        reads = [value for value in scope.values() if isinstance(value, Value) and value.name in words]
        return b.add(self.label, source, reads, self.exact)


def filled(form: str, scope: Scope) -> str:
    """A form with the values of its braces."""
    return re.sub(r"\{([^{}]*)\}", lambda found: str(eval(found[1], scope)), form)


def kind(label: str, forms: str, when: str = "", exact: bool = False, **names: Choice | str) -> Kind:
    """A kind, of forms in one text."""
    return Kind(label, tuple(re.split(r"\n\s*|\s{2,}", forms.strip())), names, when, exact)


FULL, KEY = "math.prod(v.shape)", "jax.random.fold_in({key}, {rng.randint(0, 9)})"
AXES = "tuple(sorted(rng.sample(range(len(v.shape)), rng.randint(1, len(v.shape)))))"
SQUARE = "(jnp.einsum('...ia,...ja->...ij', {v}, {v}) + 3 * jnp.eye({v.shape[-2]}))"

OPERATIONS: list[Callable[[Builder], Value | None]] = [
    # -- of each element
    kind("elementwise", """
        jnp.tanh({v})  jnp.sin({v})  jnp.exp(-jnp.abs({v}))  jnp.log1p(jnp.abs({v}))  jax.nn.sigmoid({v})  {v} * {v}
        jnp.sqrt(jnp.abs({v}) + 0.5)  lax.erf({v})  -{v}  jax.nn.gelu({v})  jax.nn.relu({v})  jnp.clip({v}, -0.3, 0.4)
        lax.integer_pow({v}, 3) * 0.1  lax.rsqrt(jnp.abs({v}) + 1)  lax.cbrt({v} + 3)  lax.stop_gradient({v})
        lax.reduce_precision({v}, 8, 7)  jax.nn.softplus({v})  jnp.arctan({v})  jnp.expm1({v} * 0.1)
        jax.jit(lambda a: jnp.cos(a) * 2)({v})  lax.optimization_barrier({v})
    """, v=pick(*REAL)),
    kind("integer", """
        {v} % 3  {v} // 2  ~{v}  -{v}  jnp.sign({v})  {v} << 1  {v} >> 1  {v} & 5  {v} ^ 3  lax.population_count({v})
        lax.clz({v})  jnp.clip({v}, 1, 4)  {v} * {v} + 1  {v} == 2
    """, v=pick(*BITS)),
    kind("elementwise", """
        {v} + {w}  {v} * {w}  {v} - {w}  jnp.maximum({v}, {w})  jnp.minimum({v}, {w})
    """, v=pick(*REAL, "int32"), w=pick(like="v", share=0.6)),
    kind("elementwise", """
        {v} / (1 + jnp.abs({w}))  jnp.arctan2({v}, 2 + {w} * {w})  jnp.logaddexp({v}, {w})
    """, v=pick(*REAL), w=pick(like="v", share=0.6)),
    kind("elementwise", "{v} * {w}", v=pick(*FLOAT, least=2),
         w=leaf("tuple(one(1, size) for size in v.shape)[one(0, 0, 1):]")),
    kind("elementwise", "jnp.where({c} > 0, {v}, 0.5 * {w})", c=pick(*FLOAT, "int32", exact=True),
         v=pick(*FLOAT, like="c"), w=pick(*FLOAT, like="c")),
    kind("convert", "{v}.astype('{one('float32', 'bfloat16', 'complex64', 'float16')}')",
         v=pick(*REAL, "bool", "int32")),
    kind("convert", "({v} * 4).astype('int32').astype('{one('int32', 'uint8', 'int8', 'bool', 'uint32')}')",
         v=pick(*REAL, "int32", "bool", exact=True)),
    kind("bits", """
        {v} == {v}  jnp.isnan({v} * 1.0)  jnp.sign({v})  jnp.floor({v} * 3).astype('int32')  jnp.round({v} * 1.0, 1)
    """, v=pick("bool", "uint8", "int8", "uint32", "int32", *REAL, exact=True)),
    kind("bits", "~{v}  {v} & True  jnp.logical_xor({v}, jnp.any({v}))  jnp.sum({v})  {v} * 2",
         v=pick("bool", exact=True)),
    kind("bits", """
        {v} | 1  jnp.bitwise_or.reduce({v})  jnp.packbits({v} > 1)  jnp.left_shift({v}, 2)  jnp.prod({v} % 3)
        lax.bitcast_convert_type({v}, 'int8')  jnp.max({v}).astype('int32') - {v}
        jnp.dot({v}.astype('int8').ravel(), {v}.astype('int8').ravel(), preferred_element_type='int32')
    """, v=pick("uint8", "int8", "uint32", "int32", exact=True)),
    kind("bits", """
        lax.bitcast_convert_type({v}, 'int{16 if v.dtype == 'bfloat16' else 32}') >> 3  jnp.signbit({v})
        lax.nextafter({v}, {v} + 1)
    """, v=pick(*REAL, exact=True)),
    kind("numeric", """
        jnp.interp({v}, jnp.linspace(-1, 1, 5), jnp.arange(5.0))  jnp.outer({v}, jnp.arange(4.0))[:24] / 4
        jnp.linalg.norm({v})  jnp.tril({v}.reshape(-1, 1) * jnp.arange(4.0)) / 4  jnp.logaddexp({v}, 0.5)
        jax.nn.standardize({v}, axis=-1, epsilon=0.1)  jnp.convolve({v}.ravel()[:40], jnp.array([1.0, 2, 1]) / 4)
        jnp.clip({v}, jnp.mean({v}), jnp.mean({v}) + 1)  jax.nn.log_softmax({v})  jnp.std({v} + 0, 0)
        jnp.nan_to_num(jnp.log({v}))  jnp.isfinite(1 / lax.stop_gradient({v})).astype('float32')
        jnp.meshgrid({v}.ravel()[:6], jnp.arange(3.0))[0]  jnp.rot90({v}.reshape(-1, 1))  jnp.prod(1 + {v} / 100)
        jax.image.resize({v}, {tuple(max(1, s // 2) for s in v.shape)}, 'linear')  jnp.stack(jnp.unstack({v})[::-1])
        jnp.average({v}, 0, weights=jnp.arange({v.shape[0]}) + 1.0)  jnp.array_split({v}, 3)[0]  jnp.hypot({v}, 0.5)
        jnp.roll({v}, (1, 2), (0, -1))  jnp.nanmean({v}, 0)  jnp.power(jnp.abs({v}) + 0.5, 1.5)
        {v}.ravel().reshape({v}.shape, order='F')  jnp.select([{v} * 0 > 1, {v} * 0 < 1], [{v}, -{v}])
        jnp.apply_along_axis(jnp.cumsum, 0, {v}) / 8
    """, FULL, v=pick(*FLOAT, least=1)),
    kind("numbers", """
        {v} + jnp.arange({v.shape[-1]})  jax.nn.one_hot({i}, {dim()})
        {v} * lax.broadcasted_iota({v}.dtype, {v.shape}, 0) / 8
    """, v=pick(*FLOAT, "int32", least=1), i=pick(*INT, exact=True)),
    # -- sums and products
    kind("reduce", """
        jnp.mean({v}, {rest})  jnp.max({v}, {rest})  jnp.min({v}, {rest})  jnp.sum({v}, {rest}) / {count}
        jnp.sum({v} / {count}, {rest})
    """, v=pick(*REAL, "int32", least=1),
         axes=let(AXES),
         count=let("max(1, math.prod(v.shape[a] for a in axes))"), rest="axis={axes}, keepdims={one(True, False)}"),
    kind("reduce", """
        jax.nn.logsumexp({v}, {axes})  jnp.var({v}, {axes})  jax.nn.softmax({v}, {axes})  jnp.prod({v}, {axes})
    """, v=pick(*REAL, least=1), axes=let(AXES)),
    kind("reduce", """
        jnp.argmax({v}, {axis})  jnp.argmin({v}, {axis})  jnp.any({v} > 0, {axis})  jnp.all({v} > 0, {axis})
        jnp.sum({v} > 0, {axis})  jnp.bitwise_xor.reduce(({v} * 3).astype('int32'), {axis})
        jnp.bitwise_and.reduce(({v} * 3).astype('int32'), {axis})
    """, v=pick("int32", "float32", "bool", "uint8", least=1, exact=True)),
    kind("product", """
        jnp.tanh({v} @ {w})  {v} @ {w}  jax.vmap(lambda a: a @ {w})({v})
        jax.checkpoint(lambda a, c: jnp.sin(jnp.tanh(a @ c)))({v}, {w})
        jnp.matmul({v}, {w}, preferred_element_type='float32')
    """, v=pick(*REAL, least=2), w=leaf("(v.shape[-1], dim())", "v.dtype")),
    kind("product", "jnp.tensordot({v}, {w}, axes=([-1], [0])) % 7", v=pick("int32", "uint8", least=2),
         w=pick("int32", "uint8", least=1)),
    kind("convolution", """
        lax.conv_general_dilated({v}, {w}, {strides}, {rest}, feature_group_count={groups}) / 2
    """, "0 not in v.shape", v=pick(*FLOAT, least=3, most=3),
         groups=let("one(*(g for g in (1, 1, 2, v.shape[-1]) if g and v.shape[-1] % g == 0))"),
         w=leaf("(one(1, 2, 3), v.shape[-1] // groups, groups * one(1, 2, 4))"),
         strides='({one(1, 1, 2)},), {one("\'SAME\'", "\'VALID\'", "[(1, 2)]")}, lhs_dilation=({one(1, 1, 2)},)',
         rest="rhs_dilation=({one(1, 1, 2)},), dimension_numbers=('NWC', 'WIO', 'NWC')"),
    kind("convolution", """
        lax.conv_transpose({v}, {w}, (2,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC')) / 3
        lax.conv_general_dilated(jnp.swapaxes({v}, 1, 2), jnp.transpose({w}, (2, 1, 0)), (1,), 'SAME') / 3
    """, "0 not in v.shape", v=pick(*FLOAT, least=3, most=3), w=leaf("(3, v.shape[-1], one(2, 8))")),
    kind("convolution", """
        lax.conv_general_dilated({v}, {w}, ({one(1, 2)}, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')) / 4
    """, "0 not in v.shape", v=pick(*FLOAT, least=4, most=4), w=leaf("(2, 3, v.shape[-1], one(2, 8))")),
    kind("window", "lax.reduce_window({v}, {one('-jnp.inf, lax.max', '0.0, lax.add')}, {size}, {step}, {pad})",
         v=pick(*FLOAT, least=2, most=3), pad=let("repr(one('SAME', 'VALID'))"),
         size=let("tuple(one(2, 3) if a == axis else 1 for a in range(len(v.shape)))"),
         step=let("tuple(one(1, 2) if a == axis else 1 for a in range(len(v.shape)))")),
    kind("cumulative", "lax.cummax({v}, {axis}, {one(True, False)})  lax.cummin({v}, {axis}, {one(True, False)})",
         v=pick(*FLOAT, "int32", least=1)),
    kind("cumulative", """
        lax.cumsum({v}, {axis}, {one(True, False)}) / {max(1, v.shape[axis])}
        lax.cumlogsumexp({v}, {axis}, {one(True, False)})  lax.cumprod(1 + 0.1 * {v}, {axis}, {one(True, False)})
        lax.associative_scan(lambda a, c: 0.5 * a * c + c, {v}, axis={axis})
    """, v=pick(*FLOAT, least=1)),
    kind("cumulative", """
        jnp.cumsum({v} > 0, {axis})  jnp.cumsum({v}.astype('int8'), {axis})  jnp.diff({v} * 1.0, axis={axis})
        jnp.cumprod(({v} > 0).astype('int32'), {axis})  lax.cummax({v}.astype('int32'), {axis}, reverse=True)
        lax.associative_scan(jnp.maximum, {v}, axis={axis})
        lax.cumsum({v}.astype('int32'), {axis}, {one(True, False)})
    """, v=pick("bfloat16", "int32", "bool", "uint8", "float32", least=1, exact=True)),
    kind("cumulative", "recurrence(jax.nn.sigmoid({v}), {w}, {axis}, {one(True, False)})", FULL,
         v=pick(*FLOAT, least=1), w=pick(*FLOAT, like="v")),
    # -- shapes and places
    kind("reshape", """
        jnp.transpose({v}, {tuple(rng.sample(range(len(v.shape)), len(v.shape)))})  jnp.expand_dims({v}, {axis})
        {v}.reshape(-1)  jnp.broadcast_to({v}, {(one(2, 3, 8), *v.shape)})  jnp.moveaxis({v}, {axis}, 0)
        jnp.squeeze({v})
        {v}.reshape({(*v.shape[:axis], *one((k, size // k), (size // k, k)), *v.shape[axis + 1:])})
        {v}.reshape({(*v.shape[:axis], size * v.shape[axis + 1], *v.shape[axis + 2:])})
    """, exact=True, v=pick(least=1), size=let("v.shape[axis]"), k=let("one(2, 3, 4)")),
    kind("movement", """
        jnp.flip({v}, {axis})  jnp.roll({v}, {one(1, 2, -1)}, {axis})  jnp.repeat({v}, 2, {axis})  jnp.tile({v}, 2)
        lax.pad({v}, jnp.zeros((), {v}.dtype), {pads})  lax.slice_in_dim({v}, {low}, {high}, {one(1, 1, 2, 3)}, {axis})
        jnp.split({v}, 2, {axis})[{one(0, 1)}]  jnp.stack([{v}, {v} * 1], {axis})  lax.rev({v}, ({axis},))
        jnp.pad({v}, 1, mode='edge')
    """, exact=True, v=pick(least=1), low=let("rng.randint(0, v.shape[axis])"),
         high=let("rng.randint(low, v.shape[axis])"), pad=let("(one(0, 1, 2, -1), one(0, 1, 3, -1), one(0, 0, 1))"),
         pads=let("tuple([(0, 0, 0)] * axis + [pad] + [(0, 0, 0)] * (len(v.shape) - axis - 1))")),
    kind("movement", "jnp.concatenate([{v}, lax.slice_in_dim({w}, 0, {size}, axis={axis})], {axis})", exact=True,
         v=pick(*REAL, "int32", least=1), w=pick(like="v"), size=let("max(0, v.shape[axis] - one(0, 0, 1))")),
    kind("gather", """
        jnp.take({v}, {i}, axis={axis}, mode='{one('clip', 'fill', 'wrap')}')  {v}[{i}]
        {v}[{i}, {i} % {v.shape[1] or 1}]  {v}[:, {i} % {v.shape[1] or 1}]
    """, exact=True, v=pick(*FLOAT, "int32", least=1), i=pick(*INT, exact=True)),
    kind("gather", "jnp.take_along_axis({v}, {i} % {v.shape[axis] or 1}, {axis})", exact=True,
         i=pick(*INT, exact=True, least=1), v=pick(*FLOAT, "int32", like="i")),
    kind("scatter", """
        {v}.at[{i}].{one('add', 'max', 'min')}({u})  jax.ops.segment_sum({u}, {i} % {v.shape[0]}, {v.shape[0]})
        {v}.at[jnp.arange({i.shape[0]}) % {v.shape[0]}].add({u} * 2)  {v}.at[jnp.arange({i.shape[0]})[::-1]].set({u})
        {v}.at[{i}].multiply({u} * 0.5)
    """, "v.shape[0] >= i.shape[0] > 0", v=pick(*FLOAT, "int32", least=1), i=pick(*INT, least=1, most=1, exact=True),
         u=leaf("(*i.shape, *v.shape[1:])", "v.dtype", "'batch'")),
    kind("dynamic", """
        lax.dynamic_slice_in_dim({v}, {i}, {size}, {axis})  lax.dynamic_index_in_dim({v}, {i}, {axis}, keepdims=False)
        lax.dynamic_update_slice_in_dim({v}, lax.slice_in_dim({v}, 0, {size}, axis={axis}) * 2, {i}, {axis})
    """, exact=True, v=pick(*FLOAT, "int32", least=1), i=pick(*INT, most=0, exact=True),
         size=let("rng.randint(0, v.shape[axis])")),
    kind("indexing", """
        {v}[::-2]  {v}[..., None, 0]  {v}[jnp.array([0, -1, {v.shape[0] // 2}])]  {v}.at[::2].multiply(2)
        {v}.at[{i} % {v.shape[0]}].add(1, mode='{one('drop', 'clip')}')  {v}.at[0].set(0)  {v}.at[-1].max(1)
        {v}.at[{i}].get(mode='{one('clip', 'fill')}', fill_value=0)
        jnp.take({v}, {i}.ravel()[0] % {v.shape[0]}, axis=0)
        jnp.put_along_axis({v}, jnp.zeros((1,) * {v}.ndim, int), 0, axis=0, inplace=False)  jnp.diagonal({v})
        jax.ops.segment_max({v}.astype('int32'), jnp.arange({v.shape[0]}) % 3, 3)  {v}.at[{v.shape[0] // 2}:].add(1)
        jax.ops.segment_sum({v}, jnp.arange({v.shape[0]}) // 2, {v.shape[0]}, indices_are_sorted=True)
        jnp.bincount({i}.ravel() % 8, length=8)  jnp.searchsorted(jnp.arange({v.shape[0]}), {i})
        jnp.nonzero({i}.ravel() > 2, size=4, fill_value=-1)[0]  jnp.where({i} > 2, {i}, -{i})[..., :1]
        jnp.unique({i}, size=4, fill_value=0)  jnp.digitize({i}, jnp.array([1, 3]))  {v}[:, {i} % {v.shape[1]}]
        {v}[{i}.ravel() % {v.shape[0]}, jnp.arange({math.prod(i.shape)}) % {v.shape[1]}]  {v}.at[:, 0].add({v}[:, -1])
        {v}.at[jnp.arange({v.shape[0]}), jnp.arange({v.shape[0]}) % {v.shape[1]}].set(1, unique_indices=True)
        lax.dynamic_slice({v}, ({i}.ravel()[0], 1) + (0,) * ({v}.ndim - 2), {half} + {v}.shape[2:])  jnp.fliplr({v})
        {v}[{i} % {v.shape[0]}][..., {i} % {v.shape[1]}, :]
    """, FULL + " and math.prod(i.shape)", exact=True, v=pick(*FLOAT, "int32", least=1),
         i=pick(*INT, least=1, most=2, exact=True), half=let("(max(1, v.shape[0] // 2), max(1, v.shape[-1] - 1))")),
    kind("sort", "jnp.sort({v}, {axis})  lax.top_k({v}, {rng.randint(1, v.shape[-1])})[0]", "v.shape[-1]",
         v=pick(*FLOAT, least=1)),
    kind("sort", """
        jnp.argsort({v}, {axis}, descending={one(True, False)})  lax.sort(({v}, {w}), dimension={axis}, num_keys=1)[1]
        lax.top_k({v}, {rng.randint(1, v.shape[-1])})[{one(0, 1)}]  jnp.median({v}, {axis})
        lax.sort(({v}, -{v}, {v} * 2), dimension={axis}, num_keys=2)[2]  jnp.quantile({v} * 1.0, 0.3, axis={axis})
        jnp.sort({v}, {axis}, descending=True)  jnp.lexsort(({v}, {v} % 2), {axis})
        jnp.argpartition({v}, 0, {axis}) * 0
        jnp.argsort(jnp.argsort({v}, {axis}), {axis})  lax.top_k(jnp.moveaxis({v}, {axis}, -1), 1)[1]
        jnp.percentile({v} * 1.0, 50)  lax.approx_max_k({v} * 1.0, 1, recall_target=1.0)[0]
    """, FULL, v=pick(*FLOAT, "int32", least=1, exact=True), w=let("v")),
    kind("sort", "lax.sort(({v}, {w}), dimension={axis}, num_keys=1)[1]", v=pick(*FLOAT, "int32", least=1, exact=True),
         w=pick(*FLOAT, like="v")),
    # -- loops, branches, rules of differentiation
    kind("scan", "scanned({v}, {axis}, {one(True, False)})[{one(0, 0, 1)}]  mixed_scan({v}, {axis}, {one(1, 1, 2)})",
         v=pick(*FLOAT, least=1)),
    kind("loop", "looped({v}, {w}, {one(0, 1, 2, 3)})", v=pick(*FLOAT, least=1), w=leaf("(v.shape[-1],) * 2")),
    kind("loop", "bounded_loop(lax.stop_gradient({v}), {i} % 3)", FULL, v=pick(*FLOAT, least=1),
         i=pick(*INT, most=0, exact=True)),
    kind("while", "while_below({v}, {i} % 4)", FULL, v=pick(*FLOAT), i=pick(*INT, most=0, exact=True)),
    kind("condition", """
        lax.cond(jnp.sum({i}) % 2 == 0, lambda a: jnp.tanh(a), lambda a: a - jnp.mean(a, 0), {v})
        lax.switch(jnp.max({i}) % 3, [lambda a: a, lambda a: a * jnp.mean(a), lambda a: jnp.flip(a, 0)], {v})
        lax.cond(jnp.max({i}) > 3, lambda a: jnp.sort(a, -1), lambda a: jnp.cumsum(a, 0) / 8, {v})
    """, "math.prod(i.shape)", v=pick(*FLOAT, least=1), i=pick(*INT, exact=True)),
    kind("own rule", """
        own_gradient({v})  own_tangent({v}, {w})  jax.checkpoint(lambda a, c: jnp.tanh(a * jnp.sin(c)))({v}, {w})
    """, v=pick(*FLOAT), w=pick(*FLOAT, like="v")),
    kind("own rule", """
        scaled_product({v}, {w}, 0.5)  jax.jit(jax.checkpoint(lambda a: a @ {w} + scaled_product(a, {w}, 2.0)))({v})
        jax.checkpoint(lambda a, c: jnp.sin(jnp.tanh(a @ c)), policy=jax.checkpoint_policies.{policy})({v}, {w})
        jax.checkpoint(lambda a, c: jax.checkpoint(jnp.sin, prevent_cse=False)(a @ c))({v}, {w})
        lax.scan(jax.checkpoint(lambda a, c: (jnp.tanh(a + c), None)), jnp.zeros({v}.shape[1:]), {v})[0]
    """, v=pick(*FLOAT, least=2), w=leaf("(v.shape[-1], dim())"), policy=let(
        "one('dots_saveable', 'nothing_saveable', 'everything_saveable', 'dots_with_no_batch_dims_saveable')")),
    kind("transformed", """
        jax.vmap(lambda a, c: lax.cond(c > 2, jnp.tanh, lambda z: z * 0.5, a))({v}, {rows})
        jax.vmap(lambda a, c: lax.while_loop(lambda s: s[0] < c % 4, {step}, (0, a))[1])(lax.stop_gradient({v}), {rows})
        jax.vmap(lambda a, c: lax.dynamic_slice_in_dim(a, c, {max(1, v.shape[1] // 2)}, 0))({v}, {rows})
        jax.vmap(lambda a, c: lax.switch(c % 3, [jnp.sin, lambda z: -z, lambda z: z.at[0].set(1)], a))({v}, {rows})
        lax.map(lambda a: jnp.tanh(a) * jnp.mean(a), {v})  lax.map(lambda a: jnp.cumsum(a, -1), {v}, batch_size=3)
        jax.vmap(lambda a: scanned(a, 0, False)[0], in_axes=1, out_axes=1)({v})
        jax.vmap(jax.vmap(lambda a: a * 2 + 1))({v})
        jax.jvp(lambda a: jnp.tanh(a) * a, ({v},), (jnp.ones_like({v}),))[1]
        jax.grad(lambda a: jnp.sum(jax.checkpoint(jnp.sin)(a) ** 2))({v})
    """, FULL + " and i.shape[0]", v=pick(*FLOAT, least=2), i=pick(*INT, least=1, most=1, exact=True),
         rows="jnp.resize({i}, ({v.shape[0]},))", step="lambda s: (s[0] + 1, jnp.sin(s[1]))"),
    # -- random and complex numbers, matrices
    kind("random", """
        {v} * jax.random.bernoulli({k}, 0.7, {v.shape})  {v} + jax.random.normal({k}, {v.shape})
        {v} + jax.random.uniform({k}, {v.shape}, minval=-1)  jax.random.permutation({k}, {v})
        jax.vmap(lambda q, a: a + jax.random.normal(q, a.shape))(jax.random.split({k}, {v.shape[0]}), {v})
        {v} + jax.random.truncated_normal({k}, -1, 1, {v.shape})  jax.random.randint({k}, {v.shape}, 0, 5)
        jax.random.normal({k}, (4, 8))  jax.random.split({key})[1]  {v} + jax.random.gumbel({k}, {v.shape}) * 0.1
        jax.random.fold_in({key}, 3)  {v} + jax.random.exponential({k}, {v.shape})
        {v} * jax.random.rademacher({k}, {v.shape}, 'float32')  {v} + jax.random.laplace({k}, {v.shape[-1:]})
        jax.random.categorical({k}, lax.stop_gradient({v}))  {v} + jax.random.normal({k}, {v.shape}, 'bfloat16')
        jax.random.bits({k}, {v.shape}, 'uint8').astype('float32') / 256 + {v}
        jax.random.split({k}, 3)[1]  jax.random.fold_in(jax.random.clone({key}), 7)
        jax.random.wrap_key_data(jax.random.key_data({k}), impl=jax.random.key_impl({key}))
        lax.scan(lambda q, a: (jax.random.split(q)[0], a + jax.random.uniform(q, a.shape)), {k}, {v})[1]
        {v} + lax.cond({v}.size % 2 == 0, jax.random.uniform, jax.random.normal, {k})
    """, key=pick("key"), v=pick(*FLOAT, least=1), k=KEY),
    kind("random", """
        jax.random.choice({k}, {v}, ({dim()},), axis=0)  jax.random.choice({k}, {v}, replace=False)
        jax.vmap(lambda i, a: a * jax.random.bernoulli({own}, 0.5, a.shape))(jnp.arange({rows}), {v})
        lax.map(lambda t: t[1] + jax.random.normal(t[0], t[1].shape), (jax.random.split({k}, {rows}), {v}))
    """, "rows", key=pick("key"), v=pick(*FLOAT, least=1), k=KEY, rows=let("v.shape[0]"),
         own="jax.random.fold_in({k}, i)"),
    kind("complex", """
        jnp.real({v})  jnp.imag({v})  jnp.conj({v}) * {v}  jnp.sum({v}, 0) / 8  {v} * (0.5 + 1j)  jnp.fft.ifft({v})
        jnp.abs({v} + 2)  jnp.exp(1j * jnp.real({v})) * {v}
    """, v=pick("complex64")),
    kind("complex", "lax.complex({v}, {w})  jnp.fft.fft({v}) / 4  jnp.fft.rfft({v}, norm='ortho')", v=pick(*FLOAT),
         w=pick(*FLOAT, like="v")),
    kind("linear algebra", """
        jnp.linalg.cholesky({square})  jnp.triu({v})  jnp.linalg.norm({v} + 1, axis=-1)  jnp.trace({square})
        jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky({square}), {v}, lower=True)
        jnp.linalg.solve({square}, {v})  jnp.linalg.inv({square})  jnp.linalg.slogdet({square})[1]
        jnp.linalg.eigvalsh({square})  jnp.linalg.svd({v} + jnp.eye(*{v.shape[-2:]}), compute_uv=False)
    """, FULL + " and v.shape[-1] <= 8", v=pick(*FLOAT, least=2), square=SQUARE),
    # -- references, effects, low bits
    kind("reference", "{one('summed', 'scanned', 'looped', 'branched')}_in_ref({v})", "0 not in v.shape",
         v=pick(*FLOAT, least=1)),
    *(kind(label, f"{{one('debugged', 'called_out', 'called_out_once')}}({{v}}, {ordered})", exact=True,
           v=pick(*FLOAT, "int32")) for label, ordered in (("effect", False), ("ordered effect", True))),
    kind("whole-batch loop", "counted_{one('up', 'down', 'in_scan', 'with_branch', 'until_small')}({v})",
         "0 not in v.shape", v=pick(*FLOAT, least=2, most=2)),
    *(kind("low-bit type", f"{changed}  {{v}}.astype('float32') * 0.5", exact=True, v=leaf(
        "tuple(dim() for _ in range(one(1, 2)))", f"one({types})", "one('state', 'batch')"))
      for changed, types in (("{v} & {v}", "'int4', 'uint4', 'int2'"), ("-{v}", "'float8_e4m3fn', 'float8_e5m2'"))),
]  # fmt: skip
