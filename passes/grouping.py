"""Groups operations that share one decision, and ties groups that are alike.

Problem. A train step has tens of thousands of equations, but few real decisions: an elementwise operation follows the
operand that it transforms, and the layers of a model repeat. Choosing per equation would make the integer program grow
with both.

Grouping. Every value gets a *home*: a group, and for each of its dims the factors of that group. A group is one of

- leaf: an argument, a constant, or an input of a nested body (a *port*): its factors are its dims;
- heavy: one operation with its own rule (a matrix product, a reduction, a gather, ...);
- linear: an addition of values that may be partial sums, so that a partial sum can travel through it;
- light: elementwise operations, transpositions and the like that hang together. An operation joins the home of its
  *main* operand, the deepest operand that has all of its factors, so that group factors need no unification;
- the *fixed* group 0: scalars, everything that no rule describes, and what cannot be inside a region (a user's own
  `shard_map`, ordered effects); it has one strategy, replication.

Iota, broadcasts to more elements, and what is computed from these alone are *lazy*: they cost nothing to repeat, so
each consumer makes its own block, and what is moved is the small source ("price a broadcast at its source's bytes").

A `Demand` is an edge: a group wants a value, with each dim sharded by the given factors of the group. Demands on a lazy
value are pulled back to the values that it is made from.

Tying. Groups of equal *colour* share one decision. Colours come from the operations inside a group and two rounds of
Weisfeiler-Lehman refinement over demands (Weisfeiler & Leman 1968; DESIGN section 4), so a model of any depth has a
bounded number of classes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Traced, Value
from alpa_lite.passes.local_effects import needs_outside
from alpa_lite.strategy import Factor, Rule

Dims = tuple[tuple[int, ...], ...]
GroupKind = Literal["fixed", "leaf", "heavy", "linear", "light"]

# Linear in their one tensor operand: a partial sum may pass through them.
_LINEAR_UNARY = frozenset({"neg", "transpose", "convert_element_type", "copy", "copy_p", "squeeze", "expand_dims"})
_ADDITIONS = frozenset({"add_any", "add", "sub"})


@dataclass(frozen=True)
class Home:
    """Where a value is made: its group, and the group's factors of each of its dims."""

    group: int
    dims: Dims
    slot: int


@dataclass(frozen=True)
class Demand:
    """Group `group` wants `value` with its dims sharded by the given factors of the group.

    `slot` numbers the demands of a group; `position` is the program point of the use; `trips` how often it happens.
    `op` is the operation that wants it, or -1 for an output, a carry or a port; `operand` its operand number.
    """

    value: int
    group: int
    dims: Dims
    slot: int
    position: int
    trips: int
    op: int = -1
    operand: int = -1


@dataclass(frozen=True, eq=False)
class Group:
    """One decision. `op_factors[i][f]` is the group's factor for factor f of the rule of `ops[i]`."""

    index: int
    kind: GroupKind
    factors: tuple[Factor, ...]
    ops: tuple[int, ...]
    op_factors: tuple[tuple[int, ...], ...]
    trips: int
    color: str
    name: str


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of a graph.

    Attributes:
      groups: by index; group 0 is the fixed group.
      homes: value -> home; lazy values have none.
      lazy: lazy value -> (op index, result number).
      demands: every edge.
      positions: op index -> program point. defined: value -> program point of its definition.
      points: the number of program points.
      ops: op index -> Op.
      classes: colour -> the groups that share it, in order.
      leaves: argument or constant number -> group.
      outputs: for each output of the step its group and dims; None for a literal.
    """

    groups: tuple[Group, ...]
    homes: Mapping[int, Home]
    lazy: Mapping[int, tuple[int, int]]
    demands: tuple[Demand, ...]
    positions: Mapping[int, int]
    defined: Mapping[int, int]
    points: int
    ops: Mapping[int, Op]
    classes: Mapping[str, tuple[int, ...]]
    leaves: tuple[int, ...]
    outputs: tuple[tuple[int, Dims] | None, ...]


@dataclass
class _Draft:
    """A group while it is being built."""

    kind: GroupKind
    factors: list[Factor]
    trips: int
    name: str
    ops: list[int] = field(default_factory=list)
    op_factors: list[tuple[int, ...]] = field(default_factory=list)
    signature: list[Any] = field(default_factory=list)
    dims: Dims = ()
    values: int = 0
    wants: int = 0


def group(traced: Traced, rules: Mapping[Any, Rule]) -> Grouping:
    """Groups the operations of a traced step. `rules` maps `Op.key` to the operation's rule."""
    builder = _Builder(traced.graph, rules)
    builder.top(traced)
    return builder.finish()


def pull(rule: Rule, result_dims: Dims, result: int = 0) -> dict[int, tuple[int, ...]]:
    """For each factor of a rule with single-factor dims, the group factors that a demand on its result gives it."""
    out: dict[int, tuple[int, ...]] = {}
    for own, wanted in zip(rule.results[result], result_dims, strict=True):
        if own:
            out[own[0]] = wanted
    return out


def is_lazy_source(op: Op, values: Sequence[Value]) -> bool:
    """Whether an operation makes a large value out of nothing, or out of a small one."""
    if op.name == "iota":
        return True
    if op.name != "broadcast_in_dim":
        return False
    source = op.operands[0]
    if isinstance(source, Lit):
        return True
    return values[op.results[0]].nbytes > values[source].nbytes


class _Builder:
    """Walks the graph once, in program order, and assigns homes."""

    def __init__(self, graph: Graph, rules: Mapping[Any, Rule]):
        self.graph = graph
        self.values = graph.values
        self.rules = rules
        self.drafts: list[_Draft] = [_Draft("fixed", [], 1, "fixed")]
        self.homes: dict[int, Home] = {}
        self.lazy: dict[int, tuple[int, int]] = {}
        self.demands: list[Demand] = []
        self.positions: dict[int, int] = {}
        self.defined: dict[int, int] = {}
        self.ops: dict[int, Op] = {}
        self.depth: dict[int, int] = {}
        self.followers: dict[int, int] = {}
        self.outputs: list[tuple[int, Dims] | None] = []
        self.clock = 0
        self.linear: set[int] = set()
        self.zero_carries: set[int] = set()

    # -- blocks ---------------------------------------------------------------------------------------------------

    def top(self, traced: Traced) -> None:
        block = self.graph.block
        self.leaves = tuple(
            self.leaf(value, 1, traced.arguments[i].role if i < len(traced.arguments) else "constant")
            for i, value in enumerate(block.inputs)
        )
        self.body(block, 1)
        self.clock += 1
        state = dict(traced.state)
        for number, atom in enumerate(block.outputs):
            if isinstance(atom, Lit):
                self.outputs.append(None)
                continue
            if number in state:
                home = self.homes[block.inputs[state[number]]]
                index, dims = home.group, home.dims
            else:
                index, dims = self.new_leaf(self.values[atom].shape, 1, "output")
            self.want(atom, index, dims, 1)
            self.outputs.append((index, dims))

    def body(self, block: Block, trips: int) -> None:
        self.linear |= _linear_ops(block, self.rules, self.values, self.zero_carries)
        for op in block.ops:
            self.ops[op.index] = op
            if needs_outside(op):
                self.clock += 1
                self.positions[op.index] = self.clock
                self.depth.update(dict.fromkeys(op.results, self.clock))
                self.member(op, _opaque(op, self.values), 0, (), trips)
            elif op.name == "scan":
                self.scan(op, trips)
            elif op.name == "while":
                self.while_loop(op, trips)
            elif op.name == "cond":
                self.cond(op, trips)
            else:
                self.clock += 1
                self.positions[op.index] = self.clock
                self.straight(op, trips)
            for value in op.results:
                self.defined[value] = self.positions[op.index]

    def scan(self, op: Op, trips: int) -> None:
        (body,) = op.bodies
        consts, carry = op.params["num_consts"], op.params["num_carry"]
        sums = self.accumulators(op)
        inner = trips * max(1, int(op.params["length"]))
        self.clock += 1
        start = self.clock
        for i, (atom, value) in enumerate(zip(op.operands, body.inputs, strict=True)):
            kind = "const" if i < consts else "carry" if i < consts + carry else "xs"
            index = self.port(atom, value, trips, kind, times=inner, stacked=kind == "xs")
            if value in sums and index:
                self.drafts[index].kind = "linear"
        self.body(body, inner)
        self.clock += 1
        self.positions[op.index] = self.clock
        for i, (atom, result) in enumerate(zip(body.outputs, op.results, strict=True)):
            if i < carry:
                home = self.homes[body.inputs[consts + i]]
                self.want(atom, home.group, home.dims, inner)
                self.adopt(result, home.group, home.dims)
            else:
                port, dims = self.new_leaf(self.values[result].shape[1:], inner, "ys")
                self.want(atom, port, dims, inner)
                self.adopt(result, port, ((), *dims))
        self.depth.update(dict.fromkeys(op.results, start))

    def accumulators(self, op: Op) -> set[int]:
        """The carries of a scan that start at zero and are only added to: they may hold partial sums."""
        (body,) = op.bodies
        consts, carry = op.params["num_consts"], op.params["num_carry"]
        uses = _uses(body)
        producer = {value: inner for inner in body.ops for value in inner.results}
        found = set()
        for i in range(carry):
            start, value, end = op.operands[consts + i], body.inputs[consts + i], body.outputs[i]
            if isinstance(start, Lit) or isinstance(end, Lit) or end not in producer or not self.is_zero(start):
                continue
            adds = producer[end]
            once = uses[value] == 1 and uses[end] == 1
            if once and adds.name in ("add", "add_any") and value in adds.operands:
                found.add(value)
        self.zero_carries |= found
        return found

    def is_zero(self, value: int) -> bool:
        """Whether a value is a broadcast zero, which is a partial sum over any axes."""
        if value not in self.lazy:
            return False
        op = self.ops[self.lazy[value][0]]
        source = op.operands[0] if op.operands else None
        return op.name == "broadcast_in_dim" and isinstance(source, Lit) and not np.any(source.value)

    def while_loop(self, op: Op, trips: int) -> None:
        cond, body = op.bodies
        cond_n, body_n = op.params["cond_nconsts"], op.params["body_nconsts"]
        self.clock += 1
        start = self.clock
        for atom, value in zip(op.operands[:cond_n], cond.inputs[:cond_n], strict=True):
            self.port(atom, value, trips, "const")
        for atom, value in zip(op.operands[cond_n : cond_n + body_n], body.inputs[:body_n], strict=True):
            self.port(atom, value, trips, "const")
        init = op.operands[cond_n + body_n :]
        for atom, value, seen in zip(init, body.inputs[body_n:], cond.inputs[cond_n:], strict=True):
            port = self.port(atom, value, trips, "carry")
            self.adopt(seen, port, self.homes[value].dims)
            self.defined[seen] = self.clock
            self.depth[seen] = self.clock
        self.body(cond, trips)
        self.want(cond.outputs[0], 0, (), trips)
        self.body(body, trips)
        self.clock += 1
        self.positions[op.index] = self.clock
        for atom, value, result in zip(body.outputs, body.inputs[body_n:], op.results, strict=True):
            home = self.homes[value]
            self.want(atom, home.group, home.dims, trips)
            self.adopt(result, home.group, home.dims)
        self.depth.update(dict.fromkeys(op.results, start))

    def cond(self, op: Op, trips: int) -> None:
        self.clock += 1
        start = self.clock
        self.want(op.operands[0], 0, (), trips)
        for i, atom in enumerate(op.operands[1:]):
            first = op.bodies[0].inputs[i]
            port = self.port(atom, first, trips, "operand")
            for branch in op.bodies[1:]:
                self.adopt(branch.inputs[i], port, self.homes[first].dims)
                self.defined[branch.inputs[i]] = self.clock
                self.depth[branch.inputs[i]] = self.clock
        for branch in op.bodies:
            self.body(branch, trips)
        self.clock += 1
        self.positions[op.index] = self.clock
        for i, result in enumerate(op.results):
            port, dims = self.new_leaf(self.values[result].shape, trips, "result")
            self.adopt(result, port, dims)
            for branch in op.bodies:
                self.want(branch.outputs[i], port, dims, trips)
        self.depth.update(dict.fromkeys(op.results, start))

    # -- leaves and ports -----------------------------------------------------------------------------------------

    def new_leaf(self, shape: tuple[int, ...], trips: int, name: str) -> tuple[int, Dims]:
        """A group for a tensor of this shape, and the tensor's dims in it. Scalars belong to the fixed group."""
        factors = [Factor(size, "parallel") for size in shape if size > 1]
        if not factors:
            return 0, ((),) * len(shape)
        draft = _Draft("leaf", factors, trips, name)
        draft.signature.append(("leaf", name, shape))
        self.drafts.append(draft)
        return len(self.drafts) - 1, _leaf_dims(shape)

    def leaf(self, value: int, trips: int, name: str) -> int:
        index, dims = self.new_leaf(self.values[value].shape, trips, name)
        self.adopt(value, index, dims)
        self.defined[value] = self.clock
        self.depth[value] = 0
        return index

    def port(self, atom: Atom, value: int, trips: int, name: str, *, times: int = 0, stacked: bool = False) -> int:
        """A leaf for `value`, an input of a nested body that runs `times` times, wanted from `atom` outside."""
        index = self.leaf(value, times or trips, name)
        self.depth[value] = self.clock
        dims = self.homes[value].dims
        self.want(atom, index, ((), *dims) if stacked else dims, trips)
        return index

    def adopt(self, value: int, index: int, dims: Dims) -> None:
        draft = self.drafts[index]
        rank = len(self.values[value].shape)
        if index == 0:
            dims = ((),) * rank
        self.homes[value] = Home(index, dims, draft.values)
        draft.values += 1

    def want(self, atom: Atom, index: int, dims: Dims, trips: int, op: int = -1, operand: int = -1) -> None:
        """Records a demand; on a lazy value, the demands on what it is made from."""
        if isinstance(atom, Lit):
            return
        if index == 0:
            dims = ((),) * len(self.values[atom].shape)
        if atom in self.lazy:
            number, result = self.lazy[atom]
            lazy = self.ops[number]
            rule = self.rules[lazy.key]
            given = pull(rule, dims, result)
            for k, source in enumerate(lazy.operands):
                if not isinstance(source, Lit):
                    inner = tuple(given.get(d[0], ()) if d else () for d in rule.operands[k])
                    self.want(source, index, inner, trips, op, operand)
            return
        draft = self.drafts[index]
        self.demands.append(Demand(atom, index, dims, draft.wants, self.clock, trips, op, operand))
        draft.wants += 1

    # -- straight-line operations ---------------------------------------------------------------------------------

    def straight(self, op: Op, trips: int) -> None:
        rule = self.rules[op.key]
        tensors = [a for a in op.operands if not isinstance(a, Lit)]
        depth = 1 + max((self.depth.get(a, 0) for a in tensors), default=0)
        self.depth.update(dict.fromkeys(op.results, depth))
        if op.name == "optimization_barrier":
            self.barrier(op)
        elif rule.source == "opaque" or not rule.factors:
            self.member(op, rule, 0, (), trips)
        elif self.becomes_lazy(op, rule, tensors):
            self.lazy.update({value: (op.index, i) for i, value in enumerate(op.results)})
        elif op.index in self.linear:
            self.drafts.append(_Draft("linear", list(rule.factors), trips, op.name))
            self.member(op, rule, len(self.drafts) - 1, tuple(range(len(rule.factors))), trips)
        elif _is_light(rule, op):
            self.light(op, rule, tensors, trips)
        else:
            self.drafts.append(_Draft("heavy", list(rule.factors), trips, op.name))
            self.member(op, rule, len(self.drafts) - 1, tuple(range(len(rule.factors))), trips)

    def barrier(self, op: Op) -> None:
        """Each result stays in its operand's home: a barrier moves nothing."""
        for atom, result in zip(op.operands, op.results, strict=True):
            if isinstance(atom, Lit):
                self.adopt(result, 0, ((),) * len(self.values[result].shape))
            elif atom in self.lazy:
                self.lazy[result] = self.lazy[atom]
            else:
                home = self.homes[atom]
                self.homes[result] = Home(home.group, home.dims, home.slot)
                if atom in self.followers:
                    self.followers[result] = self.followers[atom]

    def becomes_lazy(self, op: Op, rule: Rule, tensors: list[int]) -> bool:
        if len(op.results) != 1 or any(len(dim) > 1 for dims in (*rule.operands, *rule.results) for dim in dims):
            return False
        if is_lazy_source(op, self.values):
            return True
        return bool(tensors) and _is_light(rule, op) and all(a in self.lazy for a in tensors)

    def light(self, op: Op, rule: Rule, tensors: list[int], trips: int) -> None:
        every = {f for dims in rule.results for dim in dims for f in dim}
        best, main = -1, None
        for k, atom in enumerate(op.operands):
            if isinstance(atom, Lit) or atom in self.lazy or self.homes[atom].group == 0:
                continue
            mine = {f for dim in rule.operands[k] for f in dim}
            if every <= mine and self.depth[atom] > best:
                best, main = self.depth[atom], k
        if main is None:
            self.drafts.append(_Draft("light", list(rule.factors), trips, op.name))
            self.member(op, rule, len(self.drafts) - 1, tuple(range(len(rule.factors))), trips)
            return
        atom = op.operands[main]
        assert not isinstance(atom, Lit)
        home = self.homes[atom]
        index = home.group
        if self.drafts[index].kind in ("heavy", "linear") or self.drafts[index].trips != trips:
            index = self.follower(atom, trips)
            dims = self.follower_dims(atom)
        else:
            dims = home.dims
        of = {f[0]: g[0] for f, g in zip(rule.operands[main], dims, strict=True) if f and g}
        if len(of) != len(rule.factors):
            self.drafts.append(_Draft("light", list(rule.factors), trips, op.name))
            self.member(op, rule, len(self.drafts) - 1, tuple(range(len(rule.factors))), trips)
            return
        self.member(op, rule, index, tuple(of[f] for f in range(len(rule.factors))), trips)

    def follower(self, atom: int, trips: int) -> int:
        """The light group that hangs on a value of a heavy group."""
        if atom not in self.followers:
            shape = self.values[atom].shape
            self.drafts.append(_Draft("light", [Factor(s, "parallel") for s in shape if s > 1], trips, "follow"))
            self.followers[atom] = len(self.drafts) - 1
        return self.followers[atom]

    def follower_dims(self, atom: int) -> Dims:
        return _leaf_dims(self.values[atom].shape)

    def member(self, op: Op, rule: Rule, index: int, factors: tuple[int, ...], trips: int) -> None:
        """Makes an op a member of a group: its demands, the homes of its results, and the group's signature."""
        draft = self.drafts[index]

        def dims_of(dims: Dims) -> Dims:
            if index == 0:
                return ((),) * len(dims)
            return tuple(tuple(factors[f] for f in dim) for dim in dims)

        refs: list[Any] = []
        for k, atom in enumerate(op.operands):
            if isinstance(atom, Lit):
                refs.append("lit")
                continue
            dims = dims_of(rule.operands[k])
            home = self.homes.get(atom)
            if home is not None and home.group == index and home.dims == dims and draft.kind in ("light", "leaf"):
                refs.append(home.slot)
                continue
            refs.append(("want", draft.wants, dims, self.lazy_signature(atom)))
            self.want(atom, index, dims, trips, op.index, k)
        for k, value in enumerate(op.results):
            self.adopt(value, index, dims_of(rule.results[k]))
        draft.ops.append(op.index)
        draft.op_factors.append(factors)
        if index:
            draft.signature.append((op.key, tuple(refs), factors))
            if draft.name == "follow" or draft.kind == "light":
                draft.name = op.name if len(draft.ops) == 1 else draft.name

    def lazy_signature(self, atom: int) -> Any:
        if atom not in self.lazy:
            return None
        number, result = self.lazy[atom]
        op = self.ops[number]
        return (op.key, result, tuple("lit" if isinstance(a, Lit) else self.lazy_signature(a) for a in op.operands))

    # -- colours --------------------------------------------------------------------------------------------------

    def finish(self) -> Grouping:
        colors = self.colors()
        groups = tuple(
            Group(i, d.kind, tuple(d.factors), tuple(d.ops), tuple(d.op_factors), d.trips, colors[i], d.name)
            for i, d in enumerate(self.drafts)
        )
        classes: dict[str, list[int]] = {}
        for g in groups:
            classes.setdefault(g.color, []).append(g.index)
        return Grouping(
            groups, self.homes, self.lazy, tuple(self.demands), self.positions, self.defined, self.clock + 1,
            self.ops, {c: tuple(m) for c, m in classes.items()}, self.leaves, tuple(self.outputs),
        )  # fmt: skip

    def colors(self, rounds: int = 2) -> list[str]:
        digests: dict[Any, str] = {}

        def digest(thing: Any) -> str:
            if thing not in digests:
                digests[thing] = hashlib.blake2b(repr(thing).encode(), digest_size=10).hexdigest()
            return digests[thing]

        def part(item: Any) -> Any:
            return item if item[0] == "leaf" else (digest(item[0]), item[1], item[2])

        colors = [
            digest((d.kind, d.trips, tuple((f.size, f.kind) for f in d.factors), tuple(part(s) for s in d.signature)))
            for d in self.drafts
        ]
        for _ in range(rounds):
            arriving: list[list[Any]] = [[] for _ in self.drafts]
            leaving: list[list[Any]] = [[] for _ in self.drafts]
            for demand in self.demands:
                home = self.homes[demand.value]
                arriving[demand.group].append((demand.slot, colors[home.group], home.slot if home.group else 0))
                slot = demand.slot if demand.group else 0
                leaving[home.group].append((home.slot, colors[demand.group], slot, demand.dims))
            colors = [
                digest((own, tuple(a), tuple(sorted(b)))) if i else "fixed"
                for i, (own, a, b) in enumerate(zip(colors, arriving, leaving, strict=True))
            ]
        return colors


def _opaque(op: Op, values: Sequence[Value]) -> Rule:
    """The rule of an operation that takes and gives whole values."""
    operands = tuple(() if isinstance(a, Lit) else ((),) * len(values[a].shape) for a in op.operands)
    return Rule((), operands, tuple(((),) * len(values[v].shape) for v in op.results), "opaque")


def _leaf_dims(shape: tuple[int, ...]) -> Dims:
    out, count = [], 0
    for size in shape:
        out.append((count,) if size > 1 else ())
        count += size > 1
    return tuple(out)


def _is_light(rule: Rule, op: Op) -> bool:
    """Whether an operation only follows: every factor parallel, no dim of several factors, every factor in a result."""
    if any(f.kind != "parallel" for f in rule.factors) or (op.params.get("dimensions") and op.name == "reshape"):
        return False
    shown = {f for dims in rule.results for dim in dims for f in dim}
    single = all(len(dim) <= 1 for dims in (*rule.operands, *rule.results) for dim in dims)
    once = all(len(fs) == len(set(fs)) for fs in ([f for dim in dims for f in dim] for dims in rule.results))
    return single and once and len(shown) == len(rule.factors) and op.name not in _NEVER_LIGHT


# These are described by parallel factors alone but do real work.
_NEVER_LIGHT = frozenset({"gather", "scatter", "sort", "dynamic_update_slice", "dot_general", "conv_general_dilated"})


def _uses(block: Block) -> Counter[int]:
    """How often each value of a block is read, its outputs included."""
    atoms = [*(a for op in block.ops for a in op.operands), *block.outputs]
    return Counter(a for a in atoms if not isinstance(a, Lit))


def _linear_ops(block: Block, rules: Mapping[Any, Rule], values: Sequence[Value], accumulators: Set[int]) -> set[int]:
    """Additions, and the linear operations between, whose operands all come from operations that may leave sums."""
    producer: dict[int, Op] = {value: op for op in block.ops for value in op.results}
    uses = _uses(block)
    linear: set[int] = set()

    def chain(atom: Any) -> list[int] | None:
        """The linear unary ops between `atom` and an op that may leave a sum; None if there is no such op."""
        path: list[int] = []
        if not isinstance(atom, Lit) and atom in accumulators:
            return path
        while not isinstance(atom, Lit) and atom in producer:
            op = producer[atom]
            if op.index in linear:
                return path
            if op.bodies or op.key not in rules:
                return None
            if any(f.kind == "sum" for f in rules[op.key].factors):
                return path
            scaled = op.name in ("mul", "div") and isinstance(op.operands[1], Lit)
            if not (scaled or op.name in _LINEAR_UNARY) or uses[atom] != 1 or not _floating(values, op):
                return None
            path.append(op.index)
            atom = op.operands[0]
        return None

    for op in block.ops:
        if op.name not in _ADDITIONS or op.key not in rules or not rules[op.key].factors:
            continue
        shape = values[op.results[0]].shape
        if any(isinstance(a, Lit) or values[a].shape != shape for a in op.operands):
            continue
        found = [chain(a) for a in op.operands]
        if all(path is not None for path in found):
            linear.add(op.index)
            for path in found:
                linear.update(path or ())
    return linear


def _floating(values: Sequence[Value], op: Op) -> bool:
    kinds = [
        getattr(values[v].dtype, "kind", "O")
        for v in (*op.results, *(a for a in op.operands if not isinstance(a, Lit)))
    ]
    return all(kind in "fVc" for kind in kinds)
