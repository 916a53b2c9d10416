"""The rules that users gave (`register_rule`), for equations of their sizes.

A rule that says more than is true would give wrong results, so what can be seen without running is looked at: for each
name that may be sharded, the function is traced on the largest block of it, and must return blocks of the results.
"""

from __future__ import annotations

import functools

from alpa_lite.errors import RuleError
from alpa_lite.ir import kernels, notation, registration
from alpa_lite.ir.kernels import KERNEL, Kernel, Types
from alpa_lite.ir.notation import Notation
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.factors.base import Call, shape


def registered_rule(call: Call) -> Rule | None:
    """Returns the rule of a call, if its user gave one.

    Raises:
      RuleError: the rule does not fit the operands and results, or the function does not run on blocks.
    """
    given = registration.find_registered_rule(call.primitive, call.params)
    if given is None:
        return None
    who = registration.label(call.primitive, call.params)
    operands, results = [shape(aval) for aval in call.operands], [shape(aval) for aval in call.results]
    if call.primitive is KERNEL:
        kernel = call.params["kernel"]
        if not kernel.trusted:
            _try_blocks(kernel, kernels.types_of(call.operands))
    else:
        given = notation.expand_rule(given, operands, results, who)
    return notation.rule_of(given, operands, results, who)


@functools.lru_cache(maxsize=256)
def _try_blocks(kernel: Kernel, types: Types) -> None:
    """Traces a kernel on the largest block of each name that may be sharded."""
    rule = kernel.notation
    results = kernels.results_of(kernel, types)
    sizes = notation.sizes_of(rule, [s for s, _ in types], [tuple(x.shape) for x in results], kernel.name)
    for name, size in sizes.items():
        if rule.kind(name) != "replicate" and size > 1:
            parts = next(p for p in range(2, size + 1) if size % p == 0)
            blocks = _blocks(rule, types, name, parts)
            try:
                kernels.results_of(kernel, blocks)
            except RuleError as error:
                raise RuleError(
                    f"{kernel.name}: on blocks of {name!r} with {size // parts} instead of {size}, it does not return "
                    f"a block of its result: {error}. Take sizes from the operands, or list {name!r} in replicate"
                ) from None
            except Exception as error:  # whatever a user's function raises
                raise RuleError(
                    f"{kernel.name}: its rule {rule.text!r} says that {name!r} may be sharded, but the function cannot "
                    f"be traced on operands of shapes {', '.join(str(s) for s, _ in blocks)}: {error}. List {name!r} "
                    "in replicate, or let the function take its sizes from its operands"
                ) from error


def _blocks(rule: Notation, types: Types, name: str, parts: int) -> Types:
    """Returns the types of one device's blocks of the operands, if one name is cut into parts."""
    return tuple(
        (tuple(n // parts if name in dim else n for dim, n in zip(tensor, size, strict=True)), dtype)
        for tensor, (size, dtype) in zip(rule.operands, types, strict=True)
    )
