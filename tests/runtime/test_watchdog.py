"""A job that stands still says where each process is, and ends if it shall."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite.errors import OptionError
from alpa_lite.runtime.debug import watchdog
from tests.processes import driver
from tests.test_daily_use import examples, initial, parallel, train

STANDING = """
import sys
import time
import jax
import numpy as np
import alpa_lite

alpa_lite.initialize(heartbeat_timeout_seconds=30)

@alpa_lite.parallelize(method=alpa_lite.DataParallel())
def sgd(w, x):
    return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

w = np.ones((4, 2), np.float32)
x = np.ones((8, 4), np.float32)
jax.block_until_ready(sgd(w, x))  # planning and compiling stand still for as long as they take
with alpa_lite.Watchdog(report_after=1.0, end_after=8.0):
    for number in range(4):
        if number == 2 and jax.process_index() == 1:
            time.sleep(600)  # a loader that has nothing
        w = sgd(w, x)
        jax.block_until_ready(w)
"""


def wait_for(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match=r"report_after=0: give a positive number"):
        alpa_lite.Watchdog(0)
    with pytest.raises(OptionError, match=r"end_after=5: give at least report_after=10"):
        alpa_lite.Watchdog(10, 5)


def test_it_says_which_step_and_that_nothing_runs(caplog: pytest.LogCaptureFixture) -> None:
    step = parallel(train, "zero")
    state, _ = step(initial(), examples(16))
    with caplog.at_level(logging.WARNING, watchdog.__name__), alpa_lite.Watchdog(report_after=0.1) as one:
        assert one.describe() == "before its first step"
        state, loss = step(state, examples(16))
        jax.block_until_ready((state, loss))
        assert one.describe() == "between steps, after step 1 of train"
        step(state, examples(16))
        wait_for(lambda: "This process: between steps, after step 2 of train" in caplog.text)
        with one.activity("saving"):
            assert one.describe() == "saving"
    assert not watchdog.active
    count = len(caplog.messages)
    time.sleep(0.15)
    assert len(caplog.messages) == count  # its thread has ended


def test_it_names_the_instruction_of_a_pipeline_that_does_not_go_on() -> None:
    go_on = threading.Event()

    def stuck(y: Any, x: Any) -> Any:
        if np.any(np.asarray(x) == 3.0):
            go_on.wait(120)
        return y

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> jax.Array:
            y = jnp.tanh(x @ w["a"])
            y = y + jax.pure_callback(stuck, jax.ShapeDtypeStruct(y.shape, y.dtype), jax.lax.stop_gradient(y), x)
            return jnp.square(y @ w["b"]).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

    method = alpa_lite.Pipeline(num_stages=2, schedule="gpipe")
    planned = alpa_lite.parallelize(step, method=method, num_microbatches=2, allow_inexact=True)
    w = {"a": np.ones((8, 8), np.float32), "b": np.ones((8, 8), np.float32)}
    x = np.ones((8, 8), np.float32)
    x[-1] = 3.0  # in the last micro-batch
    w = planned(w, x * 0)
    said = planned.plan(w, x).explain("pure_callback")
    (stage,) = re.findall(r"^pure_callback \(stage (\d)\)$", str(said), re.MULTILINE)
    with alpa_lite.Watchdog() as one:
        caller = threading.Thread(target=lambda: jax.block_until_ready(planned(w, x)))
        caller.start()
        try:
            standing = rf"step 1 of step, instruction \d+ of \d+, run stage {stage} forward, micro-batch 1\b"
            wait_for(lambda: re.match(standing, one.describe()))
        finally:
            go_on.set()
            caller.join()


@pytest.mark.slow
def test_processes_that_wait_for_one_another_end_and_name_it(tmp_path: Path) -> None:
    run = driver.launch(tmp_path, STANDING, "--grace", "60")
    assert run.returncode == watchdog.EXIT_CODE, run.stderr
    ends = [line for line in run.stderr.splitlines() if "this process ends" in line]
    assert ends  # where process 1 is the first to end, the collective of process 0 may fail before it has its time
    assert all(
        re.search(r"Process 0[^,]*, for \d+ s: step 3 of sgd; Process 1[^,]*, for \d+ s: between", e) for e in ends
    )
