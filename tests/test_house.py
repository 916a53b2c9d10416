"""The plan of the house: rooms stand in import order, and no module imports itself by way of others."""

import ast
import graphlib
import importlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = (
    "ir", "tracing", "factors", "costs", "local", "blockwise", "microbatches", "layers", "tokens", "sharding",
    "lowering", "stages", "programs", "checks", "plans", "search",
)  # fmt: skip
"""The rooms of `passes/`, each importing only from those before it."""


def modules() -> dict[str, Path]:
    """Every module of the library by its import name."""
    paths = [*(ROOT / "alpa_lite").glob("*.py")]
    folders = ("_jax", "calibration", "checkpoint", "cli", "cluster", "compilation", "ir", "plan", "processes")
    paths += [path for folder in (*folders, "report") for path in (ROOT / "alpa_lite" / folder).rglob("*.py")]
    named = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths}
    for folder in ("passes", "runtime", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            named[".".join(("alpa_lite", *path.relative_to(ROOT).with_suffix("").parts))] = path
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """The library's modules that a module imports, at its top, within functions, or for type checkers alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                full = f"{node.module}.{name.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
    return found & known.keys()


KNOWN = modules()
ARROWS = {name: imports(path, KNOWN) for name, path in KNOWN.items()}


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["alpa_lite", "passes"] and len(parts) > 2 else None


def test_every_module_of_the_passes_is_in_a_room():
    assert {room(name) for name in KNOWN if name.startswith("alpa_lite.passes.")} == set(ROOMS)


@pytest.mark.parametrize("own", ROOMS)
def test_rooms_import_only_from_rooms_before_them(own):
    back = {
        (name, other)
        for name, others in ARROWS.items()
        for other in others
        if room(name) == own and (there := room(other)) and ROOMS.index(there) > ROOMS.index(own)
    }
    assert not back


def test_no_name_of_a_room_hides_a_module_of_it():
    """`from alpa_lite.passes.plans import replay` must mean the module, whatever the room's `__init__` has."""
    for name, path in KNOWN.items():
        if path.name != "__init__.py":
            importlib.import_module(name)
            package, _, short = name.rpartition(".")
            assert isinstance(getattr(importlib.import_module(package), short), ModuleType), name


def test_no_module_imports_itself_by_way_of_others():
    graphlib.TopologicalSorter(ARROWS).prepare()


FACE = "alpa_lite.plan.plan"
"""The plan as users have it, which prints and compares itself: passes write its record."""


def test_passes_touch_no_runtime_and_print_nothing():
    for name, others in ARROWS.items():
        if name.startswith("alpa_lite.passes"):
            assert not {o for o in others if o.startswith(("alpa_lite.runtime", "alpa_lite.report", FACE))}, name


@pytest.mark.parametrize("package", ["_jax", "ir", "cluster", "plan"])
def test_values_import_neither_passes_nor_reports_nor_the_runtime(package):
    allowed = ("_jax", "ir", "cluster", "calibration", "plan", "errors")
    others = {
        other
        for name, found in ARROWS.items()
        if f"{name}.".startswith(f"alpa_lite.{package}.") and name != FACE
        for other in found
    }
    assert not {other for other in others if other.split(".")[1] not in allowed}


def test_packages_have_at_most_sixteen_modules():
    sizes = Counter(name.rpartition(".")[0] for name, path in KNOWN.items() if path.name != "__init__.py")
    assert {p: n for p, n in sizes.items() if n > 16} == {}


COMPILED = {"_reply": 8, "descend": 9}
"""Loops that Numba compiles, which take their arrays one by one, and the number of these."""


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_modules_and_functions_are_short(name):
    """Modules have 400 lines, functions 60, and 7 parameters that may be given by position.

    Private functions have 7 in all, since no caller needs a name for each. Parameters of commands are options.
    """
    text = KNOWN[name].read_text()
    assert text.count("\n") <= 400
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (function.end_lineno or 0) - function.lineno < 60, function.name
            given = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            if function.name.startswith("_") and not function.name.endswith("__"):
                given += [a.arg for a in function.args.kwonlyargs]
            if not name.startswith("alpa_lite.cli."):
                assert len({*given} - {"self", "cls"}) <= COMPILED.get(function.name, 7), function.name
