"""The operations that JAX has for cuDNN's attention: batch and heads are parallel, lengths and widths are whole.

Operands are query, key, value, bias, the lengths of queries and of keys, offsets and page tables; an operand that is
not used has no element. Forward: the result [b, t, n, d] ([b, n, t, d] in the other layout) and, for the backward pass,
the statistics of the softmax [b, n, t]. Backward: these, the result and its gradient come after the page tables, and
the results are the gradients of query, key, value and, if it has one, bias. Sequences that are packed into one row, and
pages, are not described.

Source: `jax/_src/cudnn/fused_attention_stablehlo.py`, JAX 0.10.2 and 0.12.0.
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.ir import notation
from alpa_lite.ir.notation import Notation, Reduction, Tensor
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.factors.base import Call, make_opaque_rule, shape

_ROWS: tuple[Tensor, Tensor] = ((("b",), ("t",), ("k", "g"), ("d",)), (("b",), ("k", "g"), ("t",), ("d",)))
_KEYS: tuple[Tensor, Tensor] = ((("b",), ("s",), ("k",), ("d",)), (("b",), ("k",), ("s",), ("d",)))
_SCORES: Tensor = (("b",), ("k", "g"), ("t",), ("s",))
_STATISTICS: Tensor = (("b",), ("k", "g"), ("t",))
_LENGTHS: Tensor = (("b",),)
_UNUSED: Tensor = ((),)
_SHARED = 10  # operands up to the page tables


def cudnn(call: Call) -> Rule:
    """Returns the rule of the forward or of the backward operation."""
    sizes, results = [shape(aval) for aval in call.operands], [shape(aval) for aval in call.results]
    is_used = [0 not in size for size in sizes]
    backward = len(results) >= 3
    if any(is_used[6:_SHARED]) or len(sizes) != _SHARED + (3 if backward else 0):
        return make_opaque_rule(call, f"{call.name}: packed sequences, pages and functions of the scores have no rule")
    rows, keys = (pair[int(call.params["layout"])] for pair in (_ROWS, _KEYS))
    first = [rows, keys, keys, _SCORES, _LENGTHS, _LENGTHS, *[_UNUSED] * 4]
    operands = [t if used else _UNUSED for t, used in zip(first, is_used, strict=False)]
    if backward:
        operands += [_STATISTICS, rows, rows]
    made = [rows, keys, keys] if backward else [rows, _STATISTICS][: len(results)]
    sums: tuple[tuple[str, Reduction], ...] = (("b", "sum"), ("g", "sum"), ("k", "sum"))
    rule = Notation(tuple(operands), tuple(made), sums, ("d", "s", "t"), call.name)
    rule = notation.expand_rule(rule, sizes, results[: len(made)], call.name)
    if len(results) > len(made):  # the gradient of a bias that all examples share is a sum over them
        rule = replace(rule, results=(*rule.results, rule.operands[3]))
    return replace(notation.rule_of(rule, sizes, results, call.name), source="table")
