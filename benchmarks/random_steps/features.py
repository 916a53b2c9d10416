"""Kinds of lines for random programs: mutable references, effects, loops over the whole batch, low-bit types.

Programs with these lines may also run under changed settings of JAX, and be called with arrays that a call returned in
two places (`Features`).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.random_steps.program import Builder, Forms, Program, Value, pick, writers

FLOATS = ("float32",)
LOW_BITS = ("int4", "uint4", "int2", "float8_e4m3fn", "float8_e5m2")
SETTINGS = {
    "matmul precision": "jax.default_matmul_precision('highest')",
    "threefry partitionable": "jax.threefry_partitionable(False)",
    "x64": "jax.enable_x64(True)",
    "generator": "jax.default_prng_impl('rbg')",
    "rank promotion": "jax.numpy_rank_promotion('allow')",
}
"""Contexts of JAX in which a program is called again, by the names of their features."""
KINDS: dict[str, Callable[[Builder], Value | None]] = {}

kind = writers(KINDS)


@kind("reference", pick(FLOATS, least=1))
def reference(b: Builder, v: Value) -> Forms:
    """A mutable array that lines of its own, a loop or a branch write."""
    if 0 in v.shape:
        return None
    form = b.rng.choice(("summed_in_ref", "scanned_in_ref", "looped_in_ref", "branched_in_ref"))
    return f"{form}({v.name})"


@kind("effect", pick((*FLOATS, "int32")), exact=True)
def effect(b: Builder, v: Value) -> Forms:
    """A callback on a value, the batch alone or nothing, ordered or not."""
    ordered, form = b.rng.random() < 0.5, b.rng.choice(("debugged", "called_out", "called_out_once"))
    return b.add("ordered effect" if ordered else "effect", f"{form}({v.name}, {ordered})", [v], exact=True)


@kind("whole-batch loop", pick(FLOATS, least=2, most=2))
def whole_batch_loop(b: Builder, v: Value) -> Forms:
    """A loop of a known or an unknown trip count around products over the whole batch."""
    if 0 in v.shape:
        return None
    forms = ("counted_up", "counted_down", "counted_in_scan", "counted_with_branch", "counted_until_small")
    return f"{b.rng.choice(forms)}({v.name})"


@kind("low-bit type", exact=True)
def low_bits(b: Builder) -> Forms:
    """A leaf of a type of fewer than eight bits, or of eight, which is read and may be written."""
    dtype = b.rng.choice(LOW_BITS)
    where = b.rng.choice(("state", "batch"))
    leaf = b.leaf(where, tuple(b.dim() for _ in range(b.rng.choice((1, 2)))), dtype)
    if where == "state" and b.rng.random() < 0.5:
        changed = "{0} & {0}" if "int" in dtype else "(-{0})"
        b.add("low-bit type", changed.format(leaf.name), [leaf], exact=True)
    return "{0}.astype('float32') * 0.5", [leaf]


@dataclass(frozen=True)
class Features:
    """How a program is called.

    Attributes:
      setting: of `SETTINGS`, under which the second call runs; "" for none.
      returned: (state leaf, batch leaf): the array of the former, as the first call returned it, is the latter, too.
    """

    setting: str = ""
    returned: tuple[str, str] | None = None

    def context(self) -> Any:
        """The setting, to call under."""
        return eval(SETTINGS[self.setting], {"jax": jax}) if self.setting else contextlib.nullcontext()

    def arguments(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The arguments of the second call."""
        if self.returned is None:
            return state, batch
        one, other = self.returned
        return state, ({**batch, other: state[one]} if one in state and other in batch else batch)

    def names(self) -> list[str]:
        """The features, as coverage counts them."""
        out = [f"setting: {self.setting}"] * bool(self.setting)
        return out + ["returned array in two places"] * (self.returned is not None)


NO_FEATURES = Features()


def features(program: Program, seed: int) -> Features:
    """Random features that a program can have."""
    rng = random.Random(seed * 31 + 7)
    pairs = [
        (one.name, other.name)
        for one in program.state
        for other in program.batch
        if (one.shape, one.dtype) == (other.shape, other.dtype) and one.dtype != "key"
    ]
    setting = rng.choice(list(SETTINGS)) if rng.random() < 0.4 else ""
    return Features(setting, rng.choice(pairs) if pairs and rng.random() < 0.5 else None)
