"""Plans as values: JSON and back, and every file that must be refused."""

import dataclasses
import functools
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from alpa_lite.cluster import Cluster
from alpa_lite.errors import PlanError
from alpa_lite.ir import json_codec
from alpa_lite.ir.timeline import Event, Timeline
from alpa_lite.plan import decisions, records
from alpa_lite.plan import plan as plan_module
from alpa_lite.plan.plan import Plan
from tests.plans import gpt_plan, small_plan

texts = st.text("a/'\"\\ \n{é\u2028\U0001f600", max_size=8)
axes = st.lists(st.sampled_from("xyz"), unique=True, max_size=3).map(tuple)
specs = st.lists(st.one_of(st.none(), st.sampled_from("xyz"), axes), max_size=3).map(lambda items: P(*once(items)))
finite = st.floats(0, 1e6)
sizes = st.integers(0, 2**60)
events = st.builds(Event, sizes, finite, finite, texts, st.sampled_from(["forward", "step", "transfer"]), sizes, sizes)
KNOWN: dict[Any, st.SearchStrategy[Any]] = {
    str: texts, int: sizes, float: st.floats(allow_nan=False), bool: st.booleans(), type(None): st.none(), P: specs,
    Cluster: st.sampled_from(["a100", "v5p"]).map(Cluster.preset),
    Timeline: st.builds(Timeline, st.lists(events, max_size=2).map(tuple), sizes, texts),
}  # fmt: skip


def once(items: list) -> list:
    """The entries with each axis used once, as PartitionSpec on a mesh demands."""
    seen: set[str] = set()
    out = []
    for item in items:
        mine = () if item is None else (item,) if isinstance(item, str) else item
        fresh = tuple(axis for axis in mine if axis not in seen)
        seen.update(fresh)
        out.append(item if fresh == mine else fresh)
    return out


@functools.cache
def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, by the annotations of its fields."""
    if kind in KNOWN:
        return KNOWN[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=2).map(tuple) if args[-1] is ... else st.tuples(*map(values, args))
    if origin is Mapping:
        return st.dictionaries(texts, values(args[1]), max_size=2)
    if args:
        return st.one_of(*map(values, args))
    return st.builds(kind, **fields(kind))


def fields(kind: type, *left_out: str) -> dict[str, st.SearchStrategy[Any]]:
    """The values of the fields of a dataclass."""
    return {name: values(own) for name, own in typing.get_type_hints(kind).items() if name not in left_out}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans whose lists have the lengths that belong together."""
    parts, moved = draw(values(tuple[records.Stage, ...])) or (small_plan().stages[0],), draw(collectives)
    rest = draw(
        st.fixed_dictionaries(fields(records.PlanRecord, "stages", "num_stages", "collectives", "collective_seconds"))
    )
    seconds = tuple(draw(KNOWN[float]) for _ in moved)
    return Plan(stages=parts, num_stages=len(parts), collectives=moved, collective_seconds=seconds, **rest)


collectives = st.lists(values(records.Collective), max_size=3).map(tuple)


@given(plans())
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
def test_json_round_trip_is_the_identity(plan: Plan) -> None:
    written = json.dumps(plan.to_json(), allow_nan=False)
    read = Plan.from_json(json.loads(written))
    assert read == plan
    assert hash(read) == hash(plan)
    assert json.dumps(read.to_json()) == written


def test_files_round_trip_and_are_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    small_plan().save(file)
    gpt_plan().save(file)
    assert Plan.load(file) == gpt_plan()
    assert Plan.load(str(file)).stages[0].inputs["batch['tokens']"] == P("data")
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_numpy_numbers_are_written_as_numbers() -> None:
    plan = dataclasses.replace(small_plan(), step_seconds=np.float32(0.5), memory_per_device=np.int64(7))  # type: ignore[arg-type]
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert (read.step_seconds, read.memory_per_device) == (0.5, 7)


def test_specs_are_nested_lists() -> None:
    data = small_plan().to_json()["plan"]
    assert data["stages"][0]["arguments"][0]["spec"] == ["x"]
    stage = dataclasses.replace(
        small_plan().stages[0],
        arguments=(records.Leaf("a", (8, 8, 8), "float32", 2048, "state", P(None, ("x", "y"), "z")),),
    )
    data = dataclasses.replace(small_plan(), stages=(stage,)).to_json()["plan"]
    assert data["stages"][0]["arguments"][0]["spec"] == [None, ["x", "y"], "z"]


def test_bytes_per_device_divides_by_the_axes_of_the_spec() -> None:
    stage = gpt_plan().stages[0]
    by_path = {leaf.path: leaf for leaf in stage.arguments}
    kernel = by_path["state['opt'][0].mu['h_0']['mlp']['up']['kernel']"]
    assert stage.bytes_per_device(kernel) == 768 * 3072 * 4 // 8
    assert stage.bytes_per_device(by_path["state['params']['wpe']['embedding']"]) == 1024 * 768 * 4


def test_chosen_tells_alternatives_with_equal_axes_apart() -> None:
    step = decisions.Outcome(1.0, 0.0, 0.0, 1.0, 0, 1, 0)
    whole = decisions.Alternative((("x",),), "[x]", 1.0, 0.0, 0.0, 1, 1.0, step, True)
    partial = dataclasses.replace(whole, partial=("y",))
    decision = decisions.Decision("k", "add", "", 1, (8,), (("x",),), 1.0, (whole, partial), partial=("y",))
    assert decision.chosen_alternative is partial
    assert dataclasses.replace(decision, partial=()).chosen_alternative is whole
    assert dataclasses.replace(decision, strategy=((),)).chosen_alternative is None


@pytest.mark.parametrize("field", ["collective_seconds", "stages"])
def test_lists_that_do_not_match_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=r"collectives|num_stages"):
        dataclasses.replace(gpt_plan(1), **{field: ()})


def _damage(tmp_path: Path, change) -> Path:
    data = gpt_plan(1).to_json()
    change(data)
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(data))
    return file


def test_another_schema_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    file = _damage(tmp_path, lambda data: data.update(schema=99))
    with pytest.raises(PlanError, match=rf"damaged\.json.*version 99.*version {plan_module.SCHEMA}"):
        Plan.load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["plan"].pop("solver"), "'solver' is missing"),
        (lambda d: d["plan"].update(extra=1), "'extra' is unknown"),
        (lambda d: d["plan"].update(num_devices="8"), "num_devices: expected int, found str"),
        (lambda d: d["plan"].update(num_devices=True), "num_devices: expected int, found bool"),
        (lambda d: d["plan"].update(step_seconds=None), "step_seconds: expected a number, found NoneType"),
        (lambda d: d["plan"].update(notes="text"), "notes: expected a list, found str"),
        (lambda d: d["plan"].update(ingredients=[]), "ingredients: expected an object, found list"),
        (lambda d: d["plan"]["stages"][0]["arguments"][3].update(spec=[{}]), r"arguments\[3\]\.spec\[0\]"),
        (lambda d: d["plan"]["collectives"].pop(), "collectives but"),
        (lambda d: d["plan"].update(cluster={}), "cluster: "),
        (lambda d: d.update(plan=[]), "expected an object, found list"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(tmp_path: Path, change, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(_damage(tmp_path, change))
    assert "damaged.json" in str(caught.value)


@pytest.mark.parametrize("content", [b'{"format": "alpa_lite.Plan", "sch', b"\xff\xfe\x00", b"", b"[" * 100_000])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "cut.json"
    file.write_bytes(content)
    with pytest.raises(PlanError, match=r"cut\.json"):
        Plan.load(file)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_plan().save(tmp_path / "large.json")
    monkeypatch.setattr(json_codec, "MAX_BYTES", 1000)
    with pytest.raises(PlanError, match=r"large\.json.*more than 1,000 bytes"):
        Plan.load(tmp_path / "large.json")


def test_files_of_before_are_read() -> None:
    data = gpt_plan(1).to_json()
    assert "over_step" not in data["plan"]["stages"][0]["memory"]  # which files have had since
    memory = dataclasses.replace(gpt_plan(1).stages[0].memory, over_step={"params": (1, 2)})
    plan = dataclasses.replace(gpt_plan(1), stages=(dataclasses.replace(gpt_plan(1).stages[0], memory=memory),))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert Plan.from_json(data) == gpt_plan(1) != plan


@pytest.mark.parametrize("content", ["[]", "{}", "3", '{"format": "another"}'])
def test_json_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(PlanError, match=r"other\.json' is not an alpa_lite plan"):
        Plan.load(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nowhere"):
        Plan.load(tmp_path / "nowhere.json")
