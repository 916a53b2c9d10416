"""The library's log: one sentence for each planning and for each compilation, and the counts that a terminal sees."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.report import progress, summary
from tests.plans import gpt_plan, small_plan


def step(w: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(w: list[jax.Array]) -> jax.Array:
        top = x
        for one in w:
            top = jnp.tanh(top @ one)
        return (top**2).mean()

    value, grads = jax.value_and_grad(loss)(w)
    return [one - 0.1 * grad for one, grad in zip(w, grads, strict=True)], value


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    counts: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        progress.Report, "count", lambda self, what, done, total, lasting=False: counts.append((what, done, total))
    )
    return counts


def test_a_planning_is_one_sentence() -> None:
    for plan in (gpt_plan(), small_plan()):
        said = summary.planned_message("train_step", plan, "asked for")
        assert "\n" not in said
        assert re.match(r"planned train_step for \d+ \S.* \(asked for\): ", said)
        assert re.search(r"; predicted [\d.]+ \S+ a step and [\d.]+ (?:[KMG]i)?B of [\d.]+ GiB per device; in ", said)
    assert summary.compiled_message("train_step", 3, 1.5) == "compiled train_step: 3 executables in 1.50 s"


def test_one_line_for_each_planning_and_compilation(
    caplog: pytest.LogCaptureFixture, counted: list[tuple[str, int, int]]
) -> None:
    planned = alpa_lite.parallelize(step)
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        state, _ = planned([jnp.ones((16, 8))], jnp.ones((32, 16)))
        planned(state, jnp.ones((32, 16)))
        planned([jnp.ones((16, 8))], jnp.ones((64, 16)))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    reasons = [re.search(r"\(([^)]*)\)", line) for line in lines if line.startswith("planned step for 8 cpu")]
    wanted = ["first signature of its arguments", "another signature of its arguments"]
    assert [found[1] for found in reasons if found] == wanted
    assert sum(line.startswith("compiled step: 1 executable in ") for line in lines) == 2
    assert {"% of the search budget", "executables compiled"} <= {what for what, _, _ in counted}
    assert all(0 <= done <= total for _, done, total in counted)


def test_pipelines_count_layers_stages_and_executables(counted: list[tuple[str, int, int]]) -> None:
    planned = alpa_lite.parallelize(step, method=alpa_lite.Pipeline(num_stages=2), num_microbatches=2)
    planned([jnp.ones((16, 16))] * 2, jnp.ones((32, 16)))
    for what in ("layers priced", "stages planned", "executables compiled"):
        numbers = [(done, total) for name, done, total in counted if name == what]
        assert numbers and numbers == sorted(numbers), what
