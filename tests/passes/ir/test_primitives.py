"""Every primitive that a pass names exists in a JAX that is supported, so that a typo in a name cannot pass unseen."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import pathlib
from collections.abc import Iterator

from jax.extend.core import Primitive

import alpa_lite
from alpa_lite.passes.factors import tables
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.local import forms
from alpa_lite.passes.tracing import conversion

PASSES = pathlib.Path(alpa_lite.__file__).parents[1] / "passes"
MODULES = (
    "jax.lax.linalg", "jax.nn", "jax.ffi", "jax.scipy.special", "jax.experimental.pallas",
    "jax.experimental.scheduling_groups",
)  # fmt: skip
ENDED = frozenset({"call", "closed_call", "core_map"})
"""Primitives of JAX 0.10 that later versions do not have."""
NEW = frozenset({"log2", "one_minus_square", "polynomial"})
"""Primitives that JAX 0.10 does not have yet."""


@functools.cache
def known() -> frozenset[str]:
    for module in MODULES:
        importlib.import_module(module)
    gc.unfreeze()  # what is frozen is not listed
    return frozenset(one.name for one in gc.get_objects() if isinstance(one, Primitive)) | ENDED | NEW


def compared() -> Iterator[tuple[str, str]]:
    """(place, name) of every string that a pass compares with the name of an operation."""
    for path in sorted(PASSES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "name":
                for one in ast.walk(ast.Tuple(node.comparators, ast.Load())):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        yield f"{path.name}:{node.lineno}", one.value


SETS = {name: value for name, value in vars(primitives).items() if isinstance(value, frozenset)}


def test_the_names_in_sets_and_tables_exist():
    assert len(SETS) > 20
    assert not {name: sorted(value - known()) for name, value in SETS.items() if value - known()}
    for table in (tables.TABLE, tables.SHARDY, forms.FORMS, conversion.CALL_BODY):
        assert not set(table) - known()


def test_the_names_that_passes_compare_with_exist():
    names = known()
    other_languages = ("schedules", "stablehlo.", "func.", "sdy.")
    found = [(place, name) for place, name in compared() if not name.startswith(other_languages)]
    assert len(found) > 30
    assert not [(place, name) for place, name in found if name not in names and name not in {"follow"}]


def test_primitives_of_other_versions_alone_are_used():
    """A primitive that no set mentions any more leaves the lists of this test, too."""
    assert frozenset().union(*SETS.values()) | set(conversion.CALL_BODY) >= ENDED | NEW
