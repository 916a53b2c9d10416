"""Train steps that tests, benchmarks and examples share: each is built by one function, and found by name or tag.

    gallery.get("zoo", "linen_gpt").make()      the step and small arrays
    gallery.find("zoo", "attention", "scan")    cases by name
    gallery.get("outside", "gpt2-xl").plan()    the step and the shapes of its published size

The kinds of cases, each with the modules that define them as `CASES`:

    zoo             models that every plan must compute correctly, each for something that can go wrong
    loop            train loops as their users write them, with evaluation; `loops.base` runs them
    tokens          small language models of one idea each, causal or not
    micro-batches   steps for something that cutting a batch must get right
    references      steps with mutable references
    outside         models of other libraries, and ours: small, to be compiled, or at published sizes, to be planned

Nothing here plans or runs a step. `steps` and `batches` have what builders share: updates, losses, optimizers, shapes
and arrays.
"""

from __future__ import annotations

import functools
import importlib

from gallery.registry import Built, Case

__all__ = ["KINDS", "Built", "Case", "find", "get"]

KINDS: dict[str, tuple[str, ...]] = {
    "zoo": ("nnx", "linen", "plain"),
    "loop": ("loops.linen_steps", "loops.library_steps", "loops.unusual_steps"),
    "tokens": ("tokens.models", "tokens.libraries"),
    "micro-batches": ("accumulation",),
    "references": ("references",),
    "outside": ("outside.cases",),
}


@functools.cache
def _all_of(kind: str) -> dict[str, Case]:
    modules = [importlib.import_module(f"gallery.{module}") for module in KINDS[kind]]
    cases: list[Case] = [case for module in modules for case in module.CASES]
    found = {case.name: case for case in cases}
    assert len(found) == len(cases), f"two cases of {kind} have one name"
    return found


def find(kind: str, *tags: str) -> dict[str, Case]:
    """The cases of a kind that have all of some tags, by name."""
    return {name: case for name, case in _all_of(kind).items() if case.tags.issuperset(tags)}


def get(kind: str, name: str) -> Case:
    """The case of a kind that has a name."""
    return _all_of(kind)[name]
