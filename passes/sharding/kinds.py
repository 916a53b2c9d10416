"""Roles of the values of a step: parameters, gradients, optimizer state, and the rest, which are activations.

The roles of arguments (`graph.Argument`) identify state. *Parameters* are the state around which a derivative is
taken: JAX marks the operations of a differentiated function in their name stacks (`_jax.derivative`), and state that
such an operation reads, directly or through others, is a parameter. New state is a border: reads of it count for the
state that it replaces, so that the moments of one network are not parameters where another network's loss reads the
first one's new weights. State that only new state is made of (moments, counters, averages) belongs to the optimizer.
Where a step has no marks, state that influences a result that is not state (the loss) is a parameter, and if there is
no such result, all state of floats is.

Gradients that only the update reads, and parameters, may be communicated while a device computes (`OverlapCandidates`).
Where that hides (`passes.lowering.overlap`), the seconds T of a step are no sum over choices. With compute C, hideable
communication H and other communication W,

    T  >=  max(C + W, H + W)  >=  C + W + theta (H - C)    for every theta between 0 and 1,

so a good plan minimises C + W + theta H for some theta: 1 where links are busier than devices, small where they are
not. Each program is therefore solved at full prices and with the hideable communication at `SHARE` of its price, and
plans are compared by T itself, that of two streams.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Lit, Op, Traced, walk
from alpa_lite.ir.strategy import StrategyGraph
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import users, values_in
from alpa_lite.passes.ir.loops import Carry, ScanView, ports
from alpa_lite.passes.ir.remembered import memoise_by_identity
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.space import Space

KINDS = ("params", "gathered", "gradients", "optimizer", "frozen", "activations")
"""Every kind of memory. "gathered" are copies of parameters for the operations that read them: gathered from their
shards, cast, or cut out of stacked ones; "frozen" are arguments that no step changes."""

_COPIES = primitives.LINEAR_CHAIN | {"dynamic_slice", "slice"}
"""Operations whose result is the same weights in another form. A broadcast is none: it may be as large as the batch."""


@memoise_by_identity
def state_kinds(traced: Traced) -> Mapping[int, str]:
    """Argument number -> "params" or "optimizer", for state arguments."""
    block, values = traced.graph.block, traced.graph.values
    made, inputs = dict(traced.state), set(block.inputs)
    replaced: dict[int, list[int]] = {}
    for out, argument in made.items():
        atom = block.outputs[out]
        if isinstance(atom, int) and atom not in inputs:
            replaced.setdefault(atom, []).append(argument)
    needed: set[int] = set()
    if any(map(_is_marked, block.ops)):
        _follow(block.ops, needed, replaced)
    else:
        results = (a for i, a in enumerate(block.outputs) if i not in made and not isinstance(a, Lit))
        needed = {a for a in results if jnp.issubdtype(values[a].dtype, jnp.inexact)}
        if needed:
            _follow(block.ops, needed, {})
        else:
            needed = set(block.inputs)
    found = {argument for value, some in replaced.items() if value in needed for argument in some}
    return {
        i: "params" if (v in needed or i in found) and jnp.issubdtype(values[v].dtype, jnp.inexact) else "optimizer"
        for i, v in ((i, block.inputs[i]) for i in made.values())
    }


def parameters(traced: Traced) -> set[int]:
    """Returns the parameters of a step, frozen ones too, by value number."""
    kinds, inputs = state_kinds(traced), traced.graph.block.inputs
    return {inputs[i] for i, a in enumerate(traced.arguments) if kinds.get(i) == "params" or a.role == "frozen"}


@memoise_by_identity
def parameter_of(traced: Traced) -> Mapping[int, int]:
    """Value -> of which parameter it is another form, parameters included; as of `origins`."""
    return origins(traced.graph.block, parameters(traced))


@memoise_by_identity
def forms(traced: Traced) -> frozenset[int]:
    """Returns values that are some parameter in another form: those of `parameter_of` without the parameters."""
    return frozenset(parameter_of(traced).keys() - parameters(traced))


def _is_marked(op: Op) -> bool:
    """Returns whether an operation, or one within its bodies, belongs to a differentiated function."""
    return any(_jax.derivative(o.source) for body in op.bodies for o in walk(body)) or bool(_jax.derivative(op.source))


def _follow(ops: Iterable[Op], needed: set[int], borders: Mapping[int, object]) -> None:
    """Adds to `needed` the inputs of its makers and of marked operations; makers of a border are left out.

    A scan that makes a border does whole steps: what it carries is a border within it.
    """
    for op in reversed(list(ops)):
        is_border, is_marked = any(v in borders for v in op.results), _is_marked(op)
        if any(v in needed and v not in borders for v in op.results) or (is_marked and not is_border):
            needed.update(op.reads)
        elif is_marked and op.name == "scan":
            view, within = ScanView(op), set[int]()
            new = [*view.outputs.carry, *(atom for atom, result in view.ys if result in borders)]
            _follow(view.body.ops, within, dict.fromkeys(values_in(new)))
            within |= {one.input for one in view.carries if isinstance(one.output, int) and one.output in within}
            pairs = zip(op.operands, view.body.inputs, strict=True)
            needed.update(atom for atom, own in pairs if own in within and isinstance(atom, int))


def update_groups(traced: Traced, grouping: Grouping, outputs: Collection[int] | None = None) -> set[int]:
    """Returns the groups that compute new state, or hold it where it does not change; of some outputs, or of all."""
    numbers = [number for number, _ in traced.state if outputs is None or number in outputs]
    atoms = (traced.graph.block.outputs[number] for number in numbers)
    return {grouping.homes[a].group for a in atoms if not isinstance(a, Lit) and a in grouping.homes} - {0}


def value_kinds(traced: Traced, grouping: Grouping) -> dict[int, str]:
    """Value -> its kind where it is made; all others are activations.

    Gradients are the values of a parameter's shape that the groups which compute new state want or make, and that are
    not made of state by operations outside of the derivative. Of what such groups make, new state is of the kind of
    the old, and everything else belongs to the optimizer.
    """
    block, values = traced.graph.block, traced.graph.values
    inputs = {v: i for i, v in enumerate(block.inputs)}
    kinds = state_kinds(traced)
    frozen = {i: "frozen" for i, argument in enumerate(traced.arguments) if argument.role == "frozen"}
    own = {block.inputs[i]: kind for i, kind in (frozen | dict(kinds)).items()}
    own = dict.fromkeys(forms(traced), "gathered") | own
    shapes = {values[v].shape for v, i in inputs.items() if kinds.get(i) == "params"}
    updates = update_groups(traced, grouping)
    made = {v for v, home in grouping.homes.items() if home.group in updates} - inputs.keys()
    wanted = {d.value for d in grouping.demands if d.group in updates} - inputs.keys()
    updated = _updated(traced, kinds)
    for value in sorted(made | wanted):
        if values[value].shape in shapes:
            own.setdefault(value, "optimizer" if value in updated else "gradients")
    atoms = ((block.outputs[out], argument) for out, argument in traced.state)
    own |= (new := {atom: kinds[argument] for atom, argument in atoms if isinstance(atom, int) and atom not in inputs})
    for one in _carried(block):  # by a scan over steps
        if one.end in new:
            own |= dict.fromkeys(values_in((one.input, one.output)), new[one.end])
    return own


def _carried(block: Block) -> Iterator[Carry]:
    """Yields values that the scans of a block carry."""
    for op in block.ops:
        if op.name == "scan":
            yield from ScanView(op).carries


def copy_kinds(traced: Traced, own: Mapping[int, str]) -> dict[int, str]:
    """Value -> the kind of copies of it in another layout, given `value_kinds`."""
    inputs = {one.input for one in _carried(traced.graph.block)}.union(traced.graph.block.inputs)
    return {v: "gathered" if v in inputs and kind in ("params", "frozen") else kind for v, kind in own.items()}


def origins(block: Block, start: Iterable[int]) -> dict[int, int]:
    """Value -> of which of some weights it is another form (cast, reshaped, cut out of a stack), those included."""
    found = {value: value for value in start}

    def visit(block: Block) -> None:
        for op in block.ops:
            pairs: Iterable[tuple[Atom, int]] = ()
            if op.name in ("scan", "cond"):
                pairs = [(p.operand, v) for p in ports(op) if p.operand is not None and not p.outputs for v in p.inputs]
            elif op.name == "optimization_barrier":  # one of rematerialisation holds all that a layer reads
                pairs = zip(op.operands, op.results, strict=True)
            elif op.name in _COPIES and len(op.results) == 1:
                pairs = [(op.operands[0], op.results[0])]
            found.update((new, found[old]) for old, new in pairs if isinstance(old, int) and old in found)
            for body in op.bodies if op.name in ("scan", "cond") else ():
                visit(body)

    visit(block)
    return found


def find_regathered(traced: Traced, grouping: Grouping) -> frozenset[int]:
    """Values that late uses may gather again: arguments, and parameters cast in blocks or cut out for an iteration."""
    homes, groups = grouping.homes, grouping.groups
    own = {v for v in forms(traced) if v in homes and groups[homes[v].group].kind == "leaf"}
    leaves = set(grouping.leaves)
    return frozenset(own | {v for v in traced.graph.block.inputs if homes[v].group in leaves})


def _updated(traced: Traced, kinds: Mapping[int, str]) -> set[int]:
    """Returns values that operations outside of the derivative make of state; none where no operation is marked."""
    block = traced.graph.block
    if not any(map(_is_marked, block.ops)):
        return set(values_in(block.outputs[out] for out, _ in traced.state)) - set(block.inputs)
    found = {block.inputs[i] for i in kinds}
    for op in block.ops:
        if not _is_marked(op) and not found.isdisjoint(op.reads):
            found.update(op.results)
    return found - set(block.inputs)


SHARE = 0.1
"""The share of its price at which hideable communication enters the program that counts on hiding it."""

_FORMS = primitives.LINEAR_CHAIN | primitives.ADDITIONS | {"concatenate", "stack", "pad", "dynamic_update_slice"}


class OverlapCandidates:
    """The values of a step that may be communicated while a device computes.

    Args:
      hides: the kinds of collectives that the compiler runs concurrently with computing.
    """

    def __init__(self, traced: Traced, hides: frozenset[str]) -> None:
        self._sums, self._gathers = not hides.isdisjoint(("all_reduce", "reduce_scatter")), "all_gather" in hides
        self._weights = parameter_of(traced).keys()
        self._reverse: set[int] = set()  # values that a reverse pass makes
        self._marked: set[int] = set()  # operations of derivatives
        self._readers = users(walk(traced.graph.block))
        self._handed: dict[int, list[int]] = {}  # what a value becomes where a body or a loop takes it; -1: unknown
        self._waiting: dict[int, bool] = {}
        self._enter(traced.graph.block, False, False)

    def is_weight(self, value: int) -> bool:
        """Returns whether a value is a parameter, or one in another form, and gathers may hide."""
        return self._gathers and value in self._weights

    def is_gradient(self, value: int) -> bool:
        """Returns whether a reverse pass made a value that only the update reads, and sums may hide."""
        return self._sums and value in self._reverse and self._waits(value)

    def discount_hideable(self, space: Space) -> StrategyGraph:
        """Returns the program of a mesh with hideable transfers at `SHARE` of their price."""
        transfers = (
            replace(transfer, cost=SHARE * transfer.cost)
            if self.is_weight(move.value) or self.is_gradient(move.value)
            else transfer
            for move, transfer in zip(space.moves, space.program.transfers, strict=True)
        )
        return replace(space.program, transfers=tuple(transfers))

    def _enter(self, block: Block, reverse: bool, marked: bool) -> None:
        """Notes the operations of a block; those of a body belong to the pass that its loop belongs to."""
        for op in block.ops:
            backward = reverse or _jax.is_reverse(op.source)
            inside = marked or _jax.derivative(op.source) is not None
            self._reverse.update(op.results if backward else ())
            self._marked.update([op.index] if inside else ())
            pairs = [(atom, -1) for body in op.bodies for atom in body.outputs]
            if op.name == "scan":
                view = ScanView(op)
                pairs = [*view.ys, *((one.output, later) for one in view.carries for later in (one.end, one.input))]
                pairs += zip(op.operands, view.body.inputs, strict=True)
            for atom, handed in pairs:
                if not isinstance(atom, Lit):
                    self._handed.setdefault(atom, []).append(handed)
            for body in op.bodies:
                self._enter(body, backward, inside)

    def _waits(self, value: int) -> bool:
        """Returns whether no operation of a derivative computes with a value, or with another form or a sum of it."""
        if value not in self._waiting:
            self._waiting[value] = False  # what a loop adds to is complete behind it
            self._waiting[value] = all(
                op.index not in self._marked or (op.name in _FORMS and all(map(self._waits, op.results)))
                for op in self._readers.get(value, ())
                if op.name != "scan"
            ) and all(handed >= 0 and self._waits(handed) for handed in self._handed.get(value, ()))
        return self._waiting[value]
