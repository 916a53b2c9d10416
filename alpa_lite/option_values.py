"""Conversions of the values that callers give for options, with errors that name the option, the value, the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.methods import STRATEGIES, Auto, Method, Off, check_spec

Convert = Callable[[str, Any], Any]
"""Takes the name of an option and a given value, and returns the value of the field; raises OptionError."""


def accept_only(is_valid: Callable[[Any], bool], remedy: str) -> Convert:
    """Returns a conversion that takes valid values as they are."""

    def convert(name: str, value: Any) -> Any:
        if not is_valid(value):
            raise OptionError(f"{name}={value!r}: {remedy}")
        return value

    return convert


def choice(*names: str) -> Convert:
    """Returns a conversion that takes these texts."""
    quoted = [f'"{name}"' for name in names]
    return accept_only(lambda value: value in names, f"use {', '.join(quoted[:-1])} or {quoted[-1]}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def state_from(_: str, value: Any) -> tuple[Any, ...]:
    """Returns the steps and plans of `state_from=` as a tuple."""
    items = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for item in items:
        if not hasattr(item, "plans") and not hasattr(item, "division"):
            raise OptionError(f"state_from={item!r}: give a step that parallelize made, a Plan, or a tuple of these")
    return items


def shardings(option: str, value: Any) -> Any:
    """Returns a pytree of shardings, its leaves checked."""
    kinds = NamedSharding | PartitionSpec | None
    for leaf in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(leaf, kinds):
            raise OptionError(
                f"{option} holds a {type(leaf).__name__}; give a NamedSharding, a PartitionSpec, or None where the "
                "plan may choose"
            )
    return tuple(value) if option == "in_shardings" and isinstance(value, list) else value


def compiler_options(_: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the pairs of `compiler_options`."""
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise OptionError(f"compiler_options={value!r}: give a mapping from names of XLA's options to values, or None")
    return tuple(pairs)


def strategies(option: str, value: Any) -> tuple[str, ...] | None:
    """Names of strategies as a tuple; None of `allow` allows all."""
    if value is None and option == "allow":
        return None
    items = (value,) if isinstance(value, str) else tuple(value or ())
    for name in items:
        if name not in STRATEGIES:
            known = "; ".join(f"{name!r}: {what}" for name, what in STRATEGIES.items())
            raise OptionError(f"{option}={value!r}: there is no strategy {name!r}; use {known}")
    return items


def constrain(_: str, value: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """Returns the pairs of `constrain`."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else tuple(value or ())
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise OptionError(f"constrain={value!r}: give a mapping from globs on scopes to PartitionSpecs")
        check_spec("constrain", *pair)
    return pairs


def method(_: str, value: object) -> Method:
    """Returns the method that a value of `method=` stands for."""
    if isinstance(value, str) and value in ("auto", "off"):
        return Auto() if value == "auto" else Off()
    if isinstance(value, Method) and type(value) is not Method:
        return value
    choices = (
        '"auto", "off", Auto(), Sharded(), DataParallel(), Zero(stage=2), TensorParallel(), Pipeline() or Manual(...)'
    )
    hint = f"; {value.__name__} is a class, call it" if isinstance(value, type) else ""
    raise OptionError(f"method={value!r}: use {choices}{hint}")


_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def memory(name: str, value: Any) -> int | None:
    """Returns bytes, or those that a text such as "16 GiB" names."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]+)\s*", value.lower()) if isinstance(value, str) else None
    size: Any = int(float(match[1]) * _UNITS[match[2]]) if match is not None and match[2] in _UNITS else value
    if size is not None and (not _is_number(size) or size <= 0):
        raise OptionError(
            f'{name}={size!r}: give bytes above 0, as 16 * 2**30 or "16 GiB", or None for the device\'s memory'
        )
    return size


def cluster(name: str, value: Any) -> Cluster | None:
    """Returns a cluster, or that of a name."""
    found = Cluster.from_name(value) if isinstance(value, str) else value
    if found is not None and not isinstance(found, Cluster):
        raise OptionError(f"{name}={value!r}: give a Cluster, the name of a preset, or None for the devices here")
    return found


def numbers(name: str, value: Any, auto: bool = True) -> tuple[int, ...] | Literal["auto"]:
    """Argument numbers as a tuple."""
    if auto and isinstance(value, str) and value == "auto":
        return "auto"
    items = (value,) if isinstance(value, int) else value
    if isinstance(items, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        if any(i < 0 for i in items) or len(set(items)) != len(items):
            raise OptionError(f"{name}={value!r}: count arguments from 0, each at most once")
        return tuple(items)
    choices = "an argument number, a tuple of them" + (' or "auto"' if auto else "")
    raise OptionError(f"{name}={value!r}: give {choices}")


def names(name: str, value: Any) -> tuple[str, ...]:
    """Argument names as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, list | tuple) and all(isinstance(i, str) and i.isidentifier() for i in items):
        return tuple(items)
    raise OptionError(f"{name}={value!r}: give the name of a parameter or a tuple of such names")


FLAG = accept_only(lambda value: isinstance(value, bool), "give True or False")
DIRECTORY = accept_only(
    lambda value: value is None or isinstance(value, str | os.PathLike), "give the path of a directory, or None"
)
COUNT = accept_only(
    lambda value: value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
    'give a positive number, or "auto"',
)
SECONDS = accept_only(
    lambda value: value is None or (_is_number(value) and value > 0), "give seconds above 0, or None for no limit"
)
