"""Random train-like steps as lists of lines of Python, which can be printed, run, and made shorter.

A `Program` has leaves of state and of a batch, lines that compute values of them and of earlier lines, and outputs. Its
source is a function `step(state, batch)` on JAX alone, so that a program that fails is a script. A program is made
shorter by leaving out a line: what read it reads a value of the same type in its place, or a constant.

Values are kept near one, and whatever is not continuous (comparisons, conversions to integers, indices of a sort) reads
*exact* values alone: integers, and floats that were moved but not computed, which have no rounding that another order
of a sum could change. So two right runs differ by rounding.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.random_steps.prelude import PRELUDE

SIZES = (8, 16, 4, 8, 16, 6, 3, 5, 12, 2, 1, 24)
LARGEST = 8192
NARROW = ("int2", "int4", "uint4")


@dataclass(frozen=True)
class Value:
    """A value of a program; `exact` as of the module, `trained` for float leaves of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool = True

    def __str__(self) -> str:
        """The name, as it stands in a line."""
        return self.name


@dataclass(frozen=True)
class Line:
    """One line: its value, the kind of operation, and the expression; it reads values by name."""

    value: Value
    kind: str
    source: str
    reads: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A step.

    Attributes:
      seed: of the values of its arguments.
      state, batch: leaves.
      lines: in order.
      outputs: names of values that it returns.
      updates: (state leaf, value that replaces it), without gradients.
      gradient: whether float leaves of the state descend along the gradient of `loss_of` the outputs, those left out
        that are metrics.
      generator: of random keys.
      optimizer: the function of the prelude that makes the new state of the gradients.
      feeding: the function of the prelude that the arguments go through, if any.
    """

    seed: int
    state: tuple[Value, ...]
    batch: tuple[Value, ...]
    lines: tuple[Line, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...]
    gradient: bool
    generator: str
    optimizer: str = "descended"
    feeding: str = ""

    def source(self) -> str:
        """The step as text."""
        out = ["def forward(state, batch):"]
        out += [f"    {v.name} = state[{v.name!r}]" for v in self.state]
        out += [f"    {v.name} = batch[{v.name!r}]" for v in self.batch]
        out += [f"    {line.value.name} = {line.source}" for line in self.lines]
        out += [f"    values = {{{', '.join(f'{n!r}: {n}' for n in self.outputs)}}}"]
        out += [f"    updates = {{{', '.join(f'{k!r}: {v}' for k, v in self.updates)}}}"]
        out += ["    return values, updates", "", "def step(state, batch):"]
        if self.gradient:
            floats = [v.name for v in self.state if is_float(v.dtype)]
            metrics = {line.value.name for line in self.lines if line.kind == "metric"}
            summed = [name for name in self.outputs if name not in metrics]
            out += [
                f"    trained = {{k: state[k] for k in {floats!r}}}",
                "    def loss(trained):",
                "        values, updates = forward({**state, **trained}, batch)",
                f"        return loss_of([values[k] for k in {summed!r}]), (values, updates)",
                "    (loss, (values, updates)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)",
                f"    new = {self.optimizer}(state, gradients)",
                "    return {**new, **updates}, {**values, 'loss': loss}",
            ]
        else:
            out += ["    values, updates = forward(state, batch)", "    return {**state, **updates}, values"]
        return "\n".join(out) + "\n"

    def function(self) -> Any:
        """The step."""
        space: dict[str, Any] = {"__name__": "random_program"}
        source = PRELUDE + "\n" + self.source()
        exec(compile(source, f"program_{self.seed}.py", "exec"), space)
        return space["step"]

    def leaves(self) -> str:
        """The lines that make the state and the batch, in arrays of their own."""
        state, batch = (
            f"{{{', '.join(f'{v.name!r}: {_made(v, self.generator)}' for v in some)}}}"
            for some in (self.state, self.batch)
        )
        lines = [f"rng = np.random.default_rng({self.seed})", f"state = {state}", f"batch = {batch}"]
        if self.has_moments:
            names = [v.name for v in self.state if is_float(v.dtype)]
            lines.append(f"state['moments'] = {{name: state[name] * 0 for name in {names!r}}}")
        if self.feeding:
            lines.append(f"state, batch = {self.feeding}(state, batch)")
        return "\n".join(lines)

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state and the batch."""
        space: dict[str, Any] = {}
        exec(PRELUDE + self.leaves(), space)
        return space["state"], space["batch"]

    @property
    def has_moments(self) -> bool:
        """Whether the state holds the optimizer's moments beside its leaves."""
        return self.gradient and self.optimizer == "momentum"

    def script(self, run: str) -> str:
        """A script that makes the arguments and the step, then runs `run`."""
        lines = [
            "import jax",
            'jax.config.update("jax_platforms", "cpu")',
            'jax.config.update("jax_num_cpu_devices", 8)',
        ]
        return "\n".join([*lines, PRELUDE, self.source(), self.leaves(), run]) + "\n"

    def without(self, name: str) -> Program | None:
        """The program without a line; None if it has no such line."""
        found = [i for i, line in enumerate(self.lines) if line.value.name == name]
        if not found:
            return None
        value, before = self.lines[found[0]].value, self.lines[: found[0]]
        known = [*(line.value for line in reversed(before)), *self.batch, *self.state]
        same = next((v for v in known if (v.shape, v.dtype) == (value.shape, value.dtype)), None)
        same = same if same is None or same.exact or not value.exact else None
        constant = f"jnp.full({value.shape}, 1, {value.dtype!r})"
        if same is None and (value.dtype == "key" or self.lines[found[0]].source == constant):
            return None
        if same is None:
            lines = [*self.lines]
            lines[found[0]] = dataclasses.replace(self.lines[found[0]], source=constant, reads=(), kind="constant")
            return dataclasses.replace(self, lines=tuple(lines)).pruned()
        lines = [line if i < found[0] else renamed(line, name, same.name) for i, line in enumerate(self.lines)]
        del lines[found[0]]
        outputs = tuple(dict.fromkeys(same.name if n == name else n for n in self.outputs))
        updates = tuple((k, same.name if v == name else v) for k, v in self.updates)
        return dataclasses.replace(self, lines=tuple(lines), outputs=outputs, updates=updates).pruned()

    def pruned(self, dead: Sequence[str] = ()) -> Program:
        """The program without lines and leaves that nothing reads; lines that are named `dead` stay."""
        wanted = {*self.outputs, *(v for _, v in self.updates), *dead}
        kept: list[Line] = []
        for line in reversed(self.lines):
            if line.value.name in wanted:
                kept.append(line)
                wanted.update(line.reads)
        updated = {k for k, _ in self.updates}
        state = tuple(v for v in self.state if v.name in wanted or v.name in updated)
        batch = tuple(v for v in self.batch if v.name in wanted)
        return dataclasses.replace(
            self, lines=tuple(reversed(kept)), state=state or self.state[:1], batch=batch or self.batch[:1]
        )


def renamed(line: Line, old: str, new: str) -> Line:
    """A line that reads another value."""
    if old not in line.reads:
        return line
    reads = tuple(new if n == old else n for n in line.reads)
    return dataclasses.replace(line, source=re.sub(rf"\b{old}\b", new, line.source), reads=reads)


def is_float(dtype: str) -> bool:
    """Whether a leaf of this dtype has a gradient."""
    return dtype in ("float32", "bfloat16", "float16", "complex64")


def _made(value: Value, generator: str) -> str:
    """The expression of a leaf, of random numbers of `rng`."""
    match value.dtype:
        case "key":
            return f"jax.random.key(int(rng.integers(1000)), impl={generator!r})"
        case "bool":
            return f"jnp.asarray(rng.integers(0, 2, {value.shape}), bool)"
        case "complex64":
            normal = f"rng.normal(size={value.shape})"
            return f"jnp.asarray(({normal} + 1j * {normal}) / 2, 'complex64')"
        case dtype if is_float(dtype) or dtype.startswith("float8"):
            return f"jnp.asarray(rng.normal(size={value.shape}) / 2, {dtype!r})"
        case dtype:
            return f"jnp.asarray(rng.integers(0, {2 if dtype in NARROW else 6}, {value.shape}), {dtype!r})"


class Builder:
    """A program that grows line by line; lines that JAX refuses are left out."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.seed = seed
        self.state: list[Value] = []
        self.batch: list[Value] = []
        self.lines: list[Line] = []
        self.values: dict[str, Value] = {}
        self._space: dict[str, Any] = {}
        exec(PRELUDE, self._space)

    def leaf(self, where: str, shape: tuple[int, ...], dtype: str = "float32") -> Value:
        """A new leaf of the state or of the batch."""
        leaves = self.state if where == "state" else self.batch
        value = Value(f"{where[0]}{len(leaves)}", shape, dtype)
        leaves.append(value)
        self.values[value.name] = value
        return value

    def add(self, kind: str, source: str, reads: Sequence[Value], exact: bool = False) -> Value | None:
        """A new line; `exact` if the operation does not round: what it reads must be exact, too."""
        avals = [self._aval(v) for v in reads]
        names = [v.name for v in reads]
        try:
            function = eval(f"lambda {', '.join(dict.fromkeys(names))}: {source}", self._space)
            made = jax.eval_shape(function, *dict(zip(names, avals, strict=True)).values())
        except Exception:
            return None
        if not isinstance(made, jax.ShapeDtypeStruct) or made.size > LARGEST:
            return None
        dtype = "key" if jnp.issubdtype(made.dtype, jax.dtypes.prng_key) else str(made.dtype)
        if dtype == "key" and made.shape:
            return None
        exact = all(v.exact for v in reads) and (exact or not is_float(dtype))
        value = Value(f"v{len(self.lines)}", tuple(made.shape), dtype, exact)
        self.lines.append(Line(value, kind, source, tuple(dict.fromkeys(names))))
        self.values[value.name] = value
        return value

    def _aval(self, value: Value) -> Any:
        dtype = jax.random.key(0).dtype if value.dtype == "key" else jnp.dtype(value.dtype)
        return jax.ShapeDtypeStruct(value.shape, dtype)

    def pick(
        self, dtypes: Sequence[str] = (), least: int = 0, most: int = 9, exact: bool = False, shape: Any = None
    ) -> Value | None:
        """A value with a dtype of these and this many dims, recent ones more often."""
        found = [
            v
            for v in self.values.values()
            if (v.dtype in dtypes if dtypes else v.dtype != "key")
            and least <= len(v.shape) <= most
            and (v.exact or not exact)
            and (shape is None or v.shape == shape)
        ]
        if not found:
            return None
        recent = found[-6:]
        return self.rng.choice(recent if self.rng.random() < 0.6 else found)

    def dim(self) -> int:
        """A size."""
        return self.rng.choice(SIZES)

    def finished(self, gradient: bool, generator: str, outputs: Sequence[str] = ()) -> Program:
        """The program: some values are returned, some are new state, some are dead."""
        rng, made = self.rng, [line.value for line in self.lines]
        chosen = list(outputs)
        if not chosen:
            unread = [v for v in made if not any(v.name in line.reads for line in self.lines)]
            chosen = [v.name for v in unread if rng.random() < 0.8 and v.dtype != "key"]
            chosen += [v.name for v in rng.sample(made, min(2, len(made))) if v.dtype != "key"]
        updates = []
        for leaf in self.state:
            same = [v for v in made if (v.shape, v.dtype) == (leaf.shape, leaf.dtype)]
            if same and not (gradient and is_float(leaf.dtype)) and rng.random() < 0.8:
                updates.append((leaf.name, rng.choice(same).name))
        if not updates and not gradient and self.state:
            leaf = self.state[0]
            changed = self.add("update", f"{leaf.name} * 0.5 + 1" if leaf.dtype != "key" else leaf.name, [leaf])
            if changed is not None and changed.dtype == leaf.dtype:
                updates.append((leaf.name, changed.name))
        dead = [v.name for v in made if rng.random() < 0.2]
        program = Program(
            self.seed, tuple(self.state), tuple(self.batch), tuple(self.lines), tuple(dict.fromkeys(chosen)),
            tuple(updates), gradient, generator,
        )  # fmt: skip
        return program.pruned(dead)
