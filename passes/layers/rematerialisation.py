"""Rematerialisation: the backward pass recomputes the forward values that are not saved.

The backward pass of a micro-batch reads values of its forward pass, which live from one to the other; with several
micro-batches in flight that is most of a stage's memory. Given the values to save, every other forward value that a
backward operation reads is made again by copies of forward operations. For each layer, the values that enter the copies
go through one `optimization_barrier`, without which XLA would merge the copies with the originals; the cotangent of the
first backward operation that needs them goes through it too, so that nothing is computed again before its time. Each
copy stands right before its first use. A copied random draw has the same key, so it draws the same numbers. Copies
that need no activation (masks, casts of parameters) pass no barrier: all stages may need them, and none may wait for
those of another.

    choice      saved                                                       computed again
    none        everything                                                  nothing
    selective   what crosses layers, and the results of convolutions,       elementwise operations, norms, softmax,
                loops, sorts, random draws, and products without batch      attention scores
                dims
    layer       what crosses layers                                         all of the forward pass

(Chen et al. 2016, sublinear memory; Korthikanti et al. 2022, section 5, for the selective choice. JAX calls the
saving of products without batch dims `dots_with_no_batch_dims_saveable`.)

A scan over layers is one operation forward and one backward, which reads what the forward scan stacked for it, one
slice an iteration. Instead, the forward scan stacks the carry that each iteration began with, and the body of the
backward scan first computes the forward body again, from that carry and from the same scanned inputs:

    forward   (c, x) -> c', r              becomes   (c, x) -> c', c
    backward  (g, r, ..) -> g', ..         becomes   (g, c, x, ..) -> r = forward(c, x); g', ..

So a layer is computed again right before its own backward pass, and no more than one layer's intermediates exist at a
time. The selective choice keeps stacking what it saves; nothing that only that needs is computed again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Op, Traced, walk
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import producers, reach, users, values_in
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, RewrittenStep, rename_op, replace_body, replace_op
from alpa_lite.passes.ir.ties import Tie, ties
from alpa_lite.passes.layers.recomputation import read_by_scans, repeat_in_backward
from alpa_lite.passes.layers.types import Layering

Choice = Literal["none", "selective", "layer"]


@dataclass(frozen=True)
class Remat:
    """The layers that are rematerialised, and the choice for them.

    Attributes:
      choice: the values of a layer that are recomputed, as in `rematerialisation`.
      first: (k, n): in the first k of n layers alone, whose activations wait longest for the backward pass; None: in
        all layers.
    """

    choice: Choice = "none"
    first: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.choice if self.first is None else "{} in the first {} of {} layers".format(self.choice, *self.first)

    @classmethod
    def parse(cls, text: str) -> Remat | None:
        """Returns the one that is written so; None if there is none."""
        found = re.fullmatch(r"(\w+)(?: in the first (\d+) of (\d+) layers)?", text)
        choice = next((c for c in get_args(Choice) if found and c == found[1]), None)
        if found is None or choice is None:
            return None
        return cls(choice, None if found[2] is None else (int(found[2]), int(found[3])))


NOTHING = Remat()
"""Nothing is computed again."""


def rematerialise(
    layers: Layering,
    remat: Mapping[int, Choice],
    *,
    kept: Collection[int] = (),
    stages: Mapping[int, int] | None = None,
) -> RewrittenStep:
    """Makes backward operations read saved values alone, of the layers that are computed again.

    Args:
      remat: the numbers of these layers, with their choices; there is one barrier for each. Those of their ops that
        need no activation can run on any stage: each has its own copies.
      kept: the forward ops, by index, whose results are saved in any case.
      stages: the stage of each op of the body, by index, which saves what others read of it; the backward ops of other
        stages than those of these layers stay as they are. None for one stage.

    Returns:
      The step. Copies are marked as backward operations in their name stacks, as `jax.checkpoint` marks its own.
      Forward operations whose results are no longer read are gone.
    """
    rewriter, ops, stages = Rewriter(layers.traced.graph), layers.body.ops, stages or {}
    layer_of = {index: number for number, layer in enumerate(layers.layers) for index in layer.ops}
    made = producers(op for op in ops if op.index in layers.forward and op.index not in layers.free_ops)
    saved = {v for v, op in made.items() if op.index in kept}
    saved |= {v for v, op in made.items() if remat.get(layer_of[op.index]) == "selective" and is_kept(op)}
    for op in ops:
        for maker in (made[v] for v in op.reads if v in made):
            apart = op.index in layers.forward and layer_of[op.index] != layer_of[maker.index]
            if apart or stages.get(op.index) != stages.get(maker.index):
                saved.update(set(maker.results).intersection(op.reads))
    again = {stages.get(index) for number in remat for index in layers.layers[number].ops}
    backward = [op.index for op in ops if op.index not in layers.forward and stages.get(op.index) in again]
    body = _Body(rewriter, layers, remat, backward, saved, stages).block()
    block = replace_op(layers.traced.graph.block, layers.scan_op, [replace_body(layers.scan_op, body)])
    return rewriter.step(layers.traced, block, layers.scan)


def is_kept(op: Op) -> bool:
    """Returns whether the selective choice keeps an op's results."""
    if op.name == "dot_general":
        (_, _), (batch, _) = op.params["dimension_numbers"]
        return not batch
    return op.name in primitives.KEPT or op.has_effects


class _Body:
    """The new body of one rewriting; arguments as those of `rematerialise`."""

    def __init__(
        self,
        rewriter: Rewriter,
        layers: Layering,
        again: Collection[int],
        backward: Collection[int],
        saved: Collection[int],
        stages: Mapping[int, int],
    ) -> None:
        self.rewriter, self.body, self.free, self.stages = rewriter, layers.body, layers.free_ops, stages
        self.backward, self.saved = frozenset(backward), frozenset(saved)
        self.inputs = frozenset(self.body.inputs)
        self.consts = frozenset(ScanView(layers.scan_op).inputs.consts)
        self.layer_of = {index: number for number in again for index in layers.layers[number].ops}
        self.made = producers(op for op in self.body.ops if op.index in self.layer_of)
        self.ties = ties(self.body.ops)
        self.entering: dict[int, set[int]] = {}
        self.after: dict[int, Mapping[int, int]] = {}
        self.copied: dict[tuple[int | None, int], Atom] = {}  # see `place`
        self.out: list[Op] = []

    def block(self) -> Block:
        """Returns the body with copies in it."""
        self.find_entering()
        for op in self.order_forward_first():
            if op.index not in self.backward:
                self.out.append(op)
                continue
            again = [v for v in self.needed_values(op) if self.is_recomputed(v)]
            for value in again:
                self.make(self.made[value], op)
            names: dict[int, Atom] = {v: self.copied[self.place(v, op)] for v in again}
            for value in again:  # the cotangent that went through the barrier with them
                after = self.after.get(self.layer_of[self.made[value].index], {})
                names.update((v, after[v]) for v in op.reads if v in after and v not in names and v not in self.made)
            self.copy_choice(op, names)
            self.out.append(rename_op(op, names))
        return Block(self.body.inputs, tuple(self.out), self.body.outputs)

    def order_forward_first(self) -> list[Op]:
        """The ops, those before all others that layers consist of or need: a barrier reads only what is made."""
        makers = producers(self.body.ops)
        layers = [op for op in self.body.ops if op.index in self.layer_of]
        first = reach(layers, lambda op: [makers[v] for v in op.reads if v in makers])
        return sorted(self.body.ops, key=lambda op: op not in first)

    def is_recomputed(self, value: int) -> bool:
        """Returns whether a value is made again for the backward pass."""
        return value in self.made and value not in self.saved and not self.made[value].has_effects

    def tie(self, op: Op) -> Tie | None:
        """The tie of an op whose maximum is saved but must be chosen again from recomputed operands; else None."""
        tie = self.ties.get(op.index)
        if tie is None or self.is_recomputed(tie.chain[0].results[0]):
            return None
        return tie if any(self.is_recomputed(v) for v in tie.operands) else None

    def needed_values(self, op: Op) -> list[int]:
        """Returns the values that an op reads, or the choice that is made again for it."""
        tie = self.tie(op)
        if tie is None:
            return list(op.reads)
        inner = {v for one in tie.chain for v in one.results}
        return list(dict.fromkeys(v for one in (op, *tie.chain) for v in one.reads if v not in inner))

    def copy_choice(self, op: Op, names: dict[int, Atom]) -> None:
        """Copies the choice that an op compares with, and adds the names of its results to `names`."""
        tie = self.tie(op)
        for one in tie.chain if tie is not None else ():
            copy = self.rewriter.copy(one, names, source=_jax.mark_rematerialised(one.source))
            names.update(zip(one.results, copy.results, strict=True))
            self.out.append(copy)

    def place(self, value: int, user: Op) -> tuple[int | None, int]:
        """Returns which copy of a value an op reads: of what is free that of its stage, else the only one."""
        free = self.made[value].index in self.free
        return self.stages.get(user.index, 0) if free else None, value

    def find_entering(self) -> None:
        """The values that enter the copies of each layer from outside, constants excepted."""

        def again(op: Op) -> list[Op]:
            return [self.made[v] for v in self.needed_values(op) if self.is_recomputed(v)]

        wanted = [made for op in self.body.ops if op.index in self.backward for made in again(op)]
        for op in reach(wanted, again):
            for value in () if op.index in self.free else self.needed_values(op):
                if not self.is_recomputed(value) and value not in self.consts:
                    self.entering.setdefault(self.layer_of[op.index], set()).add(value)

    def make(self, wanted: Op, user: Op) -> None:
        """Copies an op for another, after copies of the ops that it needs."""
        stack = [(wanted, user)]
        while stack:
            op, reader = stack[-1]
            if op.index not in self.free:
                reader = op
            needs = self.needed_values(op)
            again = [v for v in needs if self.is_recomputed(v)]
            missing = [(self.made[v], reader) for v in again if self.place(v, reader) not in self.copied]
            if missing:
                stack += missing
                continue
            stack.pop()
            if self.place(op.results[0], reader) in self.copied:
                continue
            after = {} if op.index in self.free else self.barrier(self.layer_of[op.index], user)
            names: dict[int, Atom] = {v: after[v] for v in needs if v in after}
            names.update((v, self.copied[self.place(v, reader)]) for v in again)
            self.copy_choice(op, names)
            copy = self.rewriter.copy(op, names, source=_jax.mark_rematerialised(op.source))
            self.copied.update((self.place(v, reader), x) for v, x in zip(op.results, copy.results, strict=True))
            self.out.append(copy)

    def barrier(self, layer: int, user: Op) -> Mapping[int, int]:
        """Returns the barrier of a layer, which stands before its first copy: what each value is called after it."""
        if layer not in self.after:
            cotangents = [v for v in user.reads if v not in self.made and v not in self.inputs]
            self.after[layer] = {}
            if held := list(dict.fromkeys([*sorted(self.entering.get(layer, ())), *cotangents])):
                op, self.after[layer] = self.rewriter.barrier(held, _jax.mark_rematerialised(user.source))
                self.out.append(op)
        return self.after[layer]


# -- within scans -----------------------------------------------------------------------------------------------------


def rematerialise_scans(traced: Traced, scan: int, choices: Mapping[int, Choice]) -> RewrittenStep:
    """Makes backward scans recompute the values that forward scans stacked for them.

    Args:
      choices: index of a forward scan in its body -> "layer" or "selective".

    Returns:
      The step; scans are the same operations as before (`RewrittenStep.origin`), with other operands and results.
    """
    outer = scan_op(traced, scan)
    body = outer.bodies[0]
    rewriter, ops = Rewriter(traced.graph), list(body.ops)
    for n, op in enumerate(body.ops):
        choice = choices.get(op.index, "none")
        stacks = find_dropped_residuals(op, body, choice)
        gone = {stack: atom for atom, stack in ScanView(ops[n]).ys if stack in stacks} if stacks else {}
        for m, reader in enumerate(body.ops):
            if not stacks.isdisjoint(reader.reads):
                view = ScanView(ops[n])
                first = _needed(view, gone, choice)
                ops[n], ops[m] = repeat_in_backward(rewriter, view, ScanView(ops[m]), gone, view.body.ops, first)
    made = replace_body(outer, Block(body.inputs, tuple(ops), body.outputs))
    return rewriter.step(traced, replace_op(traced.graph.block, outer, [made]), scan)


def find_dropped_residuals(op: Op, body: Block, choice: Choice) -> frozenset[int]:
    """The stacked results of a forward scan that backward scans alone read, and that a choice computes again."""
    if op.name != "scan" or choice == "none" or any(o.has_effects for o in walk(op.bodies[0])):
        return frozenset()
    view = ScanView(op)
    made = producers(o for o in view.body.ops if choice == "selective" and is_kept(o))
    read = read_by_scans(view, users(body.ops), body.outputs)
    return frozenset(stack for atom, stack in view.ys if stack in read and atom not in made)


def _needed(view: ScanView, gone: Mapping[int, Atom], choice: Choice) -> list[int]:
    """Returns the values of the body that the selective choice keeps, and that computing again begins with."""
    makers = producers(view.body.ops)
    begins = {v for v, op in makers.items() if choice == "selective" and is_kept(op)}
    reached = reach(values_in(gone.values()), lambda v: makers[v].reads if v in makers and v not in begins else ())
    return [value for value in reached if value in begins]
