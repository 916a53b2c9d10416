from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

import alpa_lite
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.tracing import tracing
from alpa_lite.report import dump
from alpa_lite.strategy import Factor, Rule
from tests.plans import small_plan

MATMUL = Rule(
    (Factor(16, "parallel"), Factor(32, "parallel"), Factor(8, "sum")), (((0,), (2,)), ((2,), (1,))), (((0,), (1,)),)
)


def test_stages_are_numbered_and_several_dumps_share_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with dump.stages(folder) as write:
            write("graph", "a program")
            write("mesh (4, 2)/choice", small_plan())
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["01_graph.txt", "02_mesh_4_2_choice.txt", "03_graph.txt", "04_mesh_4_2_choice.txt"]
    assert (folder / "01_graph.txt").read_text(encoding="utf-8") == "a program\n"
    assert (folder / "02_mesh_4_2_choice.txt").read_text(encoding="utf-8") == f"{small_plan()}\n"


def test_without_a_directory_nothing_is_made_into_text() -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError

    with dump.stages(None) as write:
        write("graph", Unprintable())


def test_rules_are_one_line_each() -> None:
    wanted = "[0 2] [2 1] -> [0 1]  0=16 parallel, 1=32 parallel, 2=8 sum (shardy)"
    assert dump.rule_text(MATMUL) == wanted
    assert dump.text({("dot_general", 3): MATMUL}) == f"(dot_general, 3)\n    {wanted}"


def test_a_traced_program_is_written_with_its_loops_and_lines() -> None:
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        total, _ = jax.lax.scan(lambda carry, row: (carry + row * 2.0, None), state, batch)
        return total

    args = (jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    traced = tracing.trace(step, args, {})
    written = dump.text(traced)
    assert "%0 state (state)" in written
    assert "%1 batch (batch)" in written
    assert ":f32[8,4]" in written
    lines = written.splitlines()
    scan = next(i for i, line in enumerate(lines) if " = scan " in line)
    body = next(i for i, line in enumerate(lines) if " = mul " in line)
    assert body > scan
    assert lines[body].startswith("    ")
    assert "test_dump.py" in lines[scan]
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    assert "4 parallel" in dump.text(rules)
    assert "kind=leaf" in dump.text(groups) and "name=state" in dump.text(groups)


def test_what_runs_outside_of_regions_is_written(tmp_path: Path) -> None:
    def step(state, batch):
        noise = jax.lax.rng_uniform(0.0, 1.0, batch.shape)
        loss, gradient = jax.value_and_grad(lambda w: (((batch + noise) @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - gradient}, loss

    args = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, jax.ShapeDtypeStruct((16, 8), jnp.float32)
    alpa_lite.make_plan(step, *args, cluster="a100", dump_dir=tmp_path)
    (program,) = tmp_path.glob("*_lowering.txt")
    assert "rng_uniform" in program.read_text()


def test_a_pipeline_is_written_with_its_layers_stages_and_lists(tmp_path: Path) -> None:
    def step(state, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return (x**2).mean()

        value, gradient = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - g, state, gradient), value

    args = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4, jax.ShapeDtypeStruct((16, 8), jnp.float32)
    method = alpa_lite.Pipeline(num_stages=2, schedule="gpipe", submesh_shapes=((4,), (4,)))
    alpa_lite.make_plan(step, *args, cluster="a100", method=method, num_microbatches=2, dump_dir=tmp_path)
    slicing, lowered, program = (
        next(tmp_path.glob(f"*_{name}.txt")).read_text() for name in ("slicing", "lowering", "programs")
    )
    assert "num_microbatches=2, schedule=gpipe" in slicing and "StageChoice(first=" in slicing
    assert "remat=(none, none)" in program
    assert "tanh" in lowered
    assert "0: Executable name=stage 0" in program
    assert "run stage 1 forward, micro-batch 1" in program
    assert max(map(len, program.splitlines())) < 1000
    assert "PlannedStage: see " in program  # which an earlier file has
