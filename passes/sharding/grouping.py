"""Groups operations that share one decision, and ties identical groups.

Problem. A train step has tens of thousands of equations, but few real decisions: an elementwise operation follows the
operand that it transforms, and the layers of a model repeat. Choosing per equation would make the integer program grow
with both.

Grouping. Every value gets a *home*: a group, and for each of its dims the factors of that group. A group is one of

- leaf: an argument, a constant, or an input of a nested body (a *port*): its factors are its dims;
- heavy: one operation with its own rule (a matrix product, a reduction, a gather, what the user says of a value, ...);
- linear: an operation that a partial sum can travel through, or a carry or a stacked result of a scan that may hold
  one (`sharding.linear`), scalars (a loss) too, so that gradients and losses are reduced once, after the loop;
- light: elementwise operations, transpositions and the like that hang together. An operation joins the home of its
  *main* operand, the deepest operand that has all of its factors, so that group factors need no unification;
- the *fixed* group 0: other scalars, everything that no rule describes, and what cannot be inside a region (a user's
  own `shard_map`, ordered effects); it has one strategy, replication.

Iota, broadcasts to more elements, and what is computed from these alone are *lazy*: they cost nothing to repeat, so
each consumer makes its own block, and what is moved is the small source ("price a broadcast at its source's bytes").

A `Demand` is an edge: a group wants a value, with each dim sharded by the given factors of the group. Demands on a lazy
value are pulled back to the values that it is made from.

Tying. Groups of equal *colour* share one decision (`sharding.groups`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from alpa_lite.ir.graph import Atom, Block, Lit, Op, Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import flow, keys, primitives
from alpa_lite.passes.ir.folding import folded_step
from alpa_lite.passes.ir.loops import body_runs, ports
from alpa_lite.passes.ir.remembered import Memo, memoise_method
from alpa_lite.passes.local.effects import needs_outside
from alpa_lite.passes.sharding import groups
from alpa_lite.passes.sharding.groups import Demand, Digests, Dims, Draft, Form, Group, Grouping, GroupKind, Home
from alpa_lite.passes.sharding.linear import find_linear


def group(traced: Traced, rules: Mapping[Any, Rule], apart: Set[int] = frozenset()) -> Grouping:
    """Groups the operations of a traced step, or of the folded step in its place (`ir.folding`).

    Args:
      rules: `Op.key` -> the operation's rule.
      apart: stacked results of scans whose iterations run apart, so that these cannot be reduced after the scan.
    """
    short = folded_step(traced)
    builder = _Builder(short, rules, apart)
    builder.top(short)
    found = builder.finish()
    return found if short is traced or _is_regular(found) else group(replace(traced, folded_step=None), rules, apart)


def _is_regular(grouping: Grouping) -> bool:
    """Returns whether the groups of the layers around those that are left out are like the groups of these."""
    homes, groups = grouping.homes, grouping.groups
    for value, others in grouping.traced.copies.around.items():
        mine = [homes.get(v) for v in (value, *others)]
        kinds = {home and (home.dims, groups[home.group].color) for home in mine}
        if len(kinds) > 1 or (len({home.group for home in mine if home and home.group}) not in (0, 3)):
            return False
    return True


class _Builder:
    """Walks the graph once, in program order, and assigns homes."""

    def __init__(self, traced: Traced, rules: Mapping[Any, Rule], apart: Set[int]) -> None:
        self.traced, self.graph = traced, (graph := traced.graph)
        self.values = graph.values
        self.rules = rules
        self.drafts: list[Draft] = [Draft("fixed", [], 1, "fixed")]
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
        self.linear_ops, self.sum_holders = find_linear(graph.block, rules, graph.values, apart)
        self.digests = Digests()
        self.known = Memo()

    # -- blocks ---------------------------------------------------------------------------------------------------

    def top(self, traced: Traced) -> None:
        block = self.graph.block
        self.leaves = tuple(
            self.leaf(value, 1, traced.arguments[i].role if i < len(traced.arguments) else "constant")[0]
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
        for op in block.ops:
            self.ops[op.index] = op
            self.clock += 1
            depth = self.clock
            if self.known.get_or_make(("outside", op.key), lambda op=op: needs_outside(op)):
                self.fix(op, trips)
            elif op.name in primitives.CONTROL:
                self.region(op, trips)
            else:
                depth = self.place_op(op, trips)
            self.positions[op.index] = self.clock
            for value in op.results:
                self.defined[value], self.depth[value] = self.clock, depth

    def region(self, op: Op, trips: int) -> None:
        """Gives each value on the border of a scan, while or cond one home, inside and out."""
        border, inner = ports(op), trips * max(1, body_runs(op))
        if op.name == "cond":
            self.want(op.operands[0], 0, (), trips)
        for port in border:
            if port.operand is not None:
                index, dims = self.leaf(port.inputs[0], inner, port.role)
                self.want(port.operand, index, ((), *dims) if port.role == "xs" else dims, trips)
                for value in port.inputs[1:]:
                    self.adopt(value, index, dims)
        for body in op.bodies:
            self.body(body, inner)
            if op.name == "while" and body is op.bodies[0]:
                self.want(body.outputs[0], 0, (), trips)
        self.clock += 1
        for port in border:
            if port.result is None:
                continue
            stacked = port.role == "ys"
            if port.inputs:
                index, dims = self.homes[port.inputs[0]].group, self.homes[port.inputs[0]].dims
            else:
                shape = self.values[port.result].shape[stacked:]
                index, dims = self.new_leaf(shape, inner, port.role, port.result in self.sum_holders)
            for atom in port.outputs:
                self.want(atom, index, dims, inner)
            self.adopt(port.result, index, ((), *dims) if stacked else dims)

    # -- leaves and ports -----------------------------------------------------------------------------------------

    def new_leaf(self, shape: tuple[int, ...], trips: int, name: str, is_sum: bool = False) -> tuple[int, Dims]:
        """Returns a group for a tensor of this shape, and the tensor's dims in it.

        Scalars belong to the fixed group unless they may be partial sums.
        """
        factors, dims = groups.leaf_dims(shape)
        if not factors and not is_sum:
            return 0, dims
        draft = Draft("linear" if is_sum else "leaf", factors, trips, name)
        draft.signature.append(("leaf", name, shape))
        self.drafts.append(draft)
        return len(self.drafts) - 1, dims

    def leaf(self, value: int, trips: int, name: str) -> tuple[int, Dims]:
        """Gives an input of a block a group of its own; returns that, and its dims."""
        index, dims = self.new_leaf(self.values[value].shape, trips, name, value in self.sum_holders)
        self.adopt(value, index, dims, "leaf")
        return index, dims

    def adopt(self, value: int, index: int, dims: Dims, likeness: str = "") -> None:
        """Gives a value its home, and defines it here."""
        draft = self.drafts[index]
        dims = dims if index else ((),) * len(self.values[value].shape)
        self.homes[value] = Home(index, dims, draft.values, likeness or f"slot {draft.values}")
        self.defined[value] = self.depth[value] = self.clock
        draft.values += 1

    def want(
        self, atom: Atom, index: int, dims: Dims, trips: int, op: int = -1, operand: int = -1, likeness: str = ""
    ) -> None:
        """Records a demand; on a lazy value, the demands on its sources."""
        if isinstance(atom, Lit):
            return
        dims = dims if index else ((),) * len(self.values[atom].shape)
        if atom in self.lazy:
            number, result = self.lazy[atom]
            lazy = self.ops[number]
            rule = self.rules[lazy.key]
            given = {own[0]: wanted for own, wanted in zip(rule.results[result], dims, strict=True) if own}
            for k, source in enumerate(lazy.operands):
                if not isinstance(source, Lit):
                    inner = tuple(given.get(d[0], ()) if d else () for d in rule.operands[k])
                    self.want(source, index, inner, trips, op, operand, f"{likeness} {k}" if likeness else "")
            return
        draft = self.drafts[index]
        likeness = likeness or f"slot {draft.wants}"
        self.demands.append(Demand(atom, index, dims, self.clock, trips, op, operand, likeness))
        draft.wants += 1

    # -- straight-line operations ---------------------------------------------------------------------------------

    def place_op(self, op: Op, trips: int) -> int:
        """Places an operation without a region; returns its depth."""
        form = self.known.get_or_make(("form", op.key), lambda: groups.form_of(op, self.rules[op.key], self.values))
        rule, lazy = form.rule, form.lazy == "as operands" and all(atom in self.lazy for atom in op.reads)
        if op.name == "optimization_barrier":
            self.barrier(op)
        elif rule.source == "opaque" or not (rule.factors or op.index in self.linear_ops or flow.makes_zeros(op)):
            self.fix(op, trips)
        elif lazy or form.lazy == "always":
            self.lazy.update({value: (op.index, i) for i, value in enumerate(op.results)})
        elif op.index in self.linear_ops:
            self.start_group("linear", op, form, trips)
        elif form.is_light:
            self.place_light(op, form, trips)
        else:
            self.start_group("heavy", op, form, trips)
        return 1 + max([self.depth.get(atom, 0) for atom in op.reads], default=0)

    def barrier(self, op: Op) -> None:
        """Each result stays in its operand's home: a barrier moves nothing."""
        for atom, result in zip(op.operands, op.results, strict=True):
            if isinstance(atom, Lit):
                self.adopt(result, 0, ())
            elif atom in self.lazy:
                self.lazy[result] = self.lazy[atom]
            else:
                home = self.homes[atom]
                self.homes[result] = home
                if atom in self.followers:
                    self.followers[result] = self.followers[atom]

    def start_group(self, kind: GroupKind, op: Op, form: Form, trips: int) -> None:
        """Makes an operation the first member of a group, whose factors are its own."""
        factors = form.rule.factors
        self.drafts.append(Draft(kind, list(factors), trips, op.name))
        self.member(op, form, len(self.drafts) - 1, tuple(range(len(factors))), trips)

    def place_light(self, op: Op, form: Form, trips: int) -> None:
        """Makes an operation follow its main operand, in the group of that or in one that hangs on it."""
        whole = [(k, a) for k in form.whole_operands if isinstance(a := op.operands[k], int) and a not in self.lazy]
        whole = [(k, atom) for k, atom in whole if self.homes[atom].group]
        if not whole:
            self.start_group("light", op, form, trips)
            return
        main, atom = max(whole, key=lambda one: self.depth[one[1]])
        home = self.homes[atom]
        index, dims = home.group, home.dims
        if self.drafts[index].kind in ("heavy", "linear") or self.drafts[index].trips != trips:
            factors, dims = groups.leaf_dims(self.values[atom].shape)
            if atom not in self.followers:  # the light group that hangs on a value of a heavy group
                self.followers[atom] = len(self.drafts)
                self.drafts.append(Draft("light", factors, trips, "follow"))
            index = self.followers[atom]
        factors = self.known.get_or_make(("followed", op.key, main, dims), lambda: form.followed_factors(main, dims))
        if factors is None:
            self.start_group("light", op, form, trips)
        else:
            self.member(op, form, index, factors, trips)

    def fix(self, op: Op, trips: int) -> None:
        """Makes an op a member of the fixed group: it takes and gives whole values."""
        for k, atom in enumerate(op.operands):
            self.want(atom, 0, (), trips, op.index, k)
        for value in op.results:
            self.adopt(value, 0, ())
        self.drafts[0].ops.append(op.index)
        self.drafts[0].op_factors.append(())

    def member(self, op: Op, form: Form, index: int, factors: tuple[int, ...], trips: int) -> None:
        """Makes an op a member of a group: its demands, the homes of its results, and the group's signature."""
        draft = self.drafts[index]
        operands, results = self.known.get_or_make(("placed", op.key, factors), lambda: form.placed_dims(factors))
        refs: list[Any] = []
        likes: list[Any] = []
        wanted: list[int] = []
        for k, (atom, dims) in enumerate(zip(op.operands, operands, strict=True)):
            if isinstance(atom, Lit):
                refs.append("lit")
                likes.append("lit")
                continue
            home = self.homes.get(atom) if draft.kind in ("light", "leaf") else None
            if home is not None and home.group == index and home.dims == dims:
                refs.append(home.slot)
                likes.append(home.likeness)
                continue
            lazy = self.lazy_signature(atom)
            refs.append(("want", draft.wants + len(wanted), dims, lazy))
            likes.append(("want", dims, lazy))
            wanted.append(k)
        likeness = self.digests[form.key, tuple(likes), factors]
        for k in wanted:
            place = "" if op.name in primitives.JOINING else f" {k}"
            self.want(op.operands[k], index, operands[k], trips, op.index, k, likeness + place)
        for k, value in enumerate(op.results):
            self.adopt(value, index, results[k], f"{likeness} {k}")
        draft.ops.append(op.index)
        draft.op_factors.append(factors)
        draft.signature.append((form.key, tuple(refs), factors))
        if len(draft.ops) == 1 and draft.kind == "light":
            draft.name = op.name

    @memoise_method
    def lazy_signature(self, atom: int) -> Any:
        """Returns the signature of a lazy value's computation; None for a value that is not lazy."""
        if atom not in self.lazy:
            return None
        number, result = self.lazy[atom]
        op = self.ops[number]
        parts = tuple("lit" if isinstance(a, Lit) else self.lazy_signature(a) for a in op.operands)
        return keys.key_without_position(op, self.values.__getitem__), result, parts

    # -- colours --------------------------------------------------------------------------------------------------

    def finish(self) -> Grouping:
        """Returns the groups, those of equal colour tied."""
        colors = groups.colors_of(self.drafts, self.demands, self.homes)
        copies, firsts = self.traced.copies, dict[int, int]()
        for value, home in self.homes.items():
            firsts.setdefault(home.group, value)
        counts = {i: copies.count_values(value) for i, value in firsts.items() if i} if copies is not None else {}
        found = tuple(
            Group(
                i, d.kind, tuple(d.factors), tuple(d.ops), tuple(d.op_factors), d.trips, colors[i], d.name,
                counts.get(i, 1),
            )
            for i, d in enumerate(self.drafts)
        )  # fmt: skip
        classes: dict[str, list[int]] = {}
        for g in found:
            classes.setdefault(g.color, []).append(g.index)
        return Grouping(
            found, self.homes, self.lazy, tuple(self.demands), self.positions, self.defined, self.clock + 1,
            self.ops, {c: tuple(m) for c, m in classes.items()}, self.leaves, tuple(self.outputs), self.traced, firsts,
        )  # fmt: skip
