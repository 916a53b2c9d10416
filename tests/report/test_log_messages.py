"""The library's log: one sentence for each planning and for each compilation, and the counts that a terminal sees."""

from __future__ import annotations

import logging
import re

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.report import progress
from tests.plans import gpt_plan, small_plan


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return w - 0.1 * grad, loss


def test_a_planning_is_one_sentence_of_what_why_and_how_long() -> None:
    from alpa_lite.report import log_messages

    for plan in (gpt_plan(), small_plan()):
        said = log_messages.planned("train_step", plan, "asked for")
        assert "\n" not in said
        assert re.match(r"planned train_step for \d+ \S.* \(asked for\): ", said)
        assert re.search(r"; predicted [\d.]+ \S+ a step and [\d.]+ (?:[KMG]i)?B of [\d.]+ GiB per device; in ", said)
    assert log_messages.compiled("train_step", 3, 1.5) == "compiled train_step: 3 executables in 1.50 s"


def test_one_line_for_each_planning_and_compilation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, int, int]] = []
    real = progress.Report.count

    def count(self: progress.Report, what: str, done: int, total: int, lasting: bool = False) -> None:
        counted.append((what, done, total))
        real(self, what, done, total, lasting)

    monkeypatch.setattr(progress.Report, "count", count)
    planned = alpa_lite.parallelize(step)
    w, x = jnp.ones((16, 8)), jnp.ones((32, 16))
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        state, _ = planned(w, x)
        planned(state, x)
        planned(jnp.ones((16, 8)), jnp.ones((64, 16)))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    plannings = [line for line in lines if line.startswith("planned step for 8 cpu")]
    assert [re.search(r"\(([^)]*)\)", line)[1] for line in plannings] == [  # type: ignore[index]
        "first signature of its arguments", "another signature of its arguments"
    ]  # fmt: skip
    assert sum(line.startswith("compiled step: 1 executable in ") for line in lines) == 2
    whats = {what for what, _, _ in counted}
    assert {"% of the search budget", "executables compiled"} <= whats
    assert all(0 <= done <= total for _, done, total in counted)


def test_pipelines_count_layers_stages_and_executables(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        progress.Report, "count", lambda self, what, done, total, lasting=False: counted.append((what, done, total))
    )

    def deep(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            top = x
            for i in range(2):
                top = jnp.tanh(top @ w[i])
            return (top**2).mean()

        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    method = alpa_lite.Pipeline(num_stages=2)
    planned = alpa_lite.parallelize(deep, method=method, num_microbatches=2)
    planned(jnp.ones((2, 16, 16)), jnp.ones((32, 16)))
    for what in ("layers priced", "stages planned", "executables compiled"):
        numbers = [(done, total) for name, done, total in counted if name == what]
        assert numbers and numbers == sorted(numbers), what
