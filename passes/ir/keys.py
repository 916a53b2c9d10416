"""Keys of operations: two ops have equal keys exactly when they compute the same function of equally shaped operands.

A key is one string, `primitive[parameters](operands){bodies}`. It never holds an address, a source path or a value
number, so that it is the same in every process. Parameters that are None are left out: versions of JAX add options
that default to None. Jaxprs among the parameters go by a digest of their structure. Functions that nothing else
describes (callbacks) are numbered in order of appearance: two functions never share a key, for a graph and all graphs
that it is rewritten to have one `Keys` (`Graph.keys`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from alpa_lite import _jax
from alpa_lite.ir.graph import Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir import primitives

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_FILE = re.compile(r"(/[^\s'\",:<>()]+)+\.py(:\d+)*")
_WEAK = re.compile(r"weak_type=(True|False),?")
_PROVENANCE = frozenset({"DebugInfo", "SourceInfo", "NameAndSrcInfo", "Traceback"})
CONTROL_FLOW_JAXPRS = frozenset({"jaxpr", "cond_jaxpr", "body_jaxpr", "branches"})


class Keys:
    """A writer of keys for the operations of one trace and of its rewritings, which caches rendered parameters."""

    def __init__(self) -> None:
        self._rendered: dict[str, list[Any]] = {}  # what has a repr without an address, by it
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # what `_numbers` and `_digests` know by id must not be collected
        self._digests: dict[int, str] = {}
        self._types: dict[tuple[Any, Any], str] = {}
        self._unnumbered: dict[str, str] = {}

    def head(self, primitive: Any, params: Mapping[str, Any], *, structured: bool = False) -> str:
        """Returns the part of the key that depends on the primitive and its parameters alone.

        Args:
          primitive: a JAX primitive.
          params: its parameters.
          structured: the jaxprs among the parameters are rendered elsewhere, from the op's bodies.
        """
        described = structured or any(_holds_jaxpr(value) for value in params.values())
        parts = []
        for name in sorted(params):
            value = params[name]
            if value is None or (structured and name in CONTROL_FLOW_JAXPRS):
                continue
            if described and callable(value) and not _jax.is_jaxpr(value) and not isinstance(value, type):
                continue  # the Python function behind a jaxpr that is rendered
            parts.append(f"{name}={self.text(value)}")
        return f"{primitive.name}[{','.join(parts)}]"

    def key(self, head: str, operands: Iterable[Value | Lit], bodies: Iterable[str] = ()) -> str:
        """Returns the whole key."""
        described = ",".join([self._operand(operand) for operand in operands])
        inner = ",".join(bodies)
        return f"{head}({described}){{{inner}}}" if inner else f"{head}({described})"

    def block(self, block: Block, values: Callable[[int], Value], *, numbers: bool = True, weak: bool = True) -> str:
        """Returns a digest of a block: its operations and how they are wired.

        Args:
          block: the block.
          values: value number -> value.
          numbers: whether the numbers count that elementwise operations of the block itself have as literals, and where
            slices begin (`key_without_position`). Layers that draw random numbers differ in the former: each folds its
            own into the key; layers that read one row each of an array, in the latter.
          weak: whether it counts which conversions make weak types.
        """

        def wired(op: Op) -> tuple[str, Sequence[Any], Sequence[Any]]:
            text, operands = op.key, op.operands
            if not weak:
                head = self.head(op.primitive, op.params, structured=True) if op.bodies else op.key
                text = _WEAK.sub("", head) + ",".join(self.block(body, values, weak=False) for body in op.bodies)
            elif not numbers and op.name in _NUMBERED and any(isinstance(a, Lit) for a in op.operands):
                text, operands = self.without_numbers(op, values), [None if isinstance(a, Lit) else a for a in operands]
            elif not numbers:
                text = key_without_position(op, values)
            return text, operands, op.results

        types = [",".join([self.type_of(values(value)) for value in block.inputs])]
        return self._digest_of(types, block.inputs, map(wired, block.ops), block.outputs)

    def _digest_of(
        self,
        head: list[str],
        inputs: Iterable[Any],
        ops: Iterable[tuple[str, Sequence[Any], Sequence[Any]]],
        outputs: Iterable[Any],
    ) -> str:
        """Returns a digest of a straight line of operations, whose values go by the order in which they are made.

        Args:
          head: lines for the types of the inputs.
          inputs, outputs: atoms.
          ops: the text, the operands (None for a literal that does not count), and the results of each.
        """
        local: dict[Any, int] = {}

        def names(atoms: Iterable[Any]) -> str:
            return ",".join(
                ["L" if a is None else self._operand(a) if isinstance(a, Lit) else f"%{local[a]}" for a in atoms]
            )

        lines = list(head)
        for text, operands, results in (("", (), inputs), *ops):
            lines += [f"{text}:{names(operands)}"] if text else []
            for value in results:
                local[value] = len(local)
        return _digest("\n".join([*lines, names(outputs)]).encode())

    def without_numbers(self, op: Op, values: Callable[[int], Value]) -> str:
        """Returns the key of an operation without the numbers that it has as literals."""
        if op.key not in self._unnumbered:
            types = ",".join([self.type_of(a.aval if isinstance(a, Lit) else values(a)) for a in op.operands])
            self._unnumbered[op.key] = f"{self.head(op.primitive, op.params)}({types})"
        return self._unnumbered[op.key]

    def type_of(self, value: Any) -> str:
        """Dtype and shape, such as `float32[8,16]`, of anything that has both."""
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        text = self._types.get((shape, dtype))
        if text is None:
            dims = "" if shape is None else ",".join(map(str, shape))
            text = self._types[shape, dtype] = f"{dtype}[{dims}]"
        return text

    def _operand(self, operand: Value | Lit) -> str:
        if isinstance(operand, Lit):
            value = np.asarray(operand.value)  # a number of Python has more digits than it has here
            return f"{self.type_of(operand.aval)}={self.text(value.astype(operand.aval.dtype).tolist())}"
        return self.type_of(operand)

    def text(self, value: Any) -> str:
        """Returns a rendering of a parameter that is equal in every process."""
        kind = type(value)
        if kind in (int, str, bool, float, complex, type(None), slice):
            return repr(value)
        if kind is tuple or kind is list or isinstance(value, tuple):
            return f"({','.join([self.text(item) for item in value])})"
        if isinstance(value, np.dtype):
            return value.name
        if isinstance(value, enum.Enum):
            return f"{kind.__name__}.{value.name}"
        if isinstance(value, np.generic):
            return f"{value.dtype}:{value.item()!r}"
        if isinstance(value, type):
            return value.__qualname__
        if isinstance(value, Mapping):
            items = sorted((self.text(key), self.text(item)) for key, item in value.items())
            return f"{{{','.join([f'{key}:{item}' for key, item in items])}}}"
        if isinstance(value, frozenset | set):
            return f"{{{','.join(sorted(self.text(item) for item in value))}}}"
        if _jax.is_jaxpr(value):
            return f"jaxpr:{self._jaxpr(value)}"
        if isinstance(value, np.ndarray | jax.Array):
            return self._array(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        if isinstance(value, functools.partial):
            return f"partial({self.text(value.func)},{self.text(value.args)},{self.text(value.keywords)})"
        name = type(value).__name__
        if name in _PROVENANCE:
            return name
        if dataclasses.is_dataclass(value):
            fields = [
                f"{field.name}={self.text(getattr(value, field.name, None))}" for field in dataclasses.fields(value)
            ]
            return f"{name}({','.join(fields)})"
        rendered = repr(value)
        plain = _FILE.sub("", _ADDRESS.sub("", rendered))
        if plain == rendered:
            known = self._rendered.setdefault(plain, [])
            number = next((n for n, other in enumerate(known) if not _differ(value, other)), len(known))
            if number == len(known):
                known.append(value)
            return f"{plain}#{number}" if number else plain
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
        return f"{plain}#{self._numbers[id(value)]}"

    def _array(self, value: Any) -> str:
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"{value.dtype}:{self._array(jax.random.key_data(value))}"
        if isinstance(value, Tracer):
            return f"{self.type_of(value)}"
        if id(value) not in self._digests:
            data = np.asarray(value)
            self._digests[id(value)] = f"{self.type_of(data)}:{_digest(np.ascontiguousarray(data).tobytes())}"
            self._alive.append(value)
        return self._digests[id(value)]

    def _jaxpr(self, value: Any) -> str:
        if id(value) in self._digests:
            return self._digests[id(value)]
        jaxpr, consts = _jax.open_jaxpr(value)

        def atoms(variables: Iterable[Any]) -> list[Any]:
            return [Lit(one.val, one.aval) if _jax.is_literal(one) else one for one in variables]

        inputs = (*jaxpr.constvars, *jaxpr.invars)
        head = [",".join([self.text(const) for const in consts]), *(self.type_of(var.aval) for var in inputs)]
        ops = ((self.head(eqn.primitive, eqn.params), atoms(eqn.invars), eqn.outvars) for eqn in jaxpr.eqns)
        self._alive.append(value)
        digest = self._digests[id(value)] = self._digest_of(head, inputs, ops, atoms(jaxpr.outvars))
        return digest


def digest(graph: Graph, *, constants: bool = True) -> str:
    """The digest of a whole program, equal in every process, by which two traces are found to be the same program.

    Graphs of equal digests apply the same operations to the same operands in the same order: they compute the same
    values, bit for bit, and one plan and one executable serve both. Weak dtypes are left out, since they only decide
    which operations JAX traces: what promotion they cause is in the graph, as conversions.

    Args:
      graph: the program.
      constants: whether the closed-over arrays count; their shapes and dtypes do in any case.
    """
    keys: Keys = graph.keys or Keys()
    lines = [keys.block(graph.block, graph.values.__getitem__, weak=False)]
    lines += map(keys.text, graph.constants if constants else ())
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def key_without_position(op: Op, values: Callable[[int], Value]) -> str:
    """Returns the key of an operation, without the position of a slice or of the padded operand.

    No layout depends on that: a dim of which a part is taken, or that is padded, is not sharded, whichever part it is.
    Layers that read one row each of an array are alike so. A stride, or padding between elements, does shard.
    """
    if op.name == "slice" and set(op.params["strides"] or (1,)) == {1}:
        where = ""
    elif op.name in ("dynamic_slice", "dynamic_update_slice") and any(isinstance(atom, Lit) for atom in op.operands):
        where = str([isinstance(atom, Lit) for atom in op.operands])
    elif op.name == "pad" and not any(interior for _, _, interior in op.params["padding_config"]):
        where = str([tuple(map(int, config)) == (0, 0, 0) for config in op.params["padding_config"]])
    else:
        return op.key
    types = [atom.aval if isinstance(atom, Lit) else values(atom) for atom in op.operands]
    sizes = [f"{one.dtype}{one.shape}" for one in (*types, *map(values, op.results))]
    return f"{op.name}{where}{sizes}"


_NUMBERED = primitives.ELEMENTWISE | {"dynamic_slice"}
"""Operations of which it does not matter how they are computed which number a literal is."""


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two objects of equal `repr` say themselves that they are not equal."""
    if type(one) is not type(other):
        return True
    if one is other or type(one).__eq__ is object.__eq__:
        return False
    try:
        return bool(one != other)
    except (TypeError, ValueError):  # equality that is not one boolean
        return False


def _holds_jaxpr(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_jaxpr(item) for item in value)
    return _jax.is_jaxpr(value)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
