"""Targets by name, and executables lowered for devices that are described alone."""

from __future__ import annotations

import importlib.util

import jax
import pytest

import alpa_lite
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.errors import OptionError
from alpa_lite.runtime import aot, load
from alpa_lite.runtime.aot import Target, target_of
from gallery.steps import mlp
from tests.marks import slow

EIGHT = Cluster.preset("v5e")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("v5e:2x4", Target("tpu", "v5e", (2, 4))),
        ("V5E:4x2", Target("tpu", "v5e", (4, 2))),
        ("v4:2x2x1*2", Target("tpu", "v4", (2, 2, 1), 2)),
        ("cuda:h100.txtpb", Target("cuda", "h100.txtpb", (1, 8))),
        (None, Target("tpu", "v5e", (2, 4))),
    ],
)
def test_targets(text: str | None, target: Target) -> None:
    assert target_of(text, EIGHT) == target
    assert target.num_devices == 8
    if text is not None:
        assert target_of(str(target), EIGHT) == target


@pytest.mark.parametrize(
    ("text", "words"),
    [("v5e:4x4", "has 16 devices, and the plan is for 8"), ("v5e", "v5e:2x4"), ("v99:2x4", "v5p"), ("cuda:", "file")],
)
def test_targets_that_cannot_be(text: str, words: str) -> None:
    with pytest.raises(OptionError) as error:
        target_of(text, EIGHT)
    assert words in str(error.value) and text in str(error.value)


def test_targets_of_clusters() -> None:
    assert target_of("TPU7x:2x2x1", Cluster.preset("v7")).num_devices == 8  # two devices a chip
    assert target_of(None, Cluster.preset("v7")) == Target("tpu", "v7", (2, 2, 1))
    with pytest.raises(OptionError, match="give one"):
        target_of(None, Cluster.preset("h100"))


def test_a_compiler_that_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    for target, words in (
        (Target("tpu", "v5e", (2, 4)), "tpu-verify"),
        (Target("cuda", __file__, (8,)), "cuda-verify"),
        (Target("cuda", "no/such/file", (8,)), "cannot be read"),
    ):
        with pytest.raises(OptionError, match=words):
            aot.devices_of(target)


@pytest.mark.parametrize("pipeline", [False, slow(True)])
def test_every_executable_is_lowered_as_it_would_run(pipeline: bool) -> None:
    """Compiled for the devices that are here: the same programs, with donation, as those that a call compiles."""
    step, args = mlp(16, 16, 2)
    method = alpa_lite.Pipeline(num_stages=2) if pipeline else alpa_lite.DataParallel()
    options = make_options({"method": method, "num_microbatches": 2 if pipeline else "auto"})
    found = compile_step(step, args, {}, options, Cluster.preset("cpu"))
    described = list(aot.compile_for_devices(found.staged, found.plan, jax.devices()))
    here = load.load(found.staged, found.plan).compiled_executables()
    assert len(described) == len(here) == len(found.staged.program.executables)
    for one, other in zip(described, here, strict=True):
        a, b = one.memory_analysis(), other.memory_analysis()
        assert (a.argument_size_in_bytes, a.alias_size_in_bytes) == (b.argument_size_in_bytes, b.alias_size_in_bytes)
