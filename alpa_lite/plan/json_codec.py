"""Frozen dataclasses to JSON values and back, guided by their annotations.

`decode(T, encode(x)) == x` for dataclasses whose fields are str, int, float, bool, None, tuples, mappings with string
keys, `PartitionSpec`, other such dataclasses, and classes that bring their own `to_json()` and `from_json(data)`.
Decoding checks every type, so that a damaged file is refused with the place of the damage, and runs no code from the
file. A partition spec is a list with null, a name, or a list of names for each dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

T = TypeVar("T")


class DecodeError(ValueError):
    """A type error in data; the message names the place, the data found, and the expected type."""


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
    if isinstance(value, PartitionSpec):
        return [list(entry) if isinstance(entry, tuple) else entry for entry in value]
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return encode_fields(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def encode_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values, by name; those with metadata `saved=False` are left out.

    So are those with metadata `optional=True` that are None.
    """
    fields = [f for f in dataclasses.fields(value) if f.metadata.get("saved", True)]
    named = {f.name: getattr(value, f.name) for f in fields}
    absent = {f.name for f in fields if f.metadata.get("optional") and named[f.name] is None}
    return {name: encode(item) for name, item in named.items() if name not in absent}


def decode_fields(cls: type[T], data: object, where: str = "") -> T:
    """Returns a `cls` decoded from the result of `encode_fields`.

    Args:
      cls: a dataclass.
      data: JSON values.
      where: the place of `data` in the file, for messages.

    Raises:
      DecodeError: if a field is missing, unknown, or of another type, or if `cls` refuses the values.
    """
    record = _expect(data, dict, "an object", where)
    hints = _hints(cls)
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
    """A value of the annotated type `kind` from JSON values; arguments and errors as for `decode_fields`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in args:
            return None
        (kind,) = (arg for arg in args if arg is not type(None))
        return decode(kind, data, where)
    if origin is tuple:
        items = _expect(data, list, "a list", where)
        return tuple(decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if origin is Mapping:
        record = _expect(data, dict, "an object", where)
        return {key: decode(args[1], item, f"{where}[{key!r}]") for key, item in record.items()}
    if kind is float:
        return _decode_float(data, where)
    if kind in (int, str, bool):
        if kind is int and isinstance(data, bool):
            raise DecodeError(f"{where}: expected int, found bool")
        return _expect(data, kind, kind.__name__, where)
    if kind is PartitionSpec:
        return _decode_spec(data, where)
    if hasattr(kind, "from_json"):
        try:
            return kind.from_json(data)
        except Exception as error:
            raise DecodeError(f"{where}: {error}") from error
    return decode_fields(kind, data, where)


def _decode_float(data: Any, where: str) -> float:
    if data in ("inf", "-inf", "nan") or (isinstance(data, float | int) and not isinstance(data, bool)):
        return float(data)
    raise DecodeError(f"{where}: expected a number, found {type(data).__name__}")


def _decode_spec(data: Any, where: str) -> PartitionSpec:
    entries = []
    for i, entry in enumerate(_expect(data, list, "a list", where)):
        if isinstance(entry, list) and all(isinstance(axis, str) for axis in entry):
            entries.append(tuple(entry))
        elif entry is None or isinstance(entry, str):
            entries.append(entry)
        else:
            raise DecodeError(f"{where}[{i}]: expected null, an axis or a list of axes, found {entry!r}")
    return PartitionSpec(*entries)


def _expect(data: Any, kind: type, name: str, where: str) -> Any:
    if not isinstance(data, kind):
        raise DecodeError(f"{where or 'top'}: expected {name}, found {type(data).__name__}")
    return data


@functools.lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of `cls`."""
    return typing.get_type_hints(cls)
