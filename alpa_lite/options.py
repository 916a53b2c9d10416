"""The options of `parallelize`, validated once. The methods that choose a plan are in `methods`.

A method says which plans are allowed; the options say everything else. Both are frozen and hash by value, so that a
step's plans can be cached under them.

`Options` is the one table of them: its fields have defaults and conversions, and its docstring has the descriptions, of
which the docstring and the signature of `parallelize`, the guide (docs/guide/options.md) and the help of the command
line are made. `PlanOptions` has the types that callers give, for type checkers.
"""

# ruff: noqa: RUF009  fields are made by `_option`

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from jax.sharding import PartitionSpec

from alpa_lite import option_values as values
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.methods import (
    STRATEGIES,
    Auto,
    DataParallel,
    Manual,
    Method,
    Off,
    Pipeline,
    Sharded,
    TensorParallel,
    Zero,
)

if TYPE_CHECKING:
    from alpa_lite.plan.records import PlanRecord as Plan

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
]


def _option(default: Any, convert: values.Convert, keyed: bool = True, **more: Any) -> Any:
    """Returns a field.

    Args:
      convert: a given value.
      keyed: whether plans are cached under it: not if no plan depends on it, or the key has it in another form.
    """
    return field(default=default, metadata={"convert": convert, "keyed": keyed}, **more)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keyword arguments of `parallelize`.

    On construction sequences become tuples, numbers and names tuples of one, mappings pairs, names of methods and
    clusters the values that they stand for, and texts such as "16 GiB" bytes.

    Attributes:
      method: "auto", "off" (plain `jit`), or one of `Auto() Sharded() DataParallel() Zero() TensorParallel()
        Pipeline() Manual()`.
      cluster: the devices to plan for, or the name of a preset; by default those of this process. The file of a
        calibration, as "here.json", gives their measured figures.
      memory_per_device: bytes that a plan may use on each device, or a text such as "16 GiB"; by default its memory
        less a reserve.
      num_microbatches: the number of equal parts of the batch that are computed one after another. "auto" chooses
        the number with the least predicted seconds: on one mesh the least power of two that fits the memory, or a
        greater one where the memory that it leaves free buys more seconds than it costs.
      allow_inexact: whether micro-batches may change the result if a value needs the whole batch (batch norm);
        `Plan.notes` lists such values.
      batch_argnums, batch_argnames: the arguments that are the batch; "auto" finds them.
      state_argnums, state_argnames: the arguments that are state, whose new values the step returns; "auto" finds them.
      static_argnums, static_argnames: as in `jax.jit`.
      constrain: globs on scopes of Flax modules and `jax.named_scope`, with the `PartitionSpec` of the scope's output:
        `{"*/h_0/mlp": P("x", None)}`. That is the last value of its forward operations that another scope reads; `*`
        stands for any text, slashes included.
      allow, forbid: strategies that are searched, over plans of one mesh, or that are not: "data parallel", "fsdp",
        "zero", "tensor parallel" (`methods.STRATEGIES` describes each).
      donate_argnums, donate_argnames: as in `jax.jit`: these arguments are overwritten where they are placed as
        planned. "auto" donates the state, but only arrays that this step returned, or that `place` made to be given
        away: others are copied first, so that a caller's own arrays, and results of another step, are never deleted.
        () donates nothing.
      in_shardings, out_shardings: as in `jax.jit`, as constraints of the plan: pytree prefixes of the positional
        arguments and of the result, None where the plan may choose. For state one of the two is enough. The plan is
        one of one mesh.
      keep_unused, inline: as in `jax.jit`; a plan depends on neither.
      compiler_options: for XLA, as in `jax.jit`.
      ignore_annotations: plans as if the step had no sharding constraints, its arguments no annotations and no
        shardings, and the context no mesh.
      state_from: a step made by `parallelize`, or a plan, or several: arguments that it has as state stay where it has
        them. For evaluation and other steps that read the state of a train step, on one mesh and on a pipeline's
        submeshes.
      communication: "explicit" writes every collective out; "compiler" leaves them to XLA.
      overlap: predicted seconds count communication that hides behind computing, gradient synchronisation and gathers
        of parameters ahead of their use, where the compiler does that: on GPUs and TPUs, of all plans alike.
      plan: a `Plan`, or the path of one, to run without solving.
      verify: "shardy" checks each plan against the partitioner; "hlo" also the compiled program; "off" neither.
      effort: the budget of work of the search: "quick", "normal" or "thorough", about 3, 20 and 180 CPU seconds for the
        largest models. It is counted, so that a plan does not depend on the machine that makes it; more effort never
        gives a slower plan.
      planning_time_limit: wall-clock seconds after which the search ends, once a plan fits; None for no limit. A plan
        that it cuts short says so (in `Plan.search`), depends on the machine, and is not cached.
      dump_dir: a directory for the value after each pass, as text.
      cache_dir: a directory where plans are kept and found again without solving, for the same program, arguments,
        options, cluster and versions; by default that of the environment variable `ALPA_LITE_CACHE_DIR`, if it is set.

    Raises:
      OptionError: naming the argument, the value and the remedy.
    """

    method: Method | str = _option("auto", values.method)
    cluster: Cluster | str | None = _option(None, values.cluster, keyed=False)
    memory_per_device: int | None = _option(None, values.memory)
    num_microbatches: int | Literal["auto"] = _option("auto", values.COUNT)
    allow_inexact: bool = _option(False, values.FLAG)
    batch_argnums: tuple[int, ...] | Literal["auto"] = _option("auto", values.numbers)
    batch_argnames: tuple[str, ...] = _option((), values.names)
    state_argnums: tuple[int, ...] | Literal["auto"] = _option("auto", values.numbers)
    state_argnames: tuple[str, ...] = _option((), values.names)
    static_argnums: tuple[int, ...] = _option((), functools.partial(values.numbers, auto=False))
    static_argnames: tuple[str, ...] = _option((), values.names)
    constrain: Mapping[str, PartitionSpec] | tuple[tuple[str, PartitionSpec], ...] = _option((), values.constrain)
    allow: tuple[str, ...] | None = _option(None, values.strategies)
    forbid: tuple[str, ...] = _option((), values.strategies)
    donate_argnums: tuple[int, ...] | Literal["auto"] = _option("auto", values.numbers)
    donate_argnames: tuple[str, ...] = _option((), values.names)
    in_shardings: Any = _option(None, values.shardings, keyed=False, hash=False)
    out_shardings: Any = _option(None, values.shardings, keyed=False, hash=False)
    keep_unused: bool = _option(False, values.FLAG, keyed=False)
    inline: bool = _option(False, values.FLAG, keyed=False)
    compiler_options: tuple[tuple[str, Any], ...] = _option((), values.compiler_options, keyed=False)
    ignore_annotations: bool = _option(False, values.FLAG)
    state_from: tuple[Any, ...] = _option((), values.state_from, keyed=False)
    communication: Literal["explicit", "compiler"] = _option("explicit", values.choice("explicit", "compiler"))
    overlap: bool = _option(False, values.FLAG)
    plan: Plan | str | os.PathLike[str] | None = _option(None, lambda _, value: value, keyed=False)
    verify: Literal["shardy", "hlo", "off"] = _option("shardy", values.choice("shardy", "hlo", "off"), keyed=False)
    effort: Literal["quick", "normal", "thorough"] = _option("normal", values.choice("quick", "normal", "thorough"))
    planning_time_limit: float | None = _option(None, values.SECONDS, keyed=False)
    dump_dir: str | os.PathLike[str] | None = _option(None, values.DIRECTORY, keyed=False)
    cache_dir: str | os.PathLike[str] | None = _option(None, values.DIRECTORY, keyed=False)

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, one.metadata["convert"](one.name, getattr(self, one.name)))
        _check_conflicts(self)

    @property
    def donate(self) -> tuple[int | str, ...] | Literal["auto"]:
        """The arguments whose buffers may be reused, by number or by name; "auto" stands for the state."""
        if not self.donate_argnames:
            return self.donate_argnums
        return (*(() if self.donate_argnums == "auto" else self.donate_argnums), *self.donate_argnames)

    @property
    def forbidden_strategies(self) -> frozenset[str]:
        """The strategies that are left out."""
        unasked = () if self.allow is None else set(STRATEGIES) - set(self.allow)
        return frozenset((*self.forbid, *unasked))


def make_options(options: Mapping[str, Any]) -> Options:
    """`Options` from keyword arguments, with an error that lists the known names for an unknown one."""
    known = list(Options.__dataclass_fields__)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else "help(alpa_lite.parallelize) lists the options"
            raise OptionError(f"{name}=: there is no such option; {hint}")
    return Options(**options)


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
    state_from: Any
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


def _check_conflicts(options: Options) -> None:
    """Raises OptionError for options that exclude each other."""

    def refuse(name: str, remedy: str) -> None:
        raise OptionError(f"{name}={getattr(options, name)!r}: {remedy}")

    if isinstance(options.method, Off) and options.num_microbatches not in ("auto", 1):
        refuse("num_microbatches", 'method="off" runs the step as it is; leave one of the two out')
    rest = options.method.rest if isinstance(options.method, Manual) else options.method
    if options.forbidden_strategies and (not isinstance(rest, Auto | Sharded) or options.plan is not None):
        refuse("forbid" if options.forbid else "allow", 'use method="auto", Sharded() or Manual(...), without plan=')
    for name in ("in_shardings", "out_shardings"):
        if getattr(options, name) is not None and (isinstance(rest, Pipeline) or options.plan is not None):
            raise OptionError(f'{name} places arguments on one mesh; use method="auto" or Sharded(), without plan=')
    for kind in ("argnums", "argnames"):
        named = {role: getattr(options, f"{role}_{kind}") for role in ("static", "batch", "state", "donate")}
        static, batch, state, donated = (set(() if one == "auto" else one) for one in named.values())
        if static & batch:
            refuse(f"static_{kind}", f"{sorted(static & batch)} cannot be static and the batch; {_LEAVE}")
        if state & (batch | static):
            refuse(
                f"state_{kind}",
                f"{sorted(state & (batch | static))} cannot be state and the batch, or static; {_LEAVE}",
            )
        if donated & static:
            refuse(f"donate_{kind}", "a static argument has no buffer to donate; leave it out")


_LEAVE = "leave them out of one of the two"


# -- what is made of the table ---------------------------------------------------------------------------------------


def descriptions() -> str:
    """Returns the descriptions of all options, as a section of a docstring."""
    return inspect.cleandoc(Options.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]


def option_descriptions() -> Mapping[tuple[str, ...], str]:
    """Names of options that are described together -> their description, in one line."""
    entries = re.findall(r"^  (\S[\w, ]*): (.*(?:\n   .*)*)", descriptions(), re.MULTILINE)
    return {tuple(names.split(", ")): " ".join(text.split()) for names, text in entries}


def summary(name: str) -> str:
    """Returns the first sentence of the description of an option."""
    text = next(text for names, text in option_descriptions().items() if name in names)
    return f"{text[0].upper()}{text[1:]}".partition(". ")[0].rstrip(".") + "."


def signature() -> inspect.Signature:
    """The signature of `parallelize` with each option as a keyword, for `help` and for completion at run time."""
    kinds = inspect.Parameter
    keywords = [
        kinds(one.name, kinds.KEYWORD_ONLY, default=one.default, annotation=StepOptions.__annotations__[one.name])
        for one in fields(Options)
    ]
    return inspect.Signature([kinds("fun", kinds.POSITIONAL_OR_KEYWORD, default=None), *keywords])
