import dataclasses
import json
import os
import pathlib
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite import Auto, DataParallel, Manual, Sharded, TensorParallel, Zero
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.options import Method, Off, Options, method_from_json

MANUAL = Manual({"p['w']": P(None, ("data", "model")), "batch": P("data")}, (4, 2), ("data", "model"))


def make(**arguments: Any) -> Options:
    """`Options` as callers of `parallelize` give them, before conversion."""
    return Options(**arguments)


METHODS = (
    Auto(), Off(), Sharded(), Sharded((4, 2)), Sharded(remat="layer"), DataParallel(), Zero(stage=3), TensorParallel(),
    MANUAL,
)  # fmt: skip


def test_defaults():
    options = Options()
    assert options.method == Auto() and options.cluster is None
    assert options.batch_argnums == options.donate_argnums == options.num_microbatches == "auto"
    assert options.static_argnums == options.static_argnames == options.batch_argnames == ()
    assert options.communication == "explicit" and options.verify == "shardy"
    for path in (None, "dump", pathlib.Path("dump")):
        assert Options(dump_dir=path).dump_dir in (None, "dump", pathlib.Path("dump"))
        assert path is None or os.fspath(path) == "dump"


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.describe())
def test_methods_survive_json_and_hash(method):
    again = method_from_json(json.loads(json.dumps(method.to_json())))
    assert again == method and hash(again) == hash(method)
    assert Options(method=method).method is method


def test_conversions():
    options = make(method="off", cluster="h100", batch_argnums=1, static_argnums=[2, 3], static_argnames="n")
    assert options.method == Off() and options.cluster == Cluster.preset("h100")
    assert (options.batch_argnums, options.static_argnums, options.static_argnames) == ((1,), (2, 3), ("n",))
    assert Sharded([4, 2]) == Sharded((4, 2))  # type: ignore[arg-type]
    assert hash(Options()) == hash(Options())
    assert len({method.describe() for method in METHODS}) == len(METHODS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.method = Off()  # type: ignore[misc]


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


@pytest.mark.parametrize("data", [{}, {"method": "Magic"}, {"method": "Zero"}, {"method": "Auto", "x": 1}])
def test_damaged_methods_are_refused(data):
    with pytest.raises(OptionError):
        method_from_json(data)


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 * 2**30), ("1.5 gib", 3 * 2**29), ("80 GB", 80 * 10**9), ("512MiB", 2**29)]
)
def test_memory_as_text(text, size):
    assert Options(memory_per_device=text).memory_per_device == size  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["16", "much", "16 PB", "-1 GiB", "0 GiB"])
def test_memory_as_text_that_names_no_size(text):
    with pytest.raises(OptionError, match="16 GiB"):
        Options(memory_per_device=text)  # type: ignore[arg-type]
