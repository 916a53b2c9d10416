"""The options of `parallelize`, validated once. The methods that choose a plan are in `methods` and `manual`.

A method says which plans are allowed; the options say everything else. Both are frozen and hash by value, so that a
step's plans can be cached under them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import jax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.manual import Manual, check_spec, method_from_json
from alpa_lite.methods import STRATEGIES, Auto, DataParallel, Method, Off, Pipeline, Sharded, TensorParallel, Zero

if TYPE_CHECKING:
    from alpa_lite.plan.plan import Plan

__all__ = [
    "Auto",
    "DataParallel",
    "Manual",
    "Method",
    "Off",
    "Options",
    "Pipeline",
    "Sharded",
    "TensorParallel",
    "Zero",
    "method_from_json",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `parallelize`, which describes them.

    On construction sequences become tuples, numbers and names tuples of one, mappings pairs, names of methods and
    clusters the values that they stand for, and texts such as "16 GiB" bytes.

    Raises:
      OptionError: naming the argument, the value and the remedy.
    """

    method: Method | str = "auto"
    cluster: Cluster | str | None = None
    memory_per_device: int | None = None
    num_microbatches: int | Literal["auto"] = "auto"
    allow_inexact: bool = False
    batch_argnums: tuple[int, ...] | Literal["auto"] = "auto"
    batch_argnames: tuple[str, ...] = ()
    state_argnums: tuple[int, ...] | Literal["auto"] = "auto"
    state_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    constrain: Mapping[str, PartitionSpec] | tuple[tuple[str, PartitionSpec], ...] = ()
    allow: tuple[str, ...] | None = None
    forbid: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] | Literal["auto"] = "auto"
    donate_argnames: tuple[str, ...] = ()
    in_shardings: Any = field(default=None, hash=False)
    out_shardings: Any = field(default=None, hash=False)
    keep_unused: bool = False
    inline: bool = False
    compiler_options: tuple[tuple[str, Any], ...] = ()
    ignore_annotations: bool = False
    like: tuple[Any, ...] = ()
    communication: Literal["explicit", "compiler"] = "explicit"
    overlap: bool = False
    plan: Plan | str | os.PathLike[str] | None = None
    verify: Literal["shardy", "hlo", "off"] = "shardy"
    effort: Literal["quick", "normal", "thorough"] = "normal"
    planning_time_limit: float | None = None
    dump_dir: str | os.PathLike[str] | None = None
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("method", _method(self.method))
        put("memory_per_device", _memory(self.memory_per_device))
        put("cluster", Cluster.named(self.cluster) if isinstance(self.cluster, str) else self.cluster)
        for name in ("batch_argnums", "state_argnums", "static_argnums", "donate_argnums"):
            put(name, _numbers(name, getattr(self, name), auto=name != "static_argnums"))
        for name in ("batch_argnames", "state_argnames", "static_argnames", "donate_argnames"):
            put(name, _names(name, getattr(self, name)))
        put("like", _like(self.like))
        put("constrain", _constrain(() if self.constrain is None else self.constrain))
        for name in ("in_shardings", "out_shardings"):
            put(name, _shardings(name, getattr(self, name)))
        put("compiler_options", _compiler_options(self.compiler_options))
        put("allow", None if self.allow is None else _strategies("allow", self.allow))
        put("forbid", _strategies("forbid", () if self.forbid is None else self.forbid))
        _validate(self)

    @property
    def donate(self) -> tuple[int | str, ...] | Literal["auto"]:
        """The arguments whose buffers may be reused, by number or by name; "auto" stands for the state."""
        if not self.donate_argnames:
            return self.donate_argnums
        return (*(() if self.donate_argnums == "auto" else self.donate_argnums), *self.donate_argnames)

    @property
    def forbidden(self) -> frozenset[str]:
        """The strategies that are left out."""
        unasked = () if self.allow is None else set(STRATEGIES) - set(self.allow)
        return frozenset((*self.forbid, *unasked))


class PlanOptions(TypedDict, total=False):
    """The keywords of `make_plan` in addition to the cluster, as a caller gives them; see `parallelize`."""

    method: Method | Literal["auto", "off"]
    memory_per_device: int | str | None
    num_microbatches: int | Literal["auto"]
    allow_inexact: bool
    batch_argnums: int | Sequence[int] | Literal["auto"]
    batch_argnames: str | Sequence[str]
    state_argnums: int | Sequence[int] | Literal["auto"]
    state_argnames: str | Sequence[str]
    static_argnums: int | Sequence[int]
    static_argnames: str | Sequence[str]
    constrain: Mapping[str, PartitionSpec] | Sequence[tuple[str, PartitionSpec]] | None
    allow: str | Sequence[str] | None
    forbid: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | Literal["auto"]
    donate_argnames: str | Sequence[str]
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: bool
    compiler_options: Mapping[str, Any] | Sequence[tuple[str, Any]] | None
    ignore_annotations: bool
    like: Any
    communication: Literal["explicit", "compiler"]
    overlap: bool
    plan: Plan | str | os.PathLike[str] | None
    verify: Literal["shardy", "hlo", "off"]
    effort: Literal["quick", "normal", "thorough"]
    planning_time_limit: float | None
    dump_dir: str | os.PathLike[str] | None
    cache_dir: str | os.PathLike[str] | None


class StepOptions(PlanOptions, total=False):
    """The keywords of `parallelize`, as a caller gives them."""

    cluster: Cluster | str | None


def _validate(options: Options) -> None:
    """Raises OptionError for invalid values that the conversions of `Options` let through."""

    def refuse(name: str, remedy: str) -> None:
        raise OptionError(f"{name}={getattr(options, name)!r}: {remedy}")

    if options.cluster is not None and not isinstance(options.cluster, Cluster):
        refuse("cluster", "give a Cluster, the name of a preset, or None for the devices here")
    memory = options.memory_per_device
    if memory is not None and (not _is_number(memory) or memory <= 0):
        refuse("memory_per_device", 'give bytes above 0, as 16 * 2**30 or "16 GiB", or None for the device\'s memory')
    count = options.num_microbatches
    if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        refuse("num_microbatches", 'give a positive number, or "auto"')
    if isinstance(options.method, Off) and count not in ("auto", 1):
        refuse("num_microbatches", 'method="off" runs the step as it is; leave one of the two out')
    rest = options.method.rest if isinstance(options.method, Manual) else options.method
    if options.forbidden and (not isinstance(rest, Auto | Sharded) or options.plan is not None):
        refuse("forbid" if options.forbid else "allow", 'use method="auto", Sharded() or Manual(...), without plan=')
    for name in ("in_shardings", "out_shardings"):
        if getattr(options, name) is not None and (isinstance(rest, Pipeline) or options.plan is not None):
            raise OptionError(f'{name} places arguments on one mesh; use method="auto" or Sharded(), without plan=')
    for name in ("allow_inexact", "overlap", "keep_unused", "inline", "ignore_annotations"):
        if not isinstance(getattr(options, name), bool):
            refuse(name, "give True or False")
    if options.communication not in ("explicit", "compiler"):
        refuse("communication", 'use "explicit" or "compiler"')
    if options.verify not in ("shardy", "hlo", "off"):
        refuse("verify", 'use "shardy", "hlo" or "off"')
    if options.effort not in ("quick", "normal", "thorough"):
        refuse("effort", 'use "quick", "normal" or "thorough"')
    limit = options.planning_time_limit
    if limit is not None and (not _is_number(limit) or not limit > 0):
        refuse("planning_time_limit", "give seconds above 0, or None for no limit")
    for name in ("dump_dir", "cache_dir"):
        if getattr(options, name) is not None and not isinstance(getattr(options, name), str | os.PathLike):
            refuse(name, "give the path of a directory, or None")
    for kind, join in (("argnums", set(options.static_argnums)), ("argnames", set(options.static_argnames))):
        batch, state = (set(() if named == "auto" else named) for named in (
            getattr(options, f"batch_{kind}"), getattr(options, f"state_{kind}")
        ))  # fmt: skip
        leave = "leave them out of one of the two"
        if join & batch:
            refuse(f"static_{kind}", f"{sorted(join & batch)} cannot be static and the batch; {leave}")
        if state & (batch | join):
            what = sorted(state & (batch | join))
            refuse(f"state_{kind}", f"{what} cannot be state and the batch, or static; {leave}")
    if set(options.donate_argnames) & set(options.static_argnames):
        refuse("donate_argnames", "a static argument has no buffer to donate; leave it out")
    if options.donate_argnums != "auto" and set(options.donate_argnums) & set(options.static_argnums):
        refuse("donate_argnums", "a static argument has no buffer to donate; leave it out")


def _like(value: Any) -> tuple[Any, ...]:
    """The steps and plans of `like=` as a tuple."""
    items = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    for item in items:
        if not hasattr(item, "plans") and not hasattr(item, "division"):
            raise OptionError(f"like={item!r}: give a step that parallelize made, a Plan, or a tuple of these")
    return items


def _shardings(option: str, value: Any) -> Any:
    """A pytree of shardings, its leaves checked."""
    kinds = NamedSharding | PartitionSpec | None
    for leaf in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(leaf, kinds):
            raise OptionError(
                f"{option} holds a {type(leaf).__name__}; give a NamedSharding, a PartitionSpec, or None where the "
                "plan may choose"
            )
    return tuple(value) if option == "in_shardings" and isinstance(value, list) else value


def _compiler_options(value: Any) -> tuple[tuple[str, Any], ...]:
    """The pairs of `compiler_options`."""
    pairs = value.items() if isinstance(value, Mapping) else value or ()
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise OptionError(f"compiler_options={value!r}: give a mapping from names of XLA's options to values, or None")
    return tuple(pairs)


def _strategies(option: str, value: Any) -> tuple[str, ...]:
    """Names of strategies as a tuple."""
    items = (value,) if isinstance(value, str) else tuple(value)
    for name in items:
        if name not in STRATEGIES:
            known = "; ".join(f"{name!r}: {what}" for name, what in STRATEGIES.items())
            raise OptionError(f"{option}={value!r}: there is no strategy {name!r}; there are {known}")
    return items


def _constrain(value: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    """The pairs of `constrain`."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else tuple(value)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise OptionError(f"constrain={value!r}: give a mapping from globs on scopes to PartitionSpecs")
        check_spec("constrain", *pair)
    return pairs


def _method(value: object) -> Method:
    """The method that a value of `method=` stands for."""
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


def _memory(value: Any) -> Any:
    """Bytes that a text such as "16 GiB" names; anything else, and a text that names none, as it is."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([a-z]+)\s*", value.lower()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        return value
    return int(float(match[1]) * _UNITS[match[2]])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(name: str, value: Any, auto: bool) -> tuple[int, ...] | Literal["auto"]:
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


def _names(name: str, value: Any) -> tuple[str, ...]:
    """Argument names as a tuple."""
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, list | tuple) and all(isinstance(i, str) and i.isidentifier() for i in items):
        return tuple(items)
    raise OptionError(f"{name}={value!r}: give the name of a parameter or a tuple of such names")
