import dataclasses
import os
import pathlib
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite import Auto, DataParallel, Manual, Sharded, TensorParallel, Zero, options
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.options import Method, Off, Options

MANUAL = Manual({"p['w']": P(None, ("data", "model")), "batch": P("data")}, (4, 2), ("data", "model"))


def make(**arguments: Any) -> Options:
    """`Options` as callers of `parallelize` give them, before conversion."""
    return Options(**arguments)


METHODS = (
    Auto(), Off(), Sharded(), Sharded((4, 2)), Sharded(remat="layer"), DataParallel(), Zero(stage=3), TensorParallel(),
    MANUAL,
)  # fmt: skip


def test_defaults():
    usual = Options()
    assert usual.method == Auto() and usual.cluster is None
    assert usual.batch_argnums == usual.donate_argnums == usual.num_microbatches == "auto"
    assert usual.static_argnums == usual.static_argnames == usual.batch_argnames == ()
    assert usual.communication == "explicit" and usual.verify == "shardy"
    for path in (None, "dump", pathlib.Path("dump")):
        assert Options(dump_dir=path).dump_dir in (None, "dump", pathlib.Path("dump"))
        assert path is None or os.fspath(path) == "dump"


def test_conversions():
    made = make(method="off", cluster="h100", batch_argnums=1, static_argnums=[2, 3], static_argnames="n")
    assert made.method == Off() and made.cluster == Cluster.preset("h100")
    assert (made.batch_argnums, made.static_argnums, made.static_argnames) == ((1,), (2, 3), ("n",))
    assert Sharded([4, 2]) == Sharded((4, 2))  # type: ignore[arg-type]
    assert hash(Options()) == hash(Options())
    assert len({method.describe() for method in METHODS}) == len(set(METHODS)) == len(METHODS)
    assert all(Options(method=method).method is method for method in METHODS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.method = Off()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("method", "automatic", "Zero\\(stage=2\\)"), ("method", Zero, "call it"),
        ("method", Method(), "TensorParallel"), ("cluster", "h1000", "p3.16xlarge"), ("cluster", 8, "preset"),
        ("memory_per_device", 0, "bytes above 0"), ("memory_per_device", "16", "bytes above 0"),
        ("num_microbatches", 0, "positive number"), ("num_microbatches", -1, "positive number"),
        ("num_microbatches", 2.0, "positive number"), ("num_microbatches", True, "positive number"),
        ("num_microbatches", "many", "auto"), ("allow_inexact", 1, "True or False"),
        ("batch_argnums", "all", "auto"), ("batch_argnums", -1, "from 0"), ("batch_argnums", (1, 1), "at most once"),
        ("static_argnums", "auto", "argument number"), ("static_argnums", True, "argument number"),
        ("donate_argnums", 1.0, "auto"), ("batch_argnames", ("a b",), "name of a parameter"),
        ("static_argnames", 3, "name of a parameter"), ("communication", "implicit", "explicit"),
        ("verify", True, "shardy"), ("effort", "much", "thorough"), ("planning_time_limit", 0, "seconds"),
        ("planning_time_limit", float("nan"), "seconds"), ("planning_time_limit", True, "seconds"),
        ("dump_dir", 3, "directory"), ("cache_dir", 3, "directory"),
    ],
)  # fmt: skip
def test_bad_values_are_named_with_a_remedy(name, value, remedy):
    with pytest.raises(OptionError, match=remedy) as error:
        make(**{name: value})
    assert str(error.value).startswith(f"{name}=")


PAGE = pathlib.Path(__file__).parents[1] / "docs" / "guide" / "options.md"


def guide() -> str:
    """The page of all options: `python -c "from tests import test_options as t; t.PAGE.write_text(t.guide())"`."""
    defaults = {one.name: repr(one.default).replace("'", '"') for one in dataclasses.fields(Options)}
    rows = ""
    for names, text in options.option_descriptions().items():
        cells = [", ".join(f"`{word}`" for word in words) for words in (names, [defaults[name] for name in names])]
        rows += f"| {cells[0]} | {cells[1]} | {text} |\n"
    return f"{PAGE.read_text().partition('|---|---|---|')[0]}|---|---|---|\n{rows}"


def test_every_option_is_described_in_the_guide():
    assert [name for names in options.option_descriptions() for name in names] == [
        f.name for f in dataclasses.fields(Options)
    ]
    assert PAGE.read_text() == guide(), guide.__doc__


def test_conflicts():
    with pytest.raises(OptionError, match="static_argnums"):
        make(batch_argnums=1, static_argnums=(1, 2))
    with pytest.raises(OptionError, match="static_argnames"):
        make(batch_argnames="n", static_argnames="n")
    with pytest.raises(OptionError, match="donate_argnums"):
        make(donate_argnums=(0,), static_argnums=0)
    assert make(batch_argnums=1, static_argnums=2).batch_argnums == (1,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"w": ("data",)}, (4,), ("data",)), "PartitionSpec"),
        (({"w": P("x")}, (4,), ("data",)), "'x'"),
        (({"w": P("data", "data")}, (4,), ("data",)), "one dim only"),
        (({}, (4, 2), ("data",)), "one name for each axis"),
        (({}, (2, 2), ("a", "a")), "distinct"),
        (({}, (0,), ("a",)), "devices along each axis"),
    ],
)
def test_bad_manual(arguments, message):
    with pytest.raises(OptionError, match=message):
        Manual(*arguments)


@pytest.mark.parametrize(
    ("make", "values", "name"),
    [(Sharded, [(), (0,), (2.0,), "8", (True,)], "mesh_shape"), (Zero, [0, 4, "2", True], "stage")],
)
def test_bad_mesh_shapes_and_zero_stages(make, values, name):
    for value in values:
        with pytest.raises(OptionError, match=name):
            make(value)


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("1.5 gib", 3 * 2**29), ("80 GB", 80 * 10**9), ("512MiB", 2**29)]
)
def test_memory_as_text(text, size):
    assert Options(memory_per_device=text).memory_per_device == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["16", "much", "16 PB", "-1 GiB", "0 GiB"])
def test_memory_as_text_that_names_no_size(text):
    with pytest.raises(OptionError, match="16 GiB"):
        Options(memory_per_device=text)  # type: ignore[arg-type]
