"""The codec of every JSON file and message: frozen dataclasses to JSON values and back, by their annotations.

`decode(T, encode(x)) == x` for dataclasses whose fields are str, int, float, bool, None, tuples, mappings with string
keys, `PartitionSpec`, other such dataclasses, and classes that bring their own `to_json()` and `from_json(data)`.
Decoding checks every type, so that a damaged file is refused with the place of the damage, and runs no code from the
file. A partition spec is a list with null, a name, a list of names, or {"unconstrained": true} for each dim. A field
with metadata `saved=False` is not written, and one with `optional=True` not where it is None.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import numbers
import types
import typing
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

MAX_BYTES = 2**30
"""The size up to which a file is read."""

T = TypeVar("T")


class DecodeError(ValueError):
    """A type error in data, with its place, the data found, and the expected type; or a file that is not JSON."""


def read_json(path: Any) -> Any:
    """Returns the values of a file.

    Args:
      path: a path of `pathlib` or `etils.epath`.

    Raises:
      DecodeError: the file is not JSON, is nested too deeply, or has more than `MAX_BYTES`.
      OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DecodeError(f"it has more than {MAX_BYTES:,} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DecodeError(str(error)) from error


def write_json(path: Any, data: Any, indent: int | None = 1) -> None:
    """Writes values to a file; an existing one is replaced only after the new one is complete."""
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_text(json.dumps(data, indent=indent) + "\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def encode(value: Any) -> Any:
    """`value` as JSON values.

    Non-finite floats become the strings "inf", "-inf" and "nan", since JSON has no such numbers.

    Raises:
      TypeError: for a value of an unsupported type.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's integers too
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, tuple | list | PartitionSpec):
        return [{"unconstrained": True} if item is PartitionSpec.UNCONSTRAINED else encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode_fields(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def encode_fields(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass as JSON values, by name."""
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.metadata.get("saved", True)]
    return {f.name: encode(item) for f, item in fields if item is not None or not f.metadata.get("optional")}


def decode_fields(cls: type[T], data: object, where: str = "") -> T:
    """Returns a `cls` decoded from the result of `encode_fields`.

    Args:
      cls: a dataclass.
      data: JSON values.
      where: the place of `data` in the file, for messages.

    Raises:
      DecodeError: if a field is missing, unknown, or of another type, or if `cls` refuses the values.
    """
    record, hints = _expect(data, dict, "an object", where), _hints(cls)
    saved = [f for f in dataclasses.fields(cls) if f.metadata.get("saved", True)]  # type: ignore[arg-type]
    fields = [f.name for f in saved if f.name in record or not f.metadata.get("optional")]
    for name in [*(f for f in fields if f not in record), *(key for key in record if key not in fields)]:
        state = "missing" if name in fields else "unknown"
        raise DecodeError(f"{where or cls.__name__}: field {name!r} is {state}")
    values = {name: decode(hints[name], record[name], f"{where}.{name}" if where else name) for name in fields}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise DecodeError(f"{where or cls.__name__}: {error}") from error


def decode(kind: Any, data: Any, where: str) -> Any:
    """Returns a value of the annotated type `kind` from JSON values; arguments and errors as for `decode_fields`."""
    if kind is Any:
        return data
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _decode_any(args, data, where)
    if origin is typing.Literal:
        if data not in args:
            raise DecodeError(f"{where}: expected one of {', '.join(map(repr, args))}, found {data!r}")
        return data
    if origin is tuple:
        items = _expect(data, list, "a list", where)
        kinds = args[:1] * len(items) if args[-1] is Ellipsis else args
        if len(kinds) != len(items):
            raise DecodeError(f"{where}: expected {len(kinds)} items, found {len(items)}")
        return tuple(decode(own, item, f"{where}[{i}]") for i, (own, item) in enumerate(zip(kinds, items, strict=True)))
    if origin is Mapping:
        record = _expect(data, dict, "an object", where)
        return {key: decode(args[1], item, f"{where}[{key!r}]") for key, item in record.items()}
    if kind is float:
        if data in ("inf", "-inf", "nan"):
            return float(data)
        return _expect(data, (float, int), "a number", where)
    if kind in (int, str, bool):
        return _expect(data, kind, kind.__name__, where)
    if kind is PartitionSpec:
        entries = enumerate(_expect(data, list, "a list", where))
        return PartitionSpec(*(_decode_entry(entry, f"{where}[{i}]") for i, entry in entries))
    if hasattr(kind, "from_json"):
        try:
            return kind.from_json(data)
        except Exception as error:
            raise DecodeError(f"{where}: {error}") from error
    return decode_fields(kind, data, where)


def _decode_any(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    """Returns a value of the first of several types that can be decoded."""
    if data is None and types.NoneType in kinds:
        return None
    first, *others = (kind for kind in kinds if kind is not types.NoneType)
    try:
        return decode(first, data, where)
    except DecodeError:
        if not others:
            raise
        return _decode_any(tuple(others), data, where)


def _decode_entry(entry: Any, where: str) -> Any:
    """Returns the entry of a partition spec."""
    if entry == {"unconstrained": True}:
        return PartitionSpec.UNCONSTRAINED
    if isinstance(entry, list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    if entry is None or isinstance(entry, str):
        return entry
    raise DecodeError(f"{where}: expected null, an axis or a list of axes, found {entry!r}")


def _expect(data: Any, kind: Any, name: str, where: str) -> Any:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise DecodeError(f"{where or 'top'}: expected {name}, found {type(data).__name__}")
    return data


@functools.lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    """Returns the resolved annotations of `cls`."""
    return typing.get_type_hints(cls)
