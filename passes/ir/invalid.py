"""Where an invalid value (nan, inf) comes from: a graph evaluated one operation at a time.

An operation *makes* an invalid value if a result has one and no operand has. Many do and hurt nobody, such as what
`jnp.where` throws away afterwards. So evaluation only notes which values are invalid; then the way is walked back from
an invalid output: from each operation to an operand that is invalid, until there is none. Loops and branches are
followed inside: a scan iteration by iteration, up to the first one that returns an invalid value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.ir.graph import Block, Graph, Op
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.ir.loops import ScanView, WhileView

InvalidPredicate = Callable[[Any], bool]
"""Whether an array holds an invalid value."""


@dataclass(frozen=True)
class Origin:
    """Where an invalid value comes from.

    Attributes:
      op: what made it; None if it was given.
      argument: of the graph, by number, if it was given; else -1.
      output: of the graph, by number, that it reaches.
      iterations: of the loops around the operation, the outermost first.
    """

    op: Op | None
    argument: int
    output: int
    iterations: tuple[int, ...] = ()


def origin(graph: Graph, leaves: Sequence[Any], invalid: InvalidPredicate) -> Origin | None:
    """Returns where the first invalid output of a graph comes from; None if all are valid.

    Args:
      leaves: one array for each argument.
      invalid: tells arrays that hold an invalid value.
    """
    return _in_block(graph.block, [*leaves, *graph.constants], invalid)


def _in_block(block: Block, inputs: Sequence[Any], invalid: InvalidPredicate) -> Origin | None:
    """Returns the origin of a block's first invalid output; None if all are valid.

    The origin's argument is an input of the block, its output one of the block.
    """
    bad = {value for value, array in zip(block.inputs, inputs, strict=True) if invalid(array)}
    origins: dict[int, Origin] = {}

    def bind(op: Op, *operands: Any) -> list[Any]:
        results = evaluation.bind(op, operands)
        made = [value for value, result in zip(op.results, results, strict=True) if invalid(result)]
        if made:
            given = next((atom for atom in op.reads if atom in bad), None)
            known = origins.get(given) if given is not None else Origin(op, -1, -1)
            for iterations, inner, values in _runs(op, operands) if given is None else ():  # the op, or one within it
                if found := _in_block(inner, values, invalid):
                    known = Origin(found.op or op, -1, -1, (*iterations, *found.iterations) if found.op else ())
                    break
            number = block.inputs.index(given) if given in block.inputs else -1  # -1 where `known` says more
            origins.update(dict.fromkeys(made, known or Origin(None, number, -1)))
            bad.update(made)
        return results

    evaluation.evaluate_block(block, inputs, own={op.index: functools.partial(bind, op) for op in block.ops})
    for number, atom in enumerate(block.outputs):
        if isinstance(atom, int) and atom in bad:
            known = origins.get(atom) or Origin(None, block.inputs.index(atom), -1)
            return Origin(known.op, known.argument, number, known.iterations)
    return None


def _runs(op: Op, operands: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], Block, list[Any]]]:
    """Yields the runs of the body of a loop, or of the branch that is taken: number of the iteration, block, inputs."""
    if op.name == "cond":
        yield (), op.bodies[min(max(int(operands[0]), 0), len(op.bodies) - 1)], list(operands[1:])
    elif op.name == "scan":
        view = ScanView(op)
        consts, carry, xs = view.split_operands(operands)
        order = reversed(range(view.length)) if op.params["reverse"] else range(view.length)
        for number, i in enumerate(order):
            inputs = [*consts, *carry, *(x[i] for x in xs)]
            yield (number,), view.body, inputs
            carry = view.split_results(evaluation.evaluate_block(view.body, inputs)).carry
    elif op.name == "while":
        condition, body = op.bodies
        cond_consts, body_consts, carry = WhileView(op).split_operands(operands)
        for number in itertools.count():
            if not evaluation.evaluate_block(condition, [*cond_consts, *carry])[0]:
                return
            yield (number,), body, [*body_consts, *carry]
            carry = tuple(evaluation.evaluate_block(body, [*body_consts, *carry]))
