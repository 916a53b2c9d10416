"""Eight virtual CPU devices for every test, and an end to executables that no test needs any more."""

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from alpa_lite.passes.factors import rules

if jax.__version_info__ < (0, 11) and "XLA_FLAGS" not in os.environ:
    # The older emitters of XLA's CPU compiler take half as long. JAX 0.12 has the newer ones alone, as users do.
    os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for processes that tests start
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

gc.set_threshold(100_000, 20, 20)


def pytest_collection_finish() -> None:
    """Modules survive every collection of garbage, and need not be looked through in each."""
    gc.freeze()


MAPPINGS = 20_000
"""Linux lets a process map 65,530 regions of memory. Every executable of XLA's CPU compiler takes several, and JAX
keeps executables for as long as it runs: a worker that has run a thousand tests is killed by the next compilation."""


@pytest.fixture(autouse=True)
def compiled_quickly(request: pytest.FixtureRequest) -> None:
    """Half of the time of tests is the compiler's, and without LLVM's optimisations it takes half of that.

    What these could change are the last bits of floats: tests that are marked `optimised`, of every model and of every
    path, compile as users do.
    """
    jax.config.update("jax_disable_most_optimizations", request.node.get_closest_marker("optimised") is None)


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def tables_that_hold() -> None:
    """An error in a table of factor rules fails the test; users get an operation that is not sharded."""
    rules.TABLES_MUST_HOLD.set(True)


@pytest.fixture(autouse=True)
def bounded_mappings() -> Iterator[None]:
    """Drops JAX's executables whenever they take a third of what a process may map."""
    yield
    maps = Path("/proc/self/maps")
    if next(_tests) % 10 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        jax.clear_caches()
        gc.collect()
