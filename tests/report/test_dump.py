"""The files of `dump_dir`: one for each pass, in order, that people can read."""

from pathlib import Path

import jax

import alpa_lite
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.tracing import tracing
from alpa_lite.report import dump
from gallery.batches import f32
from gallery.steps import mlp
from tests.plans import small_plan


def test_stages_are_numbered_and_several_dumps_share_a_directory(tmp_path: Path) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError

    folder = tmp_path / "a" / "b"
    for _ in range(2):
        with dump.stages(folder) as write:
            write("graph", "a program")
            write("mesh (4, 2)/choice", small_plan())
    with dump.stages(None) as write:
        write("graph", Unprintable())
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["01_graph.txt", "02_mesh_4_2_choice.txt", "03_graph.txt", "04_mesh_4_2_choice.txt"]
    assert (folder / "01_graph.txt").read_text(encoding="utf-8") == "a program\n"
    assert (folder / "02_mesh_4_2_choice.txt").read_text(encoding="utf-8") == f"{small_plan()}\n"


def test_a_traced_program_is_written_with_its_loops_and_lines(tmp_path: Path) -> None:
    def step(state: jax.Array, batch: jax.Array) -> jax.Array:
        total, _ = jax.lax.scan(lambda carry, row: (carry + row * 2.0, None), state, batch)
        return total

    args = (f32(4), f32(8, 4))
    traced = tracing.trace(step, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    with dump.stages(tmp_path) as write:
        for value in (traced, rules, grouping.group(traced, rules)):
            write("value", value)
    program, factored, grouped = (file.read_text() for file in sorted(tmp_path.iterdir()))
    for wanted in ("%0 state (state)", "%1 batch (batch)", ":f32[8,4]"):
        assert wanted in program
    lines = program.splitlines()
    scan, body = (next(i for i, line in enumerate(lines) if f" = {name} " in line) for name in ("scan", "mul"))
    assert body > scan and lines[body].startswith("    ") and "test_dump.py" in lines[scan]
    assert "4 parallel" in factored and "kind=leaf" in grouped


def test_operations_outside_of_regions_are_written(tmp_path: Path) -> None:
    def step(w, batch):
        noise = jax.lax.rng_uniform(0.0, 1.0, batch.shape)
        loss, gradient = jax.value_and_grad(lambda w: (((batch + noise) @ w) ** 2).mean())(w)
        return w - gradient, loss

    args = f32(8, 8), f32(16, 8)
    alpa_lite.make_plan(step, *args, cluster="a100", method=alpa_lite.DataParallel(), dump_dir=tmp_path)
    (program,) = tmp_path.glob("*_lowering.txt")
    assert "rng_uniform" in program.read_text()


def test_a_pipeline_is_written_with_its_layers_stages_and_lists(tmp_path: Path) -> None:
    step, args = mlp(8, 16, 4)
    method = alpa_lite.Pipeline(num_stages=2, schedule="gpipe", submesh_shapes=((4,), (4,)))
    alpa_lite.make_plan(step, *args, cluster="a100", method=method, num_microbatches=2, dump_dir=tmp_path)
    slicing, lowered, program = (
        next(tmp_path.glob(f"*_{name}.txt")).read_text() for name in ("slicing", "lowering", "programs")
    )
    assert "num_microbatches=2, schedule=gpipe" in slicing and "StageChoice(first=" in slicing
    assert "tanh" in lowered
    for wanted in ("remat=(none, none)", "0: Executable(name=stage 0", "run stage 1 forward, micro-batch 1"):
        assert wanted in program
    assert max(map(len, program.splitlines())) < 1000
    assert "PlannedStage: see " in program  # which an earlier file has
